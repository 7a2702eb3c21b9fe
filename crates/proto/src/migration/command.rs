//! Commands of the machine to the daemon, and the daemon's answers.
//!
//! Each [`Command`] carries a [`CommandToken`] and is answered by exactly one [`Completion`] with that token, sooner or later.
//! Commands of one move take effect in the order they were given. An undoing command may arrive while another is under
//! way, which is then best cut short. Effects are idempotent: a restarted daemon repeats them. The epoch of a flow's
//! entry never decreases. A command that undoes something succeeds for a process, socket or entry that has disappeared
//! meanwhile.
//!
//! "Saves" means: to a place where a restarted daemon on this host finds it ([`super::RecoveredMove`]).
//!
//! | command | role | the daemon |
//! | --- | --- | --- |
//! | `Check` | donor | reads the resources the process uses and names obstacles (including a flow in a handoff); touches nothing |
//! | `CopyRound` | donor | the first round saves the move, begins to track changes, and waits for the acceptor's verdict before it sends memory; each round sends the changes since the one before |
//! | `SaveFlows` | donor | saves the flows that may be diverted from then on, and the peers |
//! | `Freeze` | donor | saves that it freezes, switches each flow to "transit out", stops the process, sends the rest; repeated for flows that appeared late. A clone's original is stopped, sent, and resumed |
//! | `Thaw` | donor | undoes `Freeze`: flows owned at the given epochs, the process continues. A saved `SaveFlows` stays until `Forget`, without flows |
//! | `Release` | donor | flows become "moved", kept ones owned; the process is ended silently (with post-copy: once all its pages have been fetched, or no node can fetch them any more); saved state is removed |
//! | `Examine` | acceptor | checks policy, files, libraries, numbers, memory and disk; touches nothing |
//! | `Build` | acceptor | makes the stub process, saves the move, receives the pages of the rounds |
//! | `Arm` | acceptor | arms the hold of the flows ("transit in", at the donor's epoch and one) |
//! | `Restore` | acceptor | waits for the bytes, saves flows, peers and that a commit may be requested, puts everything into the stub process; nothing may leave or run yet |
//! | `Resume` | acceptor | flows owned at the given epochs, holds flushed, sockets of `lost_flows` flows closed silently, the process runs; saves that it does. Once saved, a repetition changes nothing |
//! | `Discard` | acceptor | removes the stub process, holds, sockets and saved state |
//! | `Forget` | donor, acceptor | removes saved state; the process stays |
//! | `Translate` | peer | see [`holdfast_wire::move_frames::TranslationStep`]; a preparation is saved. Below the hop count of the connection's last switch it changes nothing and succeeds |
//! | `Arbitrate`, `Lookup` | holder | as the handoff's commands of that name, in one order with them |

pub use crate::machine_output::FlowEpoch;

use super::freeze_cost::ProcessTree;
use bytes::Bytes;
use core::time::Duration;
use holdfast_wire::failure::Failure;
use holdfast_wire::move_frames::{
    DonorFlowEpoch, MoveOffer, PeerConnections, SocketStrategy, StepTime, TranslationStep,
};
use holdfast_wire::{ChangeRefusal, Flow, MoveId, NodeId, OwnershipChange, OwnershipRecord};

/// Identifies a command, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandToken(pub u64);

/// Identifies a process (with all its children) of this node, by the daemon's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// An operation for the daemon; the table in the module documentation defines each.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what their types say
pub enum Command {
    Check {
        token: CommandToken,
        process: ProcessId,
        clone: bool,
    },
    CopyRound {
        token: CommandToken,
        id: MoveId,
        process: ProcessId,
        to: NodeId,
        sockets: SocketStrategy,
        /// True for a clone: the original stays, with its connections.
        clone: bool,
        /// True to send checksums of the stopped process last.
        verify: bool,
        /// True to end the round with the acceptor's verdict, before memory is sent.
        rehearsal: bool,
        /// Number of the round, from 1 on.
        round: u32,
    },
    SaveFlows {
        token: CommandToken,
        id: MoveId,
        /// All flows of the process, each time.
        flows: Vec<DonorFlowEpoch>,
        peers: Vec<PeerConnections>,
    },
    Freeze {
        token: CommandToken,
        id: MoveId,
        /// The flows, with the epochs of their transits.
        flows: Vec<FlowEpoch>,
        /// True to leave the remaining pages here until they are fetched (post-copy).
        post_copy: bool,
        /// True to resume the original as soon as it is copied.
        clone: bool,
    },
    Thaw {
        token: CommandToken,
        id: MoveId,
        flows: Vec<FlowEpoch>,
    },
    Release {
        token: CommandToken,
        id: MoveId,
        /// Node to which stragglers are forwarded.
        to: NodeId,
        /// The flows, with the epochs at which they moved away.
        flows: Vec<FlowEpoch>,
        /// Flows that the process closed before the freeze: their remains belong to this node, at these epochs.
        kept: Vec<FlowEpoch>,
        /// Connections whose packets this node continues to forward, in both directions.
        forwarded: Vec<Flow>,
    },
    Examine {
        token: CommandToken,
        id: MoveId,
        offer: MoveOffer,
    },
    Build {
        token: CommandToken,
        id: MoveId,
        offer: MoveOffer,
    },
    Arm {
        token: CommandToken,
        id: MoveId,
        /// The flows, with the epochs at which the *donor* owns them; the entries on this node get the next ones.
        flows: Vec<DonorFlowEpoch>,
    },
    Restore {
        token: CommandToken,
        id: MoveId,
        flows: Vec<DonorFlowEpoch>,
        peers: Vec<PeerConnections>,
        forwarded: Vec<Flow>,
        /// Number of bytes that the donor sent while the process was frozen.
        bytes: u64,
    },
    Resume {
        token: CommandToken,
        id: MoveId,
        flows: Vec<FlowEpoch>,
        /// Restored flows that have another owner meanwhile.
        lost_flows: Vec<Flow>,
    },
    Discard {
        token: CommandToken,
        id: MoveId,
    },
    Forget {
        token: CommandToken,
        id: MoveId,
    },
    Translate {
        token: CommandToken,
        id: MoveId,
        hops: u32,
        step: TranslationStep,
        to: NodeId,
        /// The connections as the moving process sees them: here, local and remote are exchanged.
        connections: Vec<Flow>,
    },
    Arbitrate {
        token: CommandToken,
        asker: NodeId,
        changes: Vec<OwnershipChange>,
    },
    Lookup {
        token: CommandToken,
        flows: Vec<Flow>,
    },
}

/// Report on a process that can move.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Number of earlier moves of the process.
    pub hops: u32,
    /// Bytes of memory to send.
    pub memory: u64,
    /// Number of its processes, threads and mappings.
    pub tree: ProcessTree,
    /// All its sockets.
    pub sockets: u32,
    /// Its flows; none for a clone.
    pub flows: Vec<DonorFlowEpoch>,
    /// Its connections to other nodes with a daemon, grouped by the current node of the other end.
    pub peers: Vec<PeerConnections>,
    /// Its connections to hosts without a daemon, which this node will continue to forward.
    pub forwarded: Vec<Flow>,
    /// Description of its resources for the acceptor; coded by `checkpoint`.
    pub description: Bytes,
}

/// Report on a round of copying.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoundReport {
    /// The acceptor's reasons for refusing the process, as seen from this node; the other fields are then empty.
    pub refusals: Vec<Failure>,
    /// Bytes of memory and sockets sent.
    pub sent_bytes: u64,
    /// Bytes that compression saved.
    pub saved_bytes: u64,
    /// Approximate bytes changed since the last memory scan: the next round, or the freeze, would send these.
    pub dirty_bytes: u64,
    /// Time in which they were changed.
    pub dirty_interval: Duration,
    /// Duration of the round, from the scan until the last byte was sent.
    pub duration: Duration,
    /// Current value, as in [`CheckReport`].
    pub tree: ProcessTree,
    /// Current value, as in [`CheckReport`].
    pub sockets: u32,
    /// Current value, as in [`CheckReport`].
    pub flows: Vec<DonorFlowEpoch>,
    /// Current value, as in [`CheckReport`].
    pub peers: Vec<PeerConnections>,
    /// Current value, as in [`CheckReport`].
    pub forwarded: Vec<Flow>,
}

/// Report on a freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreezeReport {
    /// Time since the process was stopped.
    pub stopped_for: Duration,
    /// Bytes sent since it was stopped.
    pub sent_bytes: u64,
    /// Bytes that compression saved.
    pub saved_bytes: u64,
    /// Bytes of memory left to post-copy, if the command allowed it.
    pub post_copy_bytes: u64,
    /// Flows of the command that were closed before.
    pub closed_flows: Vec<Flow>,
    /// Flows of the process that no command named: they appeared after the last round.
    pub late_flows: Vec<DonorFlowEpoch>,
    /// Durations of the steps since the process was stopped.
    pub steps: Vec<StepTime>,
}

/// The completion of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Token of the command.
    pub token: CommandToken,
    /// Results of the command.
    pub results: Results,
}

/// Results of the command of the corresponding name.
///
/// After a failed `CopyRound`, `SaveFlows` or `Freeze` the machine resumes the process (`Thaw`), unless it moved after
/// all; after a failed `Build`, `Arm` or `Restore` it discards. A failed `Thaw`, `Release` or `Resume` is retried, five
/// times.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Results {
    /// The report, or all obstacles.
    Checked(Result<CheckReport, Vec<Failure>>),
    Copied(Result<RoundReport, Failure>),
    FlowsSaved(Result<(), Failure>),
    Frozen(Result<FreezeReport, Failure>),
    Thawed(Result<(), Failure>),
    Released(Result<(), Failure>),
    /// Success, or all obstacles.
    Examined(Result<(), Vec<Failure>>),
    Built(Result<(), Failure>),
    Armed(Result<(), Failure>),
    Restored(Result<(), Failure>),
    Resumed(Result<ResumeReport, Failure>),
    Discarded,
    Forgotten,
    Translated(Result<(), Failure>),
    Arbitrated(Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>),
    LookedUp(Vec<Option<OwnershipRecord>>),
}

/// Report on a process that runs here after a move.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResumeReport {
    /// Time since it began to run.
    pub running_for: Duration,
    /// Durations of the restore's steps.
    pub steps: Vec<StepTime>,
}
