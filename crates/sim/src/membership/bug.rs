//! Deliberate bugs, each of which breaks one rule of the state machine or its daemon: the oracles must detect every
//! one.

/// A deliberate bug: the rule of the membership that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MembershipBug {
    /// A vote leaves a node before the disk has it.
    VotesBeforeDisk,
    /// The contact node counts its lease from its last heartbeat, not from the one that was answered.
    GrantCountsFromArrival,
    /// The contact node takes a lease twice as long as the voters' promise.
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
    /// The store of views replaces its view without a comparison.
    StoreComparesNothing,
    /// A member of the store answers reads although it may miss newer views.
    StoreReadsAreStale,
    /// A client of the store takes a lost answer for a stored view.
    StoreSilenceIsConsent,
    /// An answer of the store counts as that to the newest request.
    StoreAnswerCountsForNewest,
    /// A new contact node does not wait for the end of the former one's lease.
    ServesBeforeFormerLeaseEnds,
}

impl MembershipBug {
    /// All bugs of groups that vote.
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

    /// All bugs of groups whose views are in a store.
    pub const OF_STORE: [MembershipBug; 13] = [
        MembershipBug::StoreComparesNothing,
        MembershipBug::StoreReadsAreStale,
        MembershipBug::StoreSilenceIsConsent,
        MembershipBug::StoreAnswerCountsForNewest,
        MembershipBug::ServesBeforeFormerLeaseEnds,
        MembershipBug::LeaseOutlivesPromise,
        MembershipBug::ServesPastLease,
        MembershipBug::ClocksDrift,
        MembershipBug::ReusesNodeIds,
        MembershipBug::JoinsOnce,
        MembershipBug::AnswersBeforeVote,
        MembershipBug::GuestPassesForContact,
        MembershipBug::NoTimers,
    ];

    /// Returns the bugs of both kinds of groups.
    #[must_use]
    pub fn all() -> Vec<MembershipBug> {
        let of_store = MembershipBug::OF_STORE.into_iter();
        let others = of_store.filter(|bug| !MembershipBug::ALL.contains(bug));
        MembershipBug::ALL.into_iter().chain(others).collect()
    }
}
