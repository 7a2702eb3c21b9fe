//! What happened, for logs, metrics and whoever asked.

use super::RequestId;
use core::time::Duration;
use holdfast_wire::frame::BatchId;
use holdfast_wire::{Change, Epoch, Flow, NodeId, Record, Refusal};
use std::fmt;

/// How a handoff ended for one flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The acceptor owns it.
    Moved {
        /// From this epoch on.
        epoch: Epoch,
    },
    /// It stays here and goes on.
    Kept {
        /// Why.
        reason: Reason,
    },
    /// Neither: it was closed meanwhile, here or by its new owner.
    Gone,
}

/// Why a flow stays.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// No such flow here.
    #[error("there is no such flow on this node; `holdfast flow list` shows those there are")]
    UnknownFlow,
    /// Another node has it.
    #[error("the flow is not this node's: {}", owner(.0))]
    OwnedElsewhere(Option<Record>),
    /// It is in a handoff already, as given or as taken.
    #[error("the flow is moving already; try again when that has ended")]
    AlreadyMoving,
    /// Something it uses cannot move.
    #[error("the flow cannot move: {0}")]
    Unmovable(String),
    /// The acceptor refused.
    #[error("node {by} refused: {why}")]
    Refused {
        /// The acceptor.
        by: NodeId,
        /// Its words.
        why: String,
    },
    /// Extraction failed here.
    #[error("its state could not be taken: {0}")]
    Extract(String),
    /// The state is more than a frame may have.
    #[error(
        "its queues hold {bytes} bytes, more than a frame may have; hand it off with drain, or when less is queued"
    )]
    TooBig {
        /// Bytes.
        bytes: usize,
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
    /// The acceptor gave the batch up.
    #[error("node {by} gave up: {why}")]
    Aborted {
        /// The acceptor.
        by: NodeId,
        /// Its words.
        why: String,
    },
    /// The holder knows the flow otherwise than this node.
    #[error("the holder refused to divert it: {0}")]
    NotDiverted(Refusal),
    /// The daemon restarted in the middle.
    #[error("the daemon restarted while the flow moved")]
    Restarted,
}

fn owner(record: &Option<Record>) -> String {
    match record {
        Some(record) => record.to_string(),
        None => "another node's".to_owned(),
    }
}

/// The steps of a handoff, as the donor sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Static state read, sockets made at the acceptor.
    Prepare,
    /// The send queue drained.
    Drain,
    /// The holder told.
    Divert,
    /// Frozen and extracted.
    Extract,
    /// State sent, restored, committed; until the acceptor says so.
    Transfer,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Step::Prepare => "prepare",
            Step::Drain => "drain",
            Step::Divert => "divert",
            Step::Extract => "extract",
            Step::Transfer => "transfer",
        })
    }
}

/// Where the time of a batch went, as its donor knows it. Zero for a phase that was not reached.
///
/// `extract + transfer + restore + commit` is the freeze, as the donor can see it: its end is when `Done` arrives, so
/// it is too long by the way of that frame, which counts as transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// From the command `ReadStatic` until `Prepared`.
    pub prepare: Duration,
    /// Waiting for send queues, and for the turn to freeze.
    pub drain: Duration,
    /// From asking the holder until it answered.
    pub divert: Duration,
    /// From the command `Freeze` until its completion.
    pub extract: Duration,
    /// From there until `Done`, without what the acceptor says it spent.
    pub transfer: Duration,
    /// At the acceptor: from the state's arrival until restored.
    pub restore: Duration,
    /// At the acceptor: from there until active.
    pub commit: Duration,
}

impl Phases {
    /// The freeze as the donor sees it.
    pub fn freeze(&self) -> Duration {
        self.extract + self.transfer + self.restore + self.commit
    }
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// How it ended for some flows of a request; each of its flows is in exactly one of these.
    Outcome {
        /// The request; none for flows found in transit after a restart.
        request: Option<RequestId>,
        /// The batch they were in, if they came that far.
        batch: Option<BatchId>,
        /// Flow by flow.
        flows: Vec<(Flow, Outcome)>,
    },
    /// A batch given by this node has ended; its outcomes were told before.
    BatchFinished {
        /// The batch.
        batch: BatchId,
        /// To whom.
        acceptor: NodeId,
        /// Flows that moved.
        moved: usize,
        /// Flows that did not.
        kept: usize,
        /// Bytes of state sent while frozen, application state included.
        bytes: usize,
        /// The freeze that was predicted.
        predicted: Duration,
        /// Where the time went.
        phases: Phases,
    },
    /// All flows of a request have their outcome.
    RequestFinished {
        /// The request.
        request: RequestId,
        /// Flows that moved.
        moved: usize,
        /// Flows that did not.
        kept: usize,
    },
    /// This node took flows; they are active.
    Accepted {
        /// The batch; none for flows found in transit after a restart.
        batch: Option<BatchId>,
        /// The flows and their epochs.
        flows: Vec<(Flow, Epoch)>,
    },
    /// This node gave up taking flows.
    Discarded {
        /// The batch; none for flows found in transit after a restart.
        batch: Option<BatchId>,
        /// The flows.
        flows: Vec<Flow>,
        /// Why.
        why: String,
    },
    /// The holder answered a change reported by `handle_changes`.
    ///
    /// After an establish the flow's entry gets the epoch of the record.
    Changed {
        /// As reported (a removal may have been asked again with the epoch the holder named).
        change: Change,
        /// The record after it, or why there was none.
        result: Result<Option<Record>, Refusal>,
    },
    /// The holder has not answered for a while; asked again and again. Told once per question.
    HolderSilent {
        /// The holder.
        holder: NodeId,
        /// How many changes wait.
        changes: usize,
    },
    /// A flow's `Resume`, `Close` or `Activate` failed for good.
    Failed {
        /// The flow.
        flow: Flow,
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
