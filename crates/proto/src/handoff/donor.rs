//! The donor's first half: from a request to batches that are prepared.
//!
//! Flows for one acceptor stand in a lane: *waiting*, then *read* a batch's worth at a time, then carved into batches
//! by predicted freeze. A few batches prepare while one is in its freeze (`give`).

use super::batch::CostModel;
use super::core::{Moving, Purpose, Timer};
use super::event::{Event, Outcome, Phases, Reason};
use super::settle::Settling;
use super::{
    Command, Drain, Handoff, Request, RequestError, RequestId, SendQueueInfo, StaticFlow, drain,
};
use core::time::Duration;
use holdfast_wire::frame::{BatchId, PrepareFlow};
use holdfast_wire::{Epoch, Flow, Frame, NodeId};
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
    waiting: VecDeque<Waiting>,
    reading: Option<Vec<Waiting>>,
    read: VecDeque<Read>,
    /// Batches between `Prepare` and divert.
    pub preparing: usize,
    /// The acceptor failed while flows were being read.
    doomed: Option<Reason>,
}

#[derive(Debug)]
struct Waiting {
    flow: Flow,
    request: RequestId,
    /// The longest wait for its send queue, none for no wait.
    drain: Option<Duration>,
}

#[derive(Debug)]
struct Read {
    waiting: Waiting,
    state: StaticFlow,
    /// How long reading took.
    took: Duration,
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

    /// Moves a lane on: prepares what is read, reads what waits.
    pub(super) fn pump_lane(&mut self, now: Duration, acceptor: NodeId) {
        while self.carve(now, acceptor) {}
        let config = &self.core.config;
        let worth = self
            .donor
            .model
            .flows_that_fit(config.freeze_max, config.batch_flows_max);
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        if lane.reading.is_some() || lane.read.len() >= worth {
            return;
        }
        if lane.waiting.is_empty() {
            if lane.read.is_empty() && lane.preparing == 0 {
                self.donor.lanes.remove(&acceptor);
            }
            return;
        }
        let count = worth.min(lane.waiting.len());
        let reading: Vec<Waiting> = lane.waiting.drain(..count).collect();
        let flows = reading.iter().map(|waiting| waiting.flow).collect();
        lane.reading = Some(reading);
        let purpose = Purpose::Read {
            acceptor,
            since: now,
        };
        self.core
            .command(purpose, |token| Command::ReadStatic { token, flows });
    }

    pub(super) fn static_read(
        &mut self,
        now: Duration,
        acceptor: NodeId,
        since: Duration,
        results: Vec<Result<StaticFlow, Reason>>,
    ) {
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        let reading = lane.reading.take().unwrap_or_default();
        let doomed = lane.doomed.take();
        let took = now - since;
        let mut refused = Vec::new();
        let mut read = Vec::new();
        for (waiting, result) in reading.into_iter().zip(results) {
            match result {
                Ok(state) => read.push(Read {
                    waiting,
                    state,
                    took,
                }),
                Err(reason) => refused.push((waiting, reason)),
            }
        }
        match doomed {
            Some(reason) => self.resume_read(read, acceptor, &reason),
            None => lane.read.extend(read),
        }
        for (waiting, reason) in refused {
            self.core.end_unread(&waiting.flow);
            let outcome = Outcome::Kept { reason };
            self.tell(Some(waiting.request), None, vec![(waiting.flow, outcome)]);
        }
        self.pump_lane(now, acceptor);
    }

    /// Makes one batch of what is read, if it may and if it would be full or there is no more to come.
    fn carve(&mut self, now: Duration, acceptor: NodeId) -> bool {
        let config = &self.core.config;
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return false;
        };
        let Some(first) = lane.read.front() else {
            return false;
        };
        let drain = first.waiting.drain;
        let ahead = if drain.is_some() {
            config.drain_ahead
        } else {
            config.prepare_ahead
        };
        if lane.preparing >= ahead {
            return false;
        }
        let queued = lane
            .read
            .iter()
            .take_while(|read| read.waiting.drain == drain)
            .take(config.batch_flows_max)
            .map(|read| drain::bytes_left(&read.state.queue, drain));
        let count = self
            .donor
            .model
            .fit(queued, config.freeze_max, config.batch_bytes_max);
        let more_to_come = lane.reading.is_some() || !lane.waiting.is_empty();
        if count == lane.read.len()
            && more_to_come
            && count < config.batch_flows_max
            && lane.preparing > 0
        {
            return false;
        }
        lane.preparing += 1;
        let read: Vec<Read> = lane.read.drain(..count).collect();
        self.prepare(now, acceptor, read, drain);
        true
    }

    fn prepare(
        &mut self,
        now: Duration,
        acceptor: NodeId,
        read: Vec<Read>,
        drain: Option<Duration>,
    ) {
        let seq = self.core.number();
        let deadline = now + self.core.config.prepare_timeout;
        let phases = Phases {
            prepare: read.iter().map(|read| read.took).max().unwrap_or_default(),
            ..Phases::default()
        };
        let mut flows = Vec::with_capacity(read.len());
        let mut prepare = Vec::with_capacity(read.len());
        for Read { waiting, state, .. } in read {
            prepare.push(PrepareFlow {
                flow: waiting.flow,
                epoch: state.epoch,
                static_state: state.static_state,
            });
            flows.push(BatchFlow {
                flow: waiting.flow,
                epoch: state.epoch,
                request: waiting.request,
                queue: state.queue,
                active: true,
            });
        }
        let batch = Batch {
            acceptor,
            stage: Stage::Preparing,
            since: now,
            deadline: Some(deadline),
            open: flows.len(),
            flows,
            drain,
            moved: 0,
            kept: 0,
            bytes: 0,
            predicted: Duration::ZERO,
            phases,
            doomed: None,
        };
        self.donor.batches.insert(seq, batch);
        self.core.timers.insert((deadline, Timer::Given(seq)));
        let batch = self.batch_id(seq);
        self.core.send(
            acceptor,
            Frame::Prepare {
                batch,
                flows: prepare,
            },
        );
    }

    pub(super) fn batch_id(&self, seq: u64) -> BatchId {
        BatchId {
            donor: self.core.config.node,
            boot: self.core.config.boot,
            seq,
        }
    }

    /// The acceptor cannot be reached: nothing of the lane goes.
    pub(super) fn fail_lane(&mut self, acceptor: NodeId, reason: &Reason) {
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        let waiting: Vec<Waiting> = lane.waiting.drain(..).collect();
        let read: Vec<Read> = lane.read.drain(..).collect();
        if lane.reading.is_some() {
            lane.doomed = Some(reason.clone());
        }
        self.resume_read(read, acceptor, reason);
        let mut by_request: BTreeMap<RequestId, Vec<_>> = BTreeMap::new();
        for waiting in waiting {
            self.core.end_unread(&waiting.flow);
            let reason = reason.clone();
            let flows = by_request.entry(waiting.request).or_default();
            flows.push((waiting.flow, Outcome::Kept { reason }));
        }
        for (request, flows) in by_request {
            self.tell(Some(request), None, flows);
        }
    }

    /// Lets flows that were only read go on.
    fn resume_read(&mut self, read: Vec<Read>, acceptor: NodeId, reason: &Reason) {
        let flows = read.into_iter().map(|Read { waiting, state, .. }| {
            let settling = Settling {
                flow: waiting.flow,
                epoch: state.epoch,
                acceptor,
                request: Some(waiting.request),
                batch: None,
                frozen: false,
                reason: reason.clone(),
                told: false,
                in_doubt: false,
            };
            (settling, state.epoch)
        });
        let flows = flows.collect();
        self.resume(flows);
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
