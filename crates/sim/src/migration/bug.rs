//! Deliberate bugs, each breaking one rule that the machine, its daemon or the holder keeps: the oracles must find every one.

/// Which rule is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// An acceptor lets the process run as soon as it asks to commit.
    GoesBeforeCommitted,
    /// A donor lets it go on as soon as it asks to roll back.
    ThawsUnasked,
    /// A donor ends the original as soon as it has sent it.
    ReleasesEarly,
    /// A rollback leaves the process's own record out.
    RollbackWithoutProcess,
    /// A commit leaves it out, and is taken for granted.
    CommitWithoutProcess,
    /// The holder commits a process, and leaves the flows in transit that are to come with it.
    CommitsProcessAlone,
    /// The holder takes any epoch for the right one.
    StaleEpochAccepted,
    /// A freeze leaves the process running.
    FreezeKeepsRunning,
    /// A restarted donor lets a stopped process go on without asking.
    RestartThaws,
    /// A restarted daemon does not look at what was written down.
    RestartForgets,
    /// `Note` writes nothing.
    NotesNothing,
    /// A question to the holder is sent once.
    AsksOnce,
    /// A discard leaves the holds.
    DiscardLeaves,
    /// Peers are told once.
    TellsOnce,
    /// An acceptor's record is removed as soon as it is committed.
    ForgottenEarly,
    /// `Done` says moved for what was refused.
    DoneLies,
    /// The machines' timers do not fire.
    NoTimers,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 17] = [
        Bug::GoesBeforeCommitted,
        Bug::ThawsUnasked,
        Bug::ReleasesEarly,
        Bug::RollbackWithoutProcess,
        Bug::CommitWithoutProcess,
        Bug::CommitsProcessAlone,
        Bug::StaleEpochAccepted,
        Bug::FreezeKeepsRunning,
        Bug::RestartThaws,
        Bug::RestartForgets,
        Bug::NotesNothing,
        Bug::AsksOnce,
        Bug::DiscardLeaves,
        Bug::TellsOnce,
        Bug::ForgottenEarly,
        Bug::DoneLies,
        Bug::NoTimers,
    ];
}
