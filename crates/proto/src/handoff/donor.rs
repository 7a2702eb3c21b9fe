//! The donor's first third: from a request to batches that are prepared.
//!
//! Flows for one acceptor stand in a lane: *waiting*, then *read* a batch's worth at a time, then carved into batches
//! by predicted freeze. A few batches prepare while one is in its freeze (`give`).

use super::batch::CostModel;
use super::core::{Moving, Timer};
use super::event::{Event, Outcome, Phases, Reason};
use super::{Drain, Handoff, Request, RequestError, RequestId, SendQueueInfo, StaticFlow};
use core::time::Duration;
use holdfast_wire::{BatchId, Epoch, Flow, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// What a donor knows.
#[derive(Debug)]
pub(super) struct Donor {
    pub lanes: BTreeMap<NodeId, Lane>,
    requests: BTreeMap<RequestId, Progress>,
    pub batches: BTreeMap<u64, Batch>,
    pub model: CostModel,
    /// Prepared batches, in the order in which they freeze.
    pub ready: VecDeque<u64>,
    /// The one batch between divert and `Done`.
    pub turn: Option<u64>,
    /// Others have no processor while this node hands off: between batches it rests for half as long as it was busy.
    pub gives_way: bool,
    /// The donor rests: no batch is begun.
    pub rests: bool,
    /// When it has begun, or has gone on after a rest; none where there is nothing to hand off.
    pub busy_since: Option<Duration>,
}

#[derive(Debug)]
struct Progress {
    left: usize,
    moved: usize,
    kept: usize,
}

/// Flows on their way to one acceptor, before they are in a batch.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub waiting: VecDeque<Waiting>,
    pub reading: Option<Vec<Waiting>>,
    pub read: VecDeque<Read>,
    /// Batches between `Prepare` and divert.
    pub preparing: usize,
    /// The acceptor failed while flows were being read.
    pub doomed: Option<Reason>,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub flow: Flow,
    pub request: RequestId,
    /// The longest wait for its send queue, none for no wait.
    pub drain: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Read {
    pub waiting: Waiting,
    pub state: StaticFlow,
    /// How long reading took.
    pub took: Duration,
}

/// Where a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Preparing,
    Draining,
    /// For its turn.
    Waiting,
    /// The number of the question to the holder.
    Diverting(u64),
    Freezing,
    Transferring,
    /// Flow by flow.
    Settling,
}

/// A batch given.
#[derive(Debug)]
pub(super) struct Batch {
    pub acceptor: NodeId,
    pub stage: Stage,
    /// When the stage began.
    pub since: Duration,
    /// When it is given up.
    pub deadline: Option<Duration>,
    pub flows: Vec<BatchFlow>,
    /// The longest wait for send queues, none for no wait.
    pub drain: Option<Duration>,
    /// Flows without outcome.
    pub open: usize,
    pub moved: usize,
    pub kept: usize,
    pub bytes: usize,
    pub predicted: Duration,
    pub phases: Phases,
    /// Why it fails once its freeze is complete.
    pub doomed: Option<Reason>,
}

/// A flow of a batch; its place is its index.
#[derive(Debug)]
pub(super) struct BatchFlow {
    pub flow: Flow,
    pub epoch: Epoch,
    pub request: RequestId,
    pub queue: SendQueueInfo,
    /// Whether it still goes the batch's way.
    pub active: bool,
}

impl Donor {
    pub(super) fn new() -> Donor {
        Donor {
            lanes: BTreeMap::new(),
            requests: BTreeMap::new(),
            batches: BTreeMap::new(),
            model: CostModel::new(),
            ready: VecDeque::new(),
            turn: None,
            gives_way: false,
            rests: false,
            busy_since: None,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.batches.is_empty()
    }
}

impl Handoff {
    pub(super) fn requested(
        &mut self,
        now: Duration,
        request: Request,
    ) -> Result<RequestId, RequestError> {
        let Request { flows, to, drain } = request;
        if to == self.core.config.node {
            return Err(RequestError::ToSelf(to));
        }
        if !self.core.config.peers.contains(&to) {
            return Err(RequestError::UnknownNode(to));
        }
        if flows.is_empty() {
            return Err(RequestError::NoFlows);
        }
        let drain = match drain {
            Drain::No => None,
            Drain::Yes => Some(self.core.config.drain_wait_max),
            Drain::Within(limit) => Some(limit),
        };
        let id = self.core.request_id();
        let progress = Progress {
            left: flows.len(),
            moved: 0,
            kept: 0,
        };
        self.donor.requests.insert(id, progress);
        let mut refused = Vec::new();
        let lane = self.donor.lanes.entry(to).or_default();
        for flow in flows {
            if self.core.moving.contains_key(&flow) {
                let reason = Reason::AlreadyMoving;
                refused.push((flow, Outcome::Kept { reason }));
                continue;
            }
            self.core.moving.insert(flow, Moving::default());
            lane.waiting.push_back(Waiting {
                flow,
                request: id,
                drain,
            });
        }
        self.tell(Some(id), None, refused);
        self.pump_lane(now, to);
        Ok(id)
    }

    pub(super) fn batch_id(&self, seq: u64) -> BatchId {
        BatchId {
            donor: self.core.config.node,
            boot: self.core.config.boot,
            seq,
        }
    }

    /// Tells outcomes, and that a batch or a request is complete.
    pub(super) fn tell(
        &mut self,
        request: Option<RequestId>,
        seq: Option<u64>,
        flows: Vec<(Flow, Outcome)>,
    ) {
        if flows.is_empty() {
            return;
        }
        let count = flows.len();
        let is_moved = |(_, outcome): &&(Flow, Outcome)| matches!(outcome, Outcome::Moved { .. });
        let moved = flows.iter().filter(is_moved).count();
        let batch = seq.map(|seq| self.batch_id(seq));
        self.core.event(Event::Outcome {
            request,
            batch,
            flows,
        });
        if let Some(seq) = seq
            && let Some(batch) = self.donor.batches.get_mut(&seq)
        {
            batch.open -= count;
            batch.moved += moved;
            batch.kept += count - moved;
            if batch.open == 0 {
                self.batch_finished(seq);
            }
        }
        if let Some(request) = request
            && let Some(progress) = self.donor.requests.get_mut(&request)
        {
            progress.left -= count;
            progress.moved += moved;
            progress.kept += count - moved;
            if progress.left == 0 {
                let Progress { moved, kept, .. } = *progress;
                self.donor.requests.remove(&request);
                self.core.event(Event::RequestFinished {
                    request,
                    moved,
                    kept,
                });
            }
        }
    }

    fn batch_finished(&mut self, seq: u64) {
        let Some(batch) = self.donor.batches.remove(&seq) else {
            return;
        };
        if let Some(deadline) = batch.deadline {
            self.core.timers.remove(&(deadline, Timer::Given(seq)));
        }
        self.core.event(Event::BatchFinished {
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
