//! What the machine asks of the daemon, and what the daemon answers.
//!
//! Each [`Command`] carries a [`Token`] and is answered by exactly one [`Completion`] with that token, sooner or later.
//! Commands of one move take effect in the order they were given: one that undoes may come while another is under way,
//! which is then best cut short. Effects are idempotent: a restarted daemon repeats them. The epoch of a flow's entry never
//! goes down. What is to be undone for a process, socket or entry that is gone meanwhile succeeds.
//!
//! "Writes down" means: where a later life of the daemon on this host finds it ([`super::RecoveredMove`]).
//!
//! | command | who | the daemon |
//! | --- | --- | --- |
//! | `Check` | donor | reads what the process uses and names what cannot move (a flow in a handoff too); touches nothing |
//! | `CopyRound` | donor | the first writes down the move, begins to follow what changes, and waits for the acceptor's verdict before it sends memory; each sends what has changed since the one before |
//! | `Note` | donor | writes down the flows that may be diverted from now on, and the peers |
//! | `Freeze` | donor | writes down that it freezes, switches each flow to "transit out", stops the process, sends the rest. Again with flows that came late. Of a clone: stops, sends and lets go on |
//! | `Thaw` | donor | undoes all of that: flows owned at the epochs given, the process goes on. Until `Forget` it stays written down that the move was noted, if it was, without flows |
//! | `Release` | donor | flows become "moved", those that are kept owned, the process is ended silently (with post-copy: once its memory has been fetched, or nobody can fetch it any more), what was written down is removed |
//! | `Examine` | acceptor | policy, files, libraries, numbers, memory and disk; touches nothing |
//! | `Build` | acceptor | makes the husk that the process is put into, writes down the move, takes what rounds bring |
//! | `Arm` | acceptor | the hold of these flows ("transit in", the donor's epoch and one) |
//! | `Restore` | acceptor | waits for the bytes, writes down flows, peers and that it may be committed, puts everything into the husk; nothing may leave or run yet |
//! | `Go` | acceptor | flows owned at the epochs given, holds flushed, sockets of `lost` flows closed silently, the process runs; writes down that it does. Once this is written, it changes nothing |
//! | `Discard` | acceptor | removes husk, holds, sockets and what was written down |
//! | `Forget` | donor, acceptor | removes what was written down; the process stays |
//! | `Translate` | peer | see [`holdfast_wire::migration::TranslateStep`]; what there is to prepare is written down. Below the hops of the connection's last switch it changes nothing and succeeds |
//! | `Arbitrate`, `Lookup` | holder | as the handoff's commands of that name, in one order with them |

use super::predict::Shape;
use bytes::Bytes;
use core::time::Duration;
use holdfast_wire::migration::{
    FlowAt, Offer, PeerConnections, SocketStrategy, StepTime, TranslateStep,
};
use holdfast_wire::{Change, Epoch, Flow, MoveId, NodeId, Record, Refusal};

/// Names a command, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Names a process (with all its children) of this node; the daemon's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// A flow and the epoch its entry gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowEpoch {
    /// The flow.
    pub flow: Flow,
    /// The epoch that its entry on this node has from then on.
    pub epoch: Epoch,
}

/// Something for the daemon to carry out; the table in this module's text says what each means.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what their types say
pub enum Command {
    Check {
        token: Token,
        process: ProcessId,
        clone: bool,
    },
    CopyRound {
        token: Token,
        id: MoveId,
        process: ProcessId,
        to: NodeId,
        sockets: SocketStrategy,
        /// The original stays, with its connections.
        clone: bool,
        /// Checksums of the stopped process follow all else.
        verify: bool,
        /// The round ends with the acceptor's verdict, before memory is sent.
        rehearsal: bool,
        /// From 1 on.
        round: u32,
    },
    Note {
        token: Token,
        id: MoveId,
        /// All of them each time.
        flows: Vec<FlowAt>,
        peers: Vec<PeerConnections>,
    },
    Freeze {
        token: Token,
        id: MoveId,
        /// With the epoch of the transit.
        flows: Vec<FlowEpoch>,
        /// Memory stays behind and is fetched from here.
        post_copy: bool,
        /// The original goes on as soon as it is copied.
        clone: bool,
    },
    Thaw {
        token: Token,
        id: MoveId,
        flows: Vec<FlowEpoch>,
    },
    Release {
        token: Token,
        id: MoveId,
        /// Where stragglers go.
        to: NodeId,
        /// With the epoch at which the flow left.
        flows: Vec<FlowEpoch>,
        /// Flows that the process had closed: the rest of them is this node's, at these epochs.
        kept: Vec<FlowEpoch>,
        /// Connections whose packets this node goes on to forward, both ways.
        forwarded: Vec<Flow>,
    },
    Examine {
        token: Token,
        id: MoveId,
        offer: Offer,
    },
    Build {
        token: Token,
        id: MoveId,
        offer: Offer,
    },
    Arm {
        token: Token,
        id: MoveId,
        /// With the epoch at which the *donor* owns the flow; the entry here gets the next one.
        flows: Vec<FlowAt>,
    },
    Restore {
        token: Token,
        id: MoveId,
        flows: Vec<FlowAt>,
        peers: Vec<PeerConnections>,
        forwarded: Vec<Flow>,
        /// That the donor sent while the process was frozen.
        bytes: u64,
    },
    Go {
        token: Token,
        id: MoveId,
        flows: Vec<FlowEpoch>,
        /// Restored, but others' meanwhile.
        lost: Vec<Flow>,
    },
    Discard {
        token: Token,
        id: MoveId,
    },
    Forget {
        token: Token,
        id: MoveId,
    },
    Translate {
        token: Token,
        id: MoveId,
        hops: u32,
        step: TranslateStep,
        to: NodeId,
        /// As the moving process sees them: here, local and remote are the other way round.
        connections: Vec<Flow>,
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

/// A process that can move.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// How often it has moved before.
    pub hops: u32,
    /// Bytes of memory that would be sent.
    pub memory: u64,
    /// Its processes, threads and mappings.
    pub shape: Shape,
    /// All its sockets.
    pub sockets: u32,
    /// Its flows; of a clone none.
    pub flows: Vec<FlowAt>,
    /// Its connections to other nodes with a daemon, by where their other ends are now.
    pub peers: Vec<PeerConnections>,
    /// Its connections to hosts without one, which this node will go on to forward.
    pub forwarded: Vec<Flow>,
    /// What it uses, for the acceptor; coded by `sys`.
    pub description: Bytes,
}

/// A round of copying.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoundReport {
    /// Why the acceptor does not take the process: then nothing else is known.
    pub refusals: Vec<String>,
    /// Bytes of memory and sockets sent.
    pub copied: u64,
    /// Bytes more that they would have been without compression.
    pub saved: u64,
    /// Bytes changed since memory was looked at last, about: the next round, or the freeze, would send these.
    pub dirty: u64,
    /// In how long they were changed.
    pub dirtied_in: Duration,
    /// How long it took, from the scan to the last byte's leaving.
    pub duration: Duration,
    /// As in [`CheckReport`], now.
    pub shape: Shape,
    /// As in [`CheckReport`], now.
    pub sockets: u32,
    /// As in [`CheckReport`], now.
    pub flows: Vec<FlowAt>,
    /// As in [`CheckReport`], now.
    pub peers: Vec<PeerConnections>,
    /// As in [`CheckReport`], now.
    pub forwarded: Vec<Flow>,
}

/// A freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreezeReport {
    /// For how long it has stood still.
    pub stands: Duration,
    /// Bytes sent since it was stopped.
    pub bytes: u64,
    /// Bytes more that they would have been without compression.
    pub saved: u64,
    /// Bytes of memory that follow, since the command let them.
    pub follows: u64,
    /// Flows of the command that were closed before.
    pub gone: Vec<Flow>,
    /// Flows of the process that no command named: they came since the last round.
    pub late: Vec<FlowAt>,
    /// What took how long since it was stopped.
    pub steps: Vec<StepTime>,
}

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Of the command.
    pub token: Token,
    /// What came of it.
    pub results: Results,
}

/// What came of the command of the like name.
///
/// A text says why it failed. After a failed `CopyRound`, `Note` or `Freeze` the machine lets the process go on (`Thaw`),
/// unless it moved after all; after a failed `Build`, `Arm` or `Restore` it discards. `Thaw`, `Release` and `Go` that
/// fail are tried again, five times.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Results {
    /// Or all that is in the way.
    Checked(Result<CheckReport, Vec<String>>),
    Copied(Result<RoundReport, String>),
    Noted(Result<(), String>),
    Frozen(Result<FreezeReport, String>),
    Thawed(Result<(), String>),
    Released(Result<(), String>),
    /// Or all that is in the way.
    Examined(Result<(), Vec<String>>),
    Built(Result<(), String>),
    Armed(Result<(), String>),
    Restored(Result<(), String>),
    Gone(Result<Went, String>),
    Discarded,
    Forgotten,
    Translated(Result<(), String>),
    Arbitrated(Vec<Result<Option<Record>, Refusal>>),
    LookedUp(Vec<Option<Record>>),
}

/// A process runs here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Went {
    /// For how long it has.
    pub ago: Duration,
    /// Steps of putting it together.
    pub steps: Vec<StepTime>,
}
