//! Deliberate bugs, each of which breaks one rule of the state machine or its daemon: the oracles must detect every
//! one.

/// A deliberate bug: the rule of handoffs that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoffBug {
    /// An acceptor activates the flow when it requests the commit, before the answer.
    ActivatesBeforeCommitted,
    /// A donor resumes the flow when it requests the rollback, before the answer.
    ResumesBeforeAnswer,
    /// The holder accepts any epoch.
    StaleEpochAccepted,
    /// The holder commits a rolled-back flow.
    CommitAfterRollback,
    /// A freeze does not stop the donor from sending.
    FreezeKeepsSending,
    /// A restarted donor resumes its flows without asking the holder.
    RestartResumes,
    /// A restarted daemon ignores the flows in transit.
    RestartForgets,
    /// A request to the holder is never repeated.
    AsksOnce,
    /// New flows start at epoch 1, regardless of earlier flows.
    NoEpochFloors,
    /// A discard leaves the kernel's entry.
    DiscardLeavesEntry,
    /// State is restored into the socket twice.
    RestoresTwice,
    /// `Done` reports refused flows as moved.
    DoneReportsSuccess,
    /// A donor closes when the acceptor has prepared, before the commit.
    ClosesEarly,
    /// The state machines' timers do not fire.
    NoTimers,
    /// A new holder decides about transits before both parties have reported.
    DecidesBeforeReports,
    /// A node reports what its filters have, and not what a former holder has decided since.
    ReportsWithoutDecisions,
    /// An acceptor reports flows in transit as its own.
    AcceptorClaimsFlow,
    /// A new holder believes the claim with the highest epoch, whoever makes it.
    BelievesHighestEpoch,
}

impl HandoffBug {
    /// All deliberate bugs of handoffs.
    pub const ALL: [HandoffBug; 18] = [
        HandoffBug::ActivatesBeforeCommitted,
        HandoffBug::ResumesBeforeAnswer,
        HandoffBug::StaleEpochAccepted,
        HandoffBug::CommitAfterRollback,
        HandoffBug::FreezeKeepsSending,
        HandoffBug::RestartResumes,
        HandoffBug::RestartForgets,
        HandoffBug::AsksOnce,
        HandoffBug::NoEpochFloors,
        HandoffBug::DiscardLeavesEntry,
        HandoffBug::RestoresTwice,
        HandoffBug::DoneReportsSuccess,
        HandoffBug::ClosesEarly,
        HandoffBug::NoTimers,
        HandoffBug::DecidesBeforeReports,
        HandoffBug::ReportsWithoutDecisions,
        HandoffBug::AcceptorClaimsFlow,
        HandoffBug::BelievesHighestEpoch,
    ];
}
