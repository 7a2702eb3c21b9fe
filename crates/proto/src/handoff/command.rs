//! What the machine asks of the daemon, and what the daemon answers.
//!
//! Each [`Command`] carries a [`Token`] and is answered by exactly one [`Completion`] with that token, sooner or later;
//! results are per flow in the order of the command. Effects are idempotent: a restarted daemon repeats them.
//! Commands that name the same flow take effect in the order they were given, and so do all `Arbitrate`s. The epoch of
//! an entry never goes down: a `Resume` below it changes nothing and succeeds. What is to be undone for a flow whose
//! socket or entry is gone meanwhile succeeds.
//!
//! | command | who | the daemon |
//! | --- | --- | --- |
//! | `ReadStatic` | donor | checks that each flow is owned here and can move; reads options and queue lengths; begins to copy out-of-order segments |
//! | `Drain` | donor | waits until send queues are empty, at most until the deadline |
//! | `Freeze` | donor | switches each flow to "transit out" **first**, then extracts its state; the order is what makes two speakers impossible |
//! | `Resume` | donor | undoes all of that: repair off, flow owned at the epoch given, the program told "kept"; also for a flow that was only read |
//! | `Close` | donor | flow becomes "moved" to its new owner, the program is told "gone", the socket closed silently |
//! | `PrepareSockets` | acceptor | makes and binds sockets in repair mode, arms the hold ("transit in"), passes the sockets to the program |
//! | `Restore` | acceptor | puts the state into the sockets; nothing may leave yet |
//! | `Activate` | acceptor | repair off, hold flushed in order, flow owned at the epoch given, the program told "go" with its state |
//! | `Discard` | acceptor | closes sockets silently, drops hold and slot, the program told "cancel" |
//! | `Arbitrate` | holder | per change: looks the record up, applies [`crate::ownership::apply`], stores what it gives, all as one step |
//! | `Lookup` | holder | reads records |

use super::Reason;
use bytes::Bytes;
use core::time::Duration;
use holdfast_wire::frame::{BatchId, PrepareFlow};
use holdfast_wire::{Change, Epoch, Flow, NodeId, Record, Refusal};

/// Names a command, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// A flow and the epoch its entry gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowEpoch {
    /// The flow.
    pub flow: Flow,
    /// The epoch that its entry on this node has from then on.
    pub epoch: Epoch,
}

/// What to put into a prepared socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreFlow {
    /// The flow.
    pub flow: Flow,
    /// From [`FrozenFlow::dynamic`] of the donor.
    pub dynamic: Bytes,
    /// From [`FrozenFlow::application`] of the donor.
    pub application: Bytes,
}

/// Something for the daemon to carry out; the table in this module's text says what each means.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what their types say
pub enum Command {
    ReadStatic {
        token: Token,
        flows: Vec<Flow>,
    },
    Drain {
        token: Token,
        flows: Vec<Flow>,
        /// When to stop waiting, in the machine's time.
        deadline: Duration,
    },
    Freeze {
        token: Token,
        acceptor: NodeId,
        /// With the epoch of the transit.
        flows: Vec<FlowEpoch>,
    },
    Resume {
        token: Token,
        flows: Vec<FlowEpoch>,
        /// The holder has not said yet whether these flows, which are not frozen, were diverted: their programs go on,
        /// their entries stay "prepared", so that a restarted daemon asks too. Another `Resume` or `Close` follows.
        in_doubt: bool,
    },
    Close {
        token: Token,
        /// Where stragglers go.
        acceptor: NodeId,
        /// With the epoch at which the flow left.
        flows: Vec<FlowEpoch>,
    },
    PrepareSockets {
        token: Token,
        batch: BatchId,
        /// With the epoch at which the *donor* owns the flow; the entry here gets the next one.
        flows: Vec<PrepareFlow>,
    },
    Restore {
        token: Token,
        batch: BatchId,
        flows: Vec<RestoreFlow>,
    },
    Activate {
        token: Token,
        flows: Vec<FlowEpoch>,
    },
    Discard {
        token: Token,
        flows: Vec<Flow>,
    },
    Arbitrate {
        token: Token,
        asker: NodeId,
        changes: Vec<Change>,
    },
    Lookup {
        token: Token,
        flows: Vec<Flow>,
    },
}

impl Command {
    /// How many results it is to have.
    pub(super) fn results(&self) -> usize {
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

/// What is in a socket's send queue, and how fast it leaves (from `tcp_info`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendQueueInfo {
    /// Bytes not sent yet.
    pub unsent: u32,
    /// Bytes sent and not acknowledged.
    pub unacked: u32,
    /// Bytes received and not read by the program: they move too, and draining does not help.
    pub unread: u32,
    /// Bytes a second the path took lately (`tcpi_delivery_rate`); 0 when not known.
    pub delivery_rate: u64,
    /// The smoothed round-trip time; zero when not known.
    pub rtt: Duration,
}

/// A flow that can move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticFlow {
    /// The epoch of the flow's entry here.
    pub epoch: Epoch,
    /// Socket and TCP options, coded by `sys`.
    pub static_state: Bytes,
    /// Its queues.
    pub queue: SendQueueInfo,
}

/// The state of a flow that is frozen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenFlow {
    /// Sequence numbers and queues, coded by `sys`.
    pub dynamic: Bytes,
    /// What the server program wants its successor to know.
    pub application: Bytes,
}

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Of the command.
    pub token: Token,
    /// What came of it.
    pub results: Results,
}

/// Per flow (per change for `Arbitrated`), in the order of the command of the like name.
///
/// A text says why it failed. Of a failed `Freeze` nothing may have left the flow in another state than "transit out"
/// or as it was: the machine rolls it back. A failed `Restore` or `PrepareSockets` leaves what `Discard` cleans up.
/// `Resume`, `Close`, `Activate` that fail are tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Results {
    ReadStatic(Vec<Result<StaticFlow, Reason>>),
    /// What the queues hold after waiting.
    Drained(Vec<SendQueueInfo>),
    Frozen(Vec<Result<FrozenFlow, String>>),
    Resumed(Vec<Result<(), String>>),
    Closed(Vec<Result<(), String>>),
    PreparedSockets(Vec<Result<(), String>>),
    Restored(Vec<Result<(), String>>),
    Activated(Vec<Result<(), String>>),
    Discarded,
    Arbitrated(Vec<Result<Option<Record>, Refusal>>),
    LookedUp(Vec<Option<Record>>),
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
