//! Deliberate faults, each breaking one rule the machine, its daemon or the holder keeps. The oracles must find every one.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
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
}

pub const ALL: [Fault; 15] = [
    Fault::GoesBeforeCommitted,
    Fault::ThawsUnasked,
    Fault::ReleasesEarly,
    Fault::RollbackWithoutProcess,
    Fault::CommitWithoutProcess,
    Fault::StaleEpochAccepted,
    Fault::FreezeKeepsRunning,
    Fault::RestartThaws,
    Fault::RestartForgets,
    Fault::NotesNothing,
    Fault::AsksOnce,
    Fault::DiscardLeaves,
    Fault::TellsOnce,
    Fault::ForgottenEarly,
    Fault::DoneLies,
];
