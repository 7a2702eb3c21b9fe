//! A donor's lane: flows for one acceptor are read, carved into batches, and prepared there.

use super::donor::{
    FlowWithStaticState, OutboundBatch, OutboundBatchStage, OutboundFlow, WaitingFlow,
};
use super::donor_resume_or_close::EndingFlow;
use super::event::{BatchPhaseTimes, FlowHandoffOutcome, FlowKeptReason};
use super::handoff_core::{CommandPurpose, HandoffTimer};
use super::{Command, Handoff, RequestId, StaticFlow, drain_prediction};
use core::time::Duration;
use holdfast_wire::frame::FlowToPrepare;
use holdfast_wire::{Frame, NodeId};
use std::collections::BTreeMap;

impl Handoff {
    /// Advances a lane: prepares read flows, reads waiting ones.
    pub(super) fn advance_lane(&mut self, now: Duration, acceptor: NodeId) {
        if self.donor.is_paused {
            return;
        }
        while self.make_batch(now, acceptor) {}
        let config = &self.core.config;
        let target_count = self
            .donor
            .model
            .flows_that_fit(config.freeze_max, config.batch_flows_max);
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        if lane.flows_being_read.is_some() || lane.read_flows.len() >= target_count {
            return;
        }
        if lane.waiting_flows.is_empty() {
            if lane.read_flows.is_empty() && lane.preparing_batches == 0 {
                self.donor.lanes.remove(&acceptor);
            }
            return;
        }
        let count = target_count.min(lane.waiting_flows.len());
        let being_read: Vec<WaitingFlow> = lane.waiting_flows.drain(..count).collect();
        let flows = being_read.iter().map(|flow| flow.flow).collect();
        lane.flows_being_read = Some(being_read);
        let purpose = CommandPurpose::ReadStatic {
            acceptor,
            since: now,
        };
        self.core
            .push_command(purpose, |token| Command::ReadStatic { token, flows });
    }

    pub(super) fn on_static_read(
        &mut self,
        now: Duration,
        acceptor: NodeId,
        since: Duration,
        results: Vec<Result<StaticFlow, FlowKeptReason>>,
    ) {
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        let reading = lane.flows_being_read.take().unwrap_or_default();
        let doomed = lane.pending_failure.take();
        let elapsed = now - since;
        let mut refused = Vec::new();
        let mut read = Vec::new();
        for (waiting, result) in reading.into_iter().zip(results) {
            match result {
                Ok(state) => read.push(FlowWithStaticState {
                    waiting,
                    state,
                    read_time: elapsed,
                }),
                Err(reason) => refused.push((waiting, reason)),
            }
        }
        match doomed {
            Some(reason) => self.resume_read_flows(read, acceptor, &reason),
            None => lane.read_flows.extend(read),
        }
        for (waiting, reason) in refused {
            self.core.end_untouched_move(&waiting.flow);
            let outcome = FlowHandoffOutcome::Kept { reason };
            self.report_outcomes(Some(waiting.request), None, vec![(waiting.flow, outcome)]);
        }
        self.advance_lane(now, acceptor);
    }

    /// Makes one batch of the read flows, if another batch may prepare, and this one would be full or no more flows
    /// follow.
    pub(super) fn make_batch(&mut self, now: Duration, acceptor: NodeId) -> bool {
        let config = &self.core.config;
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return false;
        };
        let Some(first) = lane.read_flows.front() else {
            return false;
        };
        let drain = first.waiting.drain;
        let ahead_max = if drain.is_some() {
            config.drain_ahead
        } else {
            config.prepare_ahead
        };
        if lane.preparing_batches >= ahead_max {
            return false;
        }
        let queued = lane
            .read_flows
            .iter()
            .take_while(|read| read.waiting.drain == drain)
            .take(config.batch_flows_max)
            .map(|read| drain_prediction::bytes_to_move(&read.state.queue, drain));
        let count =
            self.donor
                .model
                .count_that_fit(queued, config.freeze_max, config.batch_bytes_max);
        let more_to_come = lane.flows_being_read.is_some() || !lane.waiting_flows.is_empty();
        if count == lane.read_flows.len()
            && more_to_come
            && count < config.batch_flows_max
            && lane.preparing_batches > 0
        {
            return false;
        }
        lane.preparing_batches += 1;
        let read: Vec<FlowWithStaticState> = lane.read_flows.drain(..count).collect();
        self.prepare(now, acceptor, read, drain);
        true
    }

    fn prepare(
        &mut self,
        now: Duration,
        acceptor: NodeId,
        read: Vec<FlowWithStaticState>,
        drain: Option<Duration>,
    ) {
        let seq = self.core.next_number();
        let deadline = now + self.core.config.prepare_timeout;
        let phases = BatchPhaseTimes {
            prepare: read
                .iter()
                .map(|read| read.read_time)
                .max()
                .unwrap_or_default(),
            ..BatchPhaseTimes::default()
        };
        let mut flows = Vec::with_capacity(read.len());
        let mut prepare = Vec::with_capacity(read.len());
        for FlowWithStaticState { waiting, state, .. } in read {
            prepare.push(FlowToPrepare {
                flow: waiting.flow,
                epoch: state.epoch,
                static_state: state.static_state,
            });
            flows.push(OutboundFlow {
                flow: waiting.flow,
                epoch: state.epoch,
                request: waiting.request,
                queue: state.queue,
                is_active: true,
            });
        }
        let batch = OutboundBatch {
            acceptor,
            stage: OutboundBatchStage::Preparing,
            diverted_in_view: 0,
            since: now,
            deadline: Some(deadline),
            pending_flows: flows.len(),
            flows,
            drain,
            moved: 0,
            kept: 0,
            bytes: 0,
            predicted: Duration::ZERO,
            phases,
            pending_failure: None,
        };
        self.donor.batches.insert(seq, batch);
        self.core
            .timers
            .insert((deadline, HandoffTimer::OutboundBatch(seq)));
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
    pub(super) fn fail_lane(&mut self, acceptor: NodeId, reason: &FlowKeptReason) {
        let Some(lane) = self.donor.lanes.get_mut(&acceptor) else {
            return;
        };
        let waiting: Vec<WaitingFlow> = lane.waiting_flows.drain(..).collect();
        let read: Vec<FlowWithStaticState> = lane.read_flows.drain(..).collect();
        if lane.flows_being_read.is_some() {
            lane.pending_failure = Some(reason.clone());
        }
        self.resume_read_flows(read, acceptor, reason);
        let mut by_request: BTreeMap<RequestId, Vec<_>> = BTreeMap::new();
        for flow in waiting {
            self.core.end_untouched_move(&flow.flow);
            let reason = reason.clone();
            let flows = by_request.entry(flow.request).or_default();
            flows.push((flow.flow, FlowHandoffOutcome::Kept { reason }));
        }
        for (request, flows) in by_request {
            self.report_outcomes(Some(request), None, flows);
        }
    }

    /// Resumes flows that were only read.
    fn resume_read_flows(
        &mut self,
        read: Vec<FlowWithStaticState>,
        acceptor: NodeId,
        reason: &FlowKeptReason,
    ) {
        let flows = read
            .into_iter()
            .map(|FlowWithStaticState { waiting, state, .. }| {
                let ending_flow = EndingFlow {
                    flow: waiting.flow,
                    epoch: state.epoch,
                    acceptor,
                    request: Some(waiting.request),
                    batch: None,
                    is_frozen: false,
                    is_taken: false,
                    reason: reason.clone(),
                    is_reported: false,
                    in_doubt: false,
                };
                (ending_flow, state.epoch)
            });
        let flows = flows.collect();
        self.resume(flows);
    }
}
