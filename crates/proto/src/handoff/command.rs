//! Commands of the machine to the daemon, and the daemon's answers.
//!
//! Each [`Command`] carries a [`CommandToken`] and is answered by exactly one [`Completion`] with that token, sooner or later;
//! results are per flow in the order of the command. Effects are idempotent: a restarted daemon repeats them.
//! Commands that name the same flow take effect in the order they were given, and so do all `Arbitrate`s. The epoch of
//! an entry never decreases: a `Resume` below it changes nothing and succeeds. A command that undoes something succeeds
//! for a flow that has lost its socket or entry meanwhile.
//!
//! | command | role | the daemon |
//! | --- | --- | --- |
//! | `ReadStatic` | donor | checks that each flow is owned here and can move; reads options and queue lengths; begins to copy out-of-order segments |
//! | `Drain` | donor | waits until send queues are empty, at most until the deadline |
//! | `Freeze` | donor | switches each flow to "transit out" **first**, then extracts its state; this order makes two speakers impossible |
//! | `Resume` | donor | undoes `Freeze` and `ReadStatic`: repair off, flow owned at the given epoch, the program told "kept"; also for a flow that was only read |
//! | `Close` | donor | flow becomes "moved" to its new owner, the program is told "moved", the socket closed silently |
//! | `PrepareSockets` | acceptor | makes and binds sockets in repair mode, arms the hold ("transit in"), passes the sockets to the program |
//! | `Restore` | acceptor | puts the state into the sockets; no packet may leave yet |
//! | `Activate` | acceptor | repair off, hold flushed in order, flow owned at the given epoch, the program told "activate" with its state |
//! | `Discard` | acceptor | closes sockets silently, drops hold and slot, the program told "cancel" |
//! | `Arbitrate` | holder | per change: reads the record, applies [`crate::flow_ownership::apply_change`], stores the result, all as one step |
//! | `Lookup` | holder | reads records |

pub use crate::machine_output::FlowEpoch;

use super::FlowKeptReason;
use bytes::Bytes;
use core::time::Duration;
use holdfast_wire::failure::Failure;
use holdfast_wire::frame::{BatchId, FlowToPrepare};
use holdfast_wire::{ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord};

/// Identifies a command, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandToken(pub u64);

/// State to put into a prepared socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowToRestore {
    /// Flow of the prepared socket.
    pub flow: Flow,
    /// [`FrozenFlow::dynamic`] of the donor.
    pub dynamic: Bytes,
    /// [`FrozenFlow::application`] of the donor.
    pub application: Bytes,
}

/// An operation for the daemon; the table in the module documentation defines each.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what their types say
pub enum Command {
    ReadStatic {
        token: CommandToken,
        flows: Vec<Flow>,
    },
    Drain {
        token: CommandToken,
        flows: Vec<Flow>,
        /// Time at which to stop waiting, by the machine's clock.
        deadline: Duration,
    },
    Freeze {
        token: CommandToken,
        acceptor: NodeId,
        /// The flows, with the epochs of their transits.
        flows: Vec<FlowEpoch>,
    },
    Resume {
        token: CommandToken,
        flows: Vec<FlowEpoch>,
        /// True while the holder has not said if these flows, which are not frozen, were diverted. Their programs
        /// continue, and their entries stay "prepared", so that a restarted daemon asks too. Another `Resume` or
        /// `Close` follows.
        in_doubt: bool,
    },
    Close {
        token: CommandToken,
        /// Node to which stragglers are forwarded.
        acceptor: NodeId,
        /// The flows, with the epochs at which they moved away.
        flows: Vec<FlowEpoch>,
    },
    PrepareSockets {
        token: CommandToken,
        batch: BatchId,
        /// The flows, with the epochs at which the *donor* owns them; the entries on this node get the next ones.
        flows: Vec<FlowToPrepare>,
    },
    Restore {
        token: CommandToken,
        batch: BatchId,
        flows: Vec<FlowToRestore>,
    },
    Activate {
        token: CommandToken,
        flows: Vec<FlowEpoch>,
    },
    Discard {
        token: CommandToken,
        flows: Vec<Flow>,
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

impl Command {
    /// Number of results the command must have.
    pub(super) fn result_count(&self) -> usize {
        match self {
            Command::ReadStatic { flows, .. }
            | Command::Drain { flows, .. }
            | Command::Lookup { flows, .. } => flows.len(),
            Command::Freeze { flows, .. }
            | Command::Resume { flows, .. }
            | Command::Close { flows, .. }
            | Command::Activate { flows, .. } => flows.len(),
            Command::PrepareSockets { flows, .. } => flows.len(),
            Command::Restore { flows, .. } => flows.len(),
            Command::Arbitrate { changes, .. } => changes.len(),
            Command::Discard { .. } => 0,
        }
    }
}

/// Contents of a socket's send queue, and the rate at which it drains (from `tcp_info`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendQueueInfo {
    /// Bytes that have not been sent.
    pub unsent: u32,
    /// Bytes sent and not acknowledged.
    pub unacked: u32,
    /// Bytes received and not read by the program. These bytes move too, and draining does not reduce them.
    pub unread: u32,
    /// Recent throughput of the path (`tcpi_delivery_rate`) in bytes a second; 0 if unknown.
    pub delivery_rate: u64,
    /// The smoothed round-trip time; zero if unknown.
    pub rtt: Duration,
}

/// Static state of a flow that can move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticFlow {
    /// Epoch of the flow's entry on this node.
    pub epoch: Epoch,
    /// Socket and TCP options, coded by `tcp-repair`.
    pub static_state: Bytes,
    /// Queue lengths of the socket.
    pub queue: SendQueueInfo,
}

/// State of a frozen flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenFlow {
    /// Sequence numbers and queues, coded by `tcp-repair`.
    pub dynamic: Bytes,
    /// Application state that the server program passes to its successor.
    pub application: Bytes,
}

/// The completion of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Token of the command.
    pub token: CommandToken,
    /// Results of the command.
    pub results: Results,
}

/// Results per flow (per change for `Arbitrated`), in the order of the command of the corresponding name.
///
/// After a failed `Freeze` a flow must be in "transit out" or in its state before the command; the machine rolls it
/// back. The remains of a failed `Restore` or `PrepareSockets` are cleaned up by `Discard`. A failed `Resume`, `Close`
/// or `Activate` is retried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Results {
    ReadStatic(Vec<Result<StaticFlow, FlowKeptReason>>),
    /// Queue contents after the wait.
    Drained(Vec<SendQueueInfo>),
    Frozen(Vec<Result<FrozenFlow, Failure>>),
    Resumed(Vec<Result<(), Failure>>),
    Closed(Vec<Result<(), Failure>>),
    PreparedSockets(Vec<Result<(), Failure>>),
    Restored(Vec<Result<(), Failure>>),
    Activated(Vec<Result<(), Failure>>),
    Discarded,
    Arbitrated(Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>),
    LookedUp(Vec<Option<OwnershipRecord>>),
}

impl Results {
    pub(super) fn len(&self) -> usize {
        match self {
            Results::ReadStatic(results) => results.len(),
            Results::Drained(queues) => queues.len(),
            Results::Frozen(results) => results.len(),
            Results::Resumed(results)
            | Results::Closed(results)
            | Results::PreparedSockets(results)
            | Results::Restored(results)
            | Results::Activated(results) => results.len(),
            Results::Discarded => 0,
            Results::Arbitrated(results) => results.len(),
            Results::LookedUp(records) => records.len(),
        }
    }
}
