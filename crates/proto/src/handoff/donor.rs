//! The donor's first third: from a request to prepared batches.
//!
//! Flows for one acceptor queue in a lane: *waiting*, then *read* a batch's worth at a time, then carved into batches
//! by predicted freeze. A few batches prepare while one is in its freeze (`give`).

use super::batch_cost::BatchCostModel;
use super::event::{BatchPhaseTimes, Event, FlowHandoffOutcome, FlowKeptReason};
use super::handoff_core::{HandoffTimer, MovingFlow};
use super::{
    DrainPolicy, FlowHandoffRequest, FlowHandoffRequestError, Handoff, RequestId, SendQueueInfo,
    StaticFlow,
};
use core::time::Duration;
use holdfast_wire::{BatchId, Epoch, Flow, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// State of the donor's role in handoffs.
#[derive(Debug)]
pub(super) struct Donor {
    pub lanes: BTreeMap<NodeId, AcceptorLane>,
    requests: BTreeMap<RequestId, RequestProgress>,
    pub batches: BTreeMap<u64, OutboundBatch>,
    pub model: BatchCostModel,
    /// Prepared batches, in the order in which they freeze.
    pub freeze_queue: VecDeque<u64>,
    /// The one batch between divert and `Done`.
    pub freezing_batch: Option<u64>,
    /// True if other programs lack processor time while this node hands off: between batches the donor then pauses for
    /// half as long as it was busy.
    pub is_yielding: bool,
    /// True while the donor pauses and begins no batch.
    pub is_paused: bool,
    /// Time at which the donor began, or continued after a pause; none if there is nothing to hand off.
    pub busy_since: Option<Duration>,
}

#[derive(Debug)]
struct RequestProgress {
    remaining: usize,
    moved: usize,
    kept: usize,
}

/// Flows for one acceptor that are not in a batch yet.
#[derive(Debug, Default)]
pub(super) struct AcceptorLane {
    pub waiting_flows: VecDeque<WaitingFlow>,
    pub flows_being_read: Option<Vec<WaitingFlow>>,
    pub read_flows: VecDeque<FlowWithStaticState>,
    /// Batches between `Prepare` and divert.
    pub preparing_batches: usize,
    /// Reason the lane fails: the acceptor failed while flows were being read.
    pub pending_failure: Option<FlowKeptReason>,
}

#[derive(Debug)]
pub(super) struct WaitingFlow {
    pub flow: Flow,
    pub request: RequestId,
    /// Longest wait for the flow's send queue, none for no wait.
    pub drain: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct FlowWithStaticState {
    pub waiting: WaitingFlow,
    pub state: StaticFlow,
    /// Duration of the read.
    pub read_time: Duration,
}

/// Stage of a batch that this node gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutboundBatchStage {
    Preparing,
    Draining,
    /// Waiting for the turn to freeze.
    Waiting,
    /// Waiting for the holder; the number of the request.
    Diverting(u64),
    Freezing,
    Transferring,
    /// Flows are resumed or closed one by one.
    Settling,
}

/// A batch that this node gives.
#[derive(Debug)]
pub(super) struct OutboundBatch {
    pub acceptor: NodeId,
    pub stage: OutboundBatchStage,
    /// Epoch of the view in which the batch was diverted; 0 before.
    pub diverted_in_view: u64,
    /// Time at which the stage began.
    pub since: Duration,
    /// Time at which the donor gives the batch up.
    pub deadline: Option<Duration>,
    pub flows: Vec<OutboundFlow>,
    /// Longest wait for send queues, none for no wait.
    pub drain: Option<Duration>,
    /// Number of flows without an outcome.
    pub pending_flows: usize,
    pub moved: usize,
    pub kept: usize,
    pub bytes: usize,
    pub predicted: Duration,
    pub phases: BatchPhaseTimes,
    /// Reason the batch fails once its freeze is complete.
    pub pending_failure: Option<FlowKeptReason>,
}

/// A flow of a batch; identified by its index there.
#[derive(Debug)]
pub(super) struct OutboundFlow {
    pub flow: Flow,
    pub epoch: Epoch,
    pub request: RequestId,
    pub queue: SendQueueInfo,
    /// True while the flow still moves with the batch.
    pub is_active: bool,
}

impl Donor {
    pub(super) fn new() -> Donor {
        Donor {
            lanes: BTreeMap::new(),
            requests: BTreeMap::new(),
            batches: BTreeMap::new(),
            model: BatchCostModel::new(),
            freeze_queue: VecDeque::new(),
            freezing_batch: None,
            is_yielding: false,
            is_paused: false,
            busy_since: None,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.batches.is_empty()
    }
}

impl Handoff {
    pub(super) fn start_request(
        &mut self,
        now: Duration,
        request: FlowHandoffRequest,
    ) -> Result<RequestId, FlowHandoffRequestError> {
        let FlowHandoffRequest { flows, to, drain } = request;
        if to == self.core.config.node {
            return Err(FlowHandoffRequestError::ToSelf(to));
        }
        if !self.core.view.contains(to) {
            return Err(FlowHandoffRequestError::UnknownNode(to));
        }
        if flows.is_empty() {
            return Err(FlowHandoffRequestError::NoFlows);
        }
        let drain = match drain {
            DrainPolicy::No => None,
            DrainPolicy::Yes => Some(self.core.config.drain_wait_max),
            DrainPolicy::Within(limit) => Some(limit),
        };
        let id = self.core.next_request_id();
        let progress = RequestProgress {
            remaining: flows.len(),
            moved: 0,
            kept: 0,
        };
        self.donor.requests.insert(id, progress);
        let mut refused = Vec::new();
        let lane = self.donor.lanes.entry(to).or_default();
        for flow in flows {
            if self.core.moving_flows.contains_key(&flow) {
                let reason = FlowKeptReason::AlreadyMoving;
                refused.push((flow, FlowHandoffOutcome::Kept { reason }));
                continue;
            }
            self.core.moving_flows.insert(flow, MovingFlow::default());
            lane.waiting_flows.push_back(WaitingFlow {
                flow,
                request: id,
                drain,
            });
        }
        self.report_outcomes(Some(id), None, refused);
        self.advance_lane(now, to);
        Ok(id)
    }

    pub(super) fn batch_id(&self, seq: u64) -> BatchId {
        BatchId {
            donor: self.core.config.node,
            boot: self.core.config.boot,
            seq,
        }
    }

    /// Reports outcomes, and the end of a batch or a request with its last outcome.
    pub(super) fn report_outcomes(
        &mut self,
        request: Option<RequestId>,
        seq: Option<u64>,
        flows: Vec<(Flow, FlowHandoffOutcome)>,
    ) {
        if flows.is_empty() {
            return;
        }
        let count = flows.len();
        let is_moved = |(_, outcome): &&(Flow, FlowHandoffOutcome)| {
            matches!(outcome, FlowHandoffOutcome::Moved { .. })
        };
        let moved = flows.iter().filter(is_moved).count();
        let batch = seq.map(|seq| self.batch_id(seq));
        self.core.outputs.push_event(Event::Outcome {
            request,
            batch,
            flows,
        });
        if let Some(seq) = seq
            && let Some(batch) = self.donor.batches.get_mut(&seq)
        {
            batch.pending_flows -= count;
            batch.moved += moved;
            batch.kept += count - moved;
            if batch.pending_flows == 0 {
                self.finish_batch(seq);
            }
        }
        if let Some(request) = request
            && let Some(progress) = self.donor.requests.get_mut(&request)
        {
            progress.remaining -= count;
            progress.moved += moved;
            progress.kept += count - moved;
            if progress.remaining == 0 {
                let RequestProgress { moved, kept, .. } = *progress;
                self.donor.requests.remove(&request);
                self.core.outputs.push_event(Event::RequestFinished {
                    request,
                    moved,
                    kept,
                });
            }
        }
    }

    fn finish_batch(&mut self, seq: u64) {
        let Some(batch) = self.donor.batches.remove(&seq) else {
            return;
        };
        if let Some(deadline) = batch.deadline {
            self.core
                .timers
                .remove(&(deadline, HandoffTimer::OutboundBatch(seq)));
        }
        self.core.outputs.push_event(Event::BatchFinished {
            batch: self.batch_id(seq),
            acceptor: batch.acceptor,
            moved: batch.moved,
            kept: batch.kept,
            bytes: batch.bytes,
            predicted: batch.predicted,
            phases: batch.phases,
        });
    }
}
