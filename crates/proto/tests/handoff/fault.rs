//! Deliberate faults, each breaking one rule the machine or its daemon keeps. The oracles must find every one.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
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
}

pub const ALL: [Fault; 13] = [
    Fault::ActivatesBeforeCommitted,
    Fault::ResumesUnasked,
    Fault::StaleEpochAccepted,
    Fault::CommitAfterRollback,
    Fault::FreezeKeepsSpeaking,
    Fault::RestartResumes,
    Fault::RestartForgets,
    Fault::AsksOnce,
    Fault::NoFloors,
    Fault::DiscardLeaves,
    Fault::RestoresTwice,
    Fault::DoneLies,
    Fault::ClosesEarly,
];
