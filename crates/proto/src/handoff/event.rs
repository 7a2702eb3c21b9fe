//! Events of a handoff machine: for logs, for metrics, and for the requester.

use super::RequestId;
use crate::machine_output::IgnoredInput;
use core::time::Duration;
use holdfast_wire::failure::{
    Context, Failure, HandoffStep, NodeFault, OperatorFault, PeerFault, ProgramFault, Step,
};
use holdfast_wire::frame::BatchId;
use holdfast_wire::{ChangeRefusal, Epoch, Flow, NodeId, OwnershipChange, OwnershipRecord};
use std::fmt;

/// Outcome of a handoff for one flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlowHandoffOutcome {
    /// The acceptor owns the flow.
    Moved {
        /// First epoch of the acceptor's ownership.
        epoch: Epoch,
    },
    /// The flow stays on this node and continues.
    Kept {
        /// Reason for staying.
        reason: FlowKeptReason,
    },
    /// The flow was closed meanwhile, here or by its new owner.
    Closed,
}

/// Reason for a flow to stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlowKeptReason {
    /// The flow does not exist on this node.
    UnknownFlow,
    /// Another node owns the flow.
    OwnedElsewhere(Option<OwnershipRecord>),
    /// The flow is in a handoff already, here as donor or as acceptor.
    AlreadyMoving,
    /// The flow uses something that cannot move.
    Unmovable(Failure),
    /// The acceptor refused the flow.
    Refused {
        /// Acceptor that refused the flow.
        by: NodeId,
        /// The acceptor's failure, as seen from this node.
        why: Failure,
    },
    /// Extraction of the state failed on this node.
    Extract(Failure),
    /// The state is larger than a frame may be.
    TooBig {
        /// Size of the state in bytes.
        bytes: usize,
    },
    /// A node did not answer in time.
    TimedOut {
        /// The node that did not answer.
        peer: NodeId,
        /// Step of the handoff.
        step: HandoffStep,
    },
    /// The channel to the acceptor was lost.
    PeerLost {
        /// Acceptor whose channel was lost.
        peer: NodeId,
        /// Step of the handoff.
        step: HandoffStep,
    },
    /// The acceptor aborted the batch.
    Aborted {
        /// Acceptor that aborted the batch.
        by: NodeId,
        /// The acceptor's failure, as seen from this node.
        why: Failure,
    },
    /// The holder's record of the flow contradicts this node's request.
    NotDiverted(ChangeRefusal),
    /// The daemon restarted during the handoff.
    Restarted,
}

impl FlowKeptReason {
    /// Returns the failure that keeps the flow here, with the party to blame.
    pub fn failure(&self) -> Failure {
        match self {
            Self::UnknownFlow => OperatorFault::UnknownFlow.into(),
            Self::OwnedElsewhere(record) => OperatorFault::FlowOwnedElsewhere(*record).into(),
            Self::AlreadyMoving => OperatorFault::FlowAlreadyMoving.into(),
            Self::Unmovable(why) => why.clone().within(Context::FlowCannotMove),
            Self::Refused { by, why } => why.clone().within(Context::RefusedBy(*by)),
            Self::Extract(why) => why.clone().within(Context::FlowNotExtracted),
            Self::TooBig { bytes } => ProgramFault::FlowTooBig {
                bytes: *bytes as u64,
            }
            .into(),
            Self::TimedOut { peer, step } => PeerFault::NoAnswer {
                node: *peer,
                step: Step::Handoff(*step),
            }
            .into(),
            Self::PeerLost { peer, step } => PeerFault::ChannelLost {
                node: *peer,
                step: Step::Handoff(*step),
            }
            .into(),
            Self::Aborted { by, why } => why.clone().within(Context::HandoffAbortedBy(*by)),
            Self::NotDiverted(refusal) => PeerFault::FlowNotDiverted(*refusal).into(),
            Self::Restarted => NodeFault::RestartedInHandoff.into(),
        }
    }
}

impl fmt::Display for FlowKeptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl std::error::Error for FlowKeptReason {}

/// Durations of a batch's phases, as its donor measures them. Zero for a phase that was not reached.
///
/// `extract + transfer + restore + commit` is the freeze as the donor can see it. The donor sees its end when `Done`
/// arrives, so the sum exceeds the true freeze by the delay of that frame, which counts as transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BatchPhaseTimes {
    /// From the command `ReadStatic` until `PrepareResponse`.
    pub prepare: Duration,
    /// Time spent waiting for send queues, and for the turn to freeze.
    pub drain: Duration,
    /// From the request to the holder until its answer.
    pub divert: Duration,
    /// From the command `Freeze` until its completion.
    pub extract: Duration,
    /// From the completion of `Freeze` until `Done`, less the time the acceptor reports for itself.
    pub transfer: Duration,
    /// At the acceptor: from the state's arrival until it is restored.
    pub restore: Duration,
    /// At the acceptor: from the end of the restore until the flows are active.
    pub commit: Duration,
}

impl BatchPhaseTimes {
    /// Returns the freeze as the donor sees it.
    pub fn freeze(&self) -> Duration {
        self.extract + self.transfer + self.restore + self.commit
    }
}

/// An event of the handoff machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Outcomes of some flows of a request. Each flow of a request is in exactly one of these events.
    Outcome {
        /// The request; none for flows found in transit after a restart.
        request: Option<RequestId>,
        /// The flows' batch, if they reached one.
        batch: Option<BatchId>,
        /// Outcome of each flow.
        flows: Vec<(Flow, FlowHandoffOutcome)>,
    },
    /// A batch given by this node has ended; its outcomes were reported before.
    BatchFinished {
        /// Batch that has ended.
        batch: BatchId,
        /// Acceptor of the batch.
        acceptor: NodeId,
        /// Number of flows that moved.
        moved: usize,
        /// Number of flows that stayed.
        kept: usize,
        /// Bytes of state sent while frozen, application state included.
        bytes: usize,
        /// Freeze that was predicted for the batch.
        predicted: Duration,
        /// Durations of the batch's phases.
        phases: BatchPhaseTimes,
    },
    /// All flows of a request have their outcome.
    RequestFinished {
        /// Request of which all flows have an outcome.
        request: RequestId,
        /// Number of flows that moved.
        moved: usize,
        /// Number of flows that stayed.
        kept: usize,
    },
    /// Flows taken by this node are active.
    FlowsAccepted {
        /// The batch; none for flows found in transit after a restart.
        batch: Option<BatchId>,
        /// The flows and their epochs.
        flows: Vec<(Flow, Epoch)>,
    },
    /// This node gave up taking flows.
    FlowsDiscarded {
        /// The batch; none for flows found in transit after a restart.
        batch: Option<BatchId>,
        /// Flows that this node gave up taking.
        flows: Vec<Flow>,
        /// Reason for giving up.
        reason: Failure,
    },
    /// The holder answered a change reported by `handle_changes`.
    ///
    /// After an establish the flow's entry gets the epoch of the record.
    ReportAnswered {
        /// The change as reported (a removal may have been repeated with the epoch that the holder named).
        change: OwnershipChange,
        /// The record after the change, or the refusal.
        result: Result<Option<OwnershipRecord>, ChangeRefusal>,
    },
    /// The holder has not answered for a while; requests are repeated. Emitted once per request.
    HolderSilent {
        /// Holder that has not answered.
        holder: NodeId,
        /// Number of waiting changes.
        changes: usize,
    },
    /// A flow's `Close` or `Activate` failed at its last attempt, or a `Resume` failed as often, and is repeated.
    CommandFailed {
        /// Flow whose command failed.
        flow: Flow,
        /// Name of the command.
        command: &'static str,
        /// Failure of the last attempt.
        error: Failure,
    },
    /// A frame or completion was ignored: late, repeated, or never requested.
    Ignored(IgnoredInput),
}

impl From<IgnoredInput> for Event {
    fn from(ignored: IgnoredInput) -> Self {
        Self::Ignored(ignored)
    }
}
