//! Deliberate bugs, each breaking one rule that the machine or its daemon keeps: the oracles must find every one.

/// Which rule is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// An acceptor is active as soon as it asks to commit.
    ActivatesBeforeCommitted,
    /// A donor resumes as soon as it asks to roll back.
    ResumesUnasked,
    /// The holder takes any epoch for the right one.
    StaleEpochAccepted,
    /// The holder commits what was rolled back.
    CommitAfterRollback,
    /// A freeze leaves the donor speaking.
    FreezeKeepsSpeaking,
    /// A restarted donor goes on without asking.
    RestartResumes,
    /// A restarted daemon does not look at what was in transit.
    RestartForgets,
    /// A question to the holder is sent once.
    AsksOnce,
    /// New flows start at epoch 1 whatever was before.
    NoFloors,
    /// A discard leaves the entry.
    DiscardLeaves,
    /// State is put into the socket twice.
    RestoresTwice,
    /// `Done` says moved for what was refused.
    DoneLies,
    /// A donor closes when the acceptor has prepared, before anything is committed.
    ClosesEarly,
    /// The machines' timers do not fire.
    NoTimers,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 14] = [
        Bug::ActivatesBeforeCommitted,
        Bug::ResumesUnasked,
        Bug::StaleEpochAccepted,
        Bug::CommitAfterRollback,
        Bug::FreezeKeepsSpeaking,
        Bug::RestartResumes,
        Bug::RestartForgets,
        Bug::AsksOnce,
        Bug::NoFloors,
        Bug::DiscardLeaves,
        Bug::RestoresTwice,
        Bug::DoneLies,
        Bug::ClosesEarly,
        Bug::NoTimers,
    ];
}
