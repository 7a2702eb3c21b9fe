//! Deliberate bugs, each of which breaks one rule of the state machine, its daemon or the holder: the oracles must
//! detect every one.

/// A deliberate bug: the rule of migrations that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationBug {
    /// An acceptor resumes the process when it requests the commit, before the answer.
    ResumesBeforeCommitted,
    /// A donor resumes the process when it requests the rollback, before the answer.
    ThawsBeforeAnswer,
    /// A donor kills the original as soon as it has sent the process.
    ReleasesEarly,
    /// A rollback omits the process's own record.
    RollbackWithoutProcess,
    /// A commit omits the process's own record, and is assumed to succeed.
    CommitWithoutProcess,
    /// The holder commits a process, and leaves the flows in transit that must be committed with it.
    CommitsProcessAlone,
    /// The holder accepts any epoch.
    StaleEpochAccepted,
    /// A freeze does not stop the process.
    FreezeKeepsRunning,
    /// A restarted donor resumes a stopped process without asking the holder.
    RestartThaws,
    /// A restarted daemon ignores its stored records of moves.
    RestartForgets,
    /// `SaveFlows` stores nothing.
    NotesNotStored,
    /// A request to the holder is never repeated.
    AsksOnce,
    /// A discard leaves the holds.
    DiscardLeavesHolds,
    /// A translation request to a peer is never repeated.
    TranslatesOnce,
    /// An acceptor's record is removed as soon as it is committed.
    RecordRemovedEarly,
    /// `Done` reports a refused process as moved.
    DoneReportsSuccess,
    /// The state machines' timers do not fire.
    NoTimers,
    /// A new holder decides about moves before both donor and acceptor have reported.
    DecidesBeforeReports,
    /// A node reports the flows in its filters, and not what it knows about moves.
    ReportsFlowsAlone,
    /// An acceptor reports processes that are not committed as its own.
    AcceptorClaimsProcess,
}

impl MigrationBug {
    /// All deliberate bugs of migrations.
    pub const ALL: [MigrationBug; 20] = [
        MigrationBug::ResumesBeforeCommitted,
        MigrationBug::ThawsBeforeAnswer,
        MigrationBug::ReleasesEarly,
        MigrationBug::RollbackWithoutProcess,
        MigrationBug::CommitWithoutProcess,
        MigrationBug::CommitsProcessAlone,
        MigrationBug::StaleEpochAccepted,
        MigrationBug::FreezeKeepsRunning,
        MigrationBug::RestartThaws,
        MigrationBug::RestartForgets,
        MigrationBug::NotesNotStored,
        MigrationBug::AsksOnce,
        MigrationBug::DiscardLeavesHolds,
        MigrationBug::TranslatesOnce,
        MigrationBug::RecordRemovedEarly,
        MigrationBug::DoneReportsSuccess,
        MigrationBug::NoTimers,
        MigrationBug::DecidesBeforeReports,
        MigrationBug::ReportsFlowsAlone,
        MigrationBug::AcceptorClaimsProcess,
    ];
}
