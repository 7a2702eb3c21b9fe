//! Deliberate bugs, each of which breaks one rule of the state machine or its daemon: the oracles must detect every
//! one.

/// The broken rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MembershipBug {
    /// A vote leaves a node before the disk has it.
    VotesBeforeDisk,
    /// The contact node counts its lease from its last heartbeat, not from the one that was answered.
    GrantCountsFromArrival,
    /// The contact node's lease is longer than the voters' promise.
    LeaseOutlivesPromise,
    /// The kernel serves for half a second after the end of the lease.
    ServesPastLease,
    /// Clocks run up to 40 % fast or slow.
    ClocksDrift,
    /// A restarted voter votes at once.
    RestartVotesAtOnce,
    /// A voter forgets in a crash which view it accepted.
    ForgetsAcceptance,
    /// A voter forgets in a crash which view was committed.
    ForgetsCommit,
    /// A promise does not name the accepted view.
    HidesAcceptedView,
    /// A proposer counts voters that have not answered.
    CountsSilentVoters,
    /// A majority of the new view decides, not one of the view before.
    MajorityOfNewView,
    /// A node obeys a view that is only proposed.
    ObeysProposal,
    /// A restarted contact node gives numbers again.
    ReusesNodeIds,
    /// Nobody tells a removed node of its removal.
    NeverTellsRemoved,
    /// A node asks only once to be taken in.
    JoinsOnce,
    /// The contact node answers a request to change the settings before the vote.
    AnswersBeforeVote,
    /// A daemon asks only once for the list of server nodes.
    AsksForListOnce,
    /// The channel takes the guest's word for its name.
    GuestPassesForContact,
    /// The guest's certificate admits it as a backup.
    GuestIsCertified,
    /// The state machines' timers do not fire.
    NoTimers,
}

impl MembershipBug {
    /// All bugs.
    pub const ALL: [MembershipBug; 20] = [
        MembershipBug::VotesBeforeDisk,
        MembershipBug::GrantCountsFromArrival,
        MembershipBug::LeaseOutlivesPromise,
        MembershipBug::ServesPastLease,
        MembershipBug::ClocksDrift,
        MembershipBug::RestartVotesAtOnce,
        MembershipBug::ForgetsAcceptance,
        MembershipBug::ForgetsCommit,
        MembershipBug::HidesAcceptedView,
        MembershipBug::CountsSilentVoters,
        MembershipBug::MajorityOfNewView,
        MembershipBug::ObeysProposal,
        MembershipBug::ReusesNodeIds,
        MembershipBug::NeverTellsRemoved,
        MembershipBug::JoinsOnce,
        MembershipBug::AnswersBeforeVote,
        MembershipBug::AsksForListOnce,
        MembershipBug::GuestPassesForContact,
        MembershipBug::GuestIsCertified,
        MembershipBug::NoTimers,
    ];
}
