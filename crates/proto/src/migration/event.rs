//! What happened, for logs, metrics and whoever asked.

use core::time::Duration;
use holdfast_wire::migration::StepTime;
use holdfast_wire::{Change, Epoch, Flow, MoveId, NodeId, Record, Refusal};
use std::fmt;

/// How a move ended for its process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It runs at the acceptor, and no more here.
    Moved,
    /// A copy runs at the acceptor, the original here.
    Cloned,
    /// It stays here and runs on.
    Kept {
        /// Why.
        reason: Reason,
    },
}

/// Why a process stays.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It uses what cannot move.
    #[error("the process cannot move: {}", .0.join("; "))]
    Blocked(Vec<String>),
    /// A flow of it takes part in another move.
    #[error("its flow {0} is moving already; try again when that has ended")]
    FlowMoving(Flow),
    /// The other end of one of its connections is moving.
    #[error("the other end of its connection {0} is moving; try again when that has ended")]
    PeerMoving(Flow),
    /// More than a question to the holder may have.
    #[error("it has {0} flows, more than can be moved at once")]
    TooManyFlows(usize),
    /// The acceptor refused.
    #[error("node {by} refused: {}", .whys.join("; "))]
    Refused {
        /// The acceptor.
        by: NodeId,
        /// Its words.
        whys: Vec<String>,
    },
    /// A peer of one of its connections refused.
    #[error("node {by}, which it has connections to, refused: {why}")]
    PeerRefused {
        /// The peer.
        by: NodeId,
        /// Its words.
        why: String,
    },
    /// It would be frozen for longer than was allowed.
    #[error(
        "it would be frozen for {:.1} ms, more than {:.1} ms; allow more, or move it when it does less",
        .predicted.as_secs_f64() * 1e3, .max.as_secs_f64() * 1e3
    )]
    FreezeTooLong {
        /// The least predicted.
        predicted: Duration,
        /// What was allowed.
        max: Duration,
    },
    /// A command failed here.
    #[error("{step} failed: {why}")]
    Failed {
        /// In which step.
        step: Step,
        /// The daemon's words.
        why: String,
    },
    /// No answer in time.
    #[error("node {peer} did not answer in time ({step}); look whether its holdfastd runs")]
    TimedOut {
        /// Who.
        peer: NodeId,
        /// In which step.
        step: Step,
    },
    /// The channel to the acceptor was lost.
    #[error("the channel to node {peer} was lost ({step})")]
    PeerLost {
        /// Who.
        peer: NodeId,
        /// In which step.
        step: Step,
    },
    /// The acceptor gave up.
    #[error("node {by} gave up: {why}")]
    Aborted {
        /// The acceptor.
        by: NodeId,
        /// Its words.
        why: String,
    },
    /// The holder knows it otherwise than this node.
    #[error("the holder refused to divert it: {0}")]
    NotDiverted(Refusal),
    /// Another node has a flow of it.
    #[error("its flow {flow} is not this node's: {record}")]
    NotOurs {
        /// The flow.
        flow: Flow,
        /// Whose it is.
        record: Record,
    },
    /// The daemon restarted in the middle.
    #[error("the daemon restarted while it moved")]
    Restarted,
    /// Somebody wants it so.
    #[error("the move was cancelled")]
    Cancelled,
    /// The acceptor was only asked, and would take it ([`Options::rehearsal`](super::Options::rehearsal)).
    #[error("it was only asked whether it can move, and it can")]
    Rehearsed,
}

/// The steps of a move, as the donor sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// What the process uses is read.
    Check,
    /// The acceptor looks whether it can take it.
    Offer,
    /// Copied while it runs.
    Copy,
    /// Acceptor and peers prepare for the freeze.
    Arm,
    /// The holder is told.
    Divert,
    /// Stopped, and the rest sent.
    Freeze,
    /// Restored and committed; until the acceptor says so.
    Transfer,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Step::Check => "check",
            Step::Offer => "offer",
            Step::Copy => "copy",
            Step::Arm => "arm",
            Step::Divert => "divert",
            Step::Freeze => "freeze",
            Step::Transfer => "transfer",
        })
    }
}

/// Where the time of a move went, as its donor knows it. Zero for a phase that was not reached.
///
/// `extract + transfer + restore + commit` is the freeze, as the donor can see it: it is too long by the way of the frame
/// `Done`, which counts as transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// Check, offer, and all rounds.
    pub copy: Duration,
    /// From the last round until acceptor and peers are prepared.
    pub arm: Duration,
    /// From there until the holder has diverted, and the process stands still.
    pub divert: Duration,
    /// From there until all has been sent.
    pub extract: Duration,
    /// From there until `Done`, without what the acceptor says it spent.
    pub transfer: Duration,
    /// At the acceptor: until restored.
    pub restore: Duration,
    /// At the acceptor: from there until it runs.
    pub commit: Duration,
}

impl Phases {
    /// The freeze as the donor sees it.
    pub fn freeze(&self) -> Duration {
        self.extract + self.transfer + self.restore + self.commit
    }
}

/// What a move was, told with its outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Rounds of copying.
    pub rounds: u32,
    /// Bytes sent in them.
    pub copied: u64,
    /// Bytes sent while it was frozen.
    pub bytes: u64,
    /// Bytes that were not sent, in both, since memory was compressed.
    pub saved: u64,
    /// The freeze that was predicted.
    pub predicted: Duration,
    /// Whether memory followed it.
    pub post_copy: bool,
    /// Bytes of memory that did.
    pub follows: u64,
    /// Where the time went.
    pub phases: Phases,
    /// The freeze step by step, at the donor and at the acceptor, which work at the same time.
    pub steps: Box<[Vec<StepTime>; 2]>,
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A round of copying has ended.
    Round {
        /// The move.
        id: MoveId,
        /// Which round, from 1 on.
        round: u32,
        /// Bytes sent.
        copied: u64,
        /// Bytes more that they would have been without compression.
        saved: u64,
        /// Bytes changed meanwhile.
        dirty: u64,
        /// Bytes that the process changes a second.
        dirty_rate: u64,
        /// Bytes a second of the way to the acceptor.
        rate: u64,
        /// The freeze, were it now.
        predicted: Duration,
    },
    /// These connections will be forwarded by this node: their peers have no daemon, or it did not answer.
    Forwarded {
        /// The move.
        id: MoveId,
        /// The connections.
        connections: Vec<Flow>,
    },
    /// A process runs at the acceptor, and so many bytes of its memory follow it.
    Follows {
        /// The move.
        id: MoveId,
        /// Bytes that were left behind.
        bytes: u64,
    },
    /// A move from this node has ended.
    Outcome {
        /// The move.
        id: MoveId,
        /// How.
        outcome: Outcome,
        /// What it was.
        summary: Box<Summary>,
    },
    /// This node took a process; it runs.
    Accepted {
        /// The move.
        id: MoveId,
        /// Its flows and their epochs.
        flows: Vec<(Flow, Epoch)>,
    },
    /// This node gave up taking a process.
    Discarded {
        /// The move.
        id: MoveId,
        /// Why.
        why: String,
    },
    /// To be reported to the holder, as what `handle_changes` of the handoff takes: it was kept back while it moved.
    Report {
        /// The changes.
        changes: Vec<Change>,
    },
    /// The holder has not answered for a while; asked again and again. Told once per question.
    HolderSilent {
        /// The holder.
        holder: NodeId,
    },
    /// The holder has lost its table while a process was frozen; the acceptor is asked as well.
    HolderForgot {
        /// The move.
        id: MoveId,
    },
    /// A `Thaw`, `Release`, `Go` or `Translate` failed for good.
    Failed {
        /// The move.
        id: MoveId,
        /// The command's name.
        command: &'static str,
        /// The daemon's words.
        why: String,
    },
    /// A frame or completion had no use: late, repeated, or never asked for.
    Ignored {
        /// Who sent it; this node for a completion.
        from: NodeId,
        /// The frame's name.
        what: &'static str,
        /// Why it had no use.
        why: &'static str,
    },
}
