//! A donor's lane: flows for one acceptor are read, carved into batches, and prepared there.

use super::core::{Purpose, Timer};
use super::donor::{Batch, BatchFlow, Read, Stage, Waiting};
use super::event::{Outcome, Phases, Reason};
use super::settle::Settling;
use super::{Command, Handoff, RequestId, StaticFlow, drain};
use core::time::Duration;
use holdfast_wire::frame::PrepareFlow;
use holdfast_wire::{Frame, NodeId};
use std::collections::BTreeMap;

impl Handoff {
    /// Advances a lane: prepares read flows, reads waiting ones.
    pub(super) fn pump_lane(&mut self, now: Duration, acceptor: NodeId) {
        if self.donor.rests {
            return;
        }
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

    /// Makes one batch of the read flows, if another batch may prepare, and this one would be full or no more flows
    /// follow.
    pub(super) fn carve(&mut self, now: Duration, acceptor: NodeId) -> bool {
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

    /// Fails all flows of the lane, because the acceptor cannot be reached.
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

    /// Resumes flows that were only read.
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
}
