//! The donor's second third: a prepared batch is drained, diverted and frozen.
//!
//! Only one batch at a time is between divert and `Done`, so that each has the machine to itself. A batch that fails
//! ends its turn at once and settles in parallel.

use super::donor::{OutboundBatch, OutboundBatchStage};
use super::donor_resume_or_close::EndingFlow;
use super::event::FlowKeptReason;
use super::handoff_core::{CommandPurpose, HandoffTimer, HolderRequestPurpose};
use super::requests_to_holder::HolderAnswers;
use super::{Command, FlowEpoch, Handoff, SendQueueInfo, drain_prediction};
use core::time::Duration;
use holdfast_wire::failure::{Failure, PeerFault};
use holdfast_wire::{ChangeKind, NodeId, OwnershipChange, RecordState};

impl OutboundBatch {
    /// Removes a flow from the batch.
    pub(super) fn remove_flow(
        &mut self,
        seq: u64,
        index: usize,
        frozen: bool,
        reason: FlowKeptReason,
    ) -> EndingFlow {
        let flow = &mut self.flows[index];
        flow.is_active = false;
        EndingFlow {
            flow: flow.flow,
            epoch: flow.epoch,
            acceptor: self.acceptor,
            request: Some(flow.request),
            batch: Some(seq),
            is_frozen: frozen,
            is_taken: false,
            reason,
            is_reported: false,
            in_doubt: false,
        }
    }

    /// Removes all remaining flows from the batch.
    pub(super) fn remove_all_flows(
        &mut self,
        seq: u64,
        frozen: bool,
        reason: &FlowKeptReason,
    ) -> Vec<EndingFlow> {
        let active: Vec<usize> = self.active_indices().collect();
        active
            .into_iter()
            .map(|index| self.remove_flow(seq, index, frozen, reason.clone()))
            .collect()
    }

    /// Indices of the flows that still move with the batch.
    pub(super) fn active_indices(&self) -> impl Iterator<Item = usize> + '_ {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.is_active)
            .map(|(index, _)| index)
    }

    /// Finishes the current stage and enters `next`; returns the duration of the finished stage.
    pub(super) fn finish_stage(&mut self, now: Duration, next: OutboundBatchStage) -> Duration {
        let elapsed = now.saturating_sub(self.since);
        self.since = now;
        self.stage = next;
        elapsed
    }
}

impl Handoff {
    /// Returns the batch with number `seq`, if it is in `stage`.
    pub(super) fn batch_in_stage(
        &mut self,
        seq: u64,
        stage: OutboundBatchStage,
    ) -> Option<&mut OutboundBatch> {
        let batch = self.donor.batches.get_mut(&seq)?;
        (batch.stage == stage).then_some(batch)
    }

    pub(super) fn set_deadline(&mut self, seq: u64, deadline: Option<Duration>) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        if let Some(old) = std::mem::replace(&mut batch.deadline, deadline) {
            self.core
                .timers
                .remove(&(old, HandoffTimer::OutboundBatch(seq)));
        }
        if let Some(deadline) = deadline {
            self.core
                .timers
                .insert((deadline, HandoffTimer::OutboundBatch(seq)));
        }
    }

    /// Handles `PrepareResponse`: the acceptor made sockets, or refuses flows.
    pub(super) fn on_prepared(
        &mut self,
        now: Duration,
        from: NodeId,
        seq: u64,
        results: Vec<Result<(), Failure>>,
    ) {
        let Some(batch) = self.batch_in_stage(seq, OutboundBatchStage::Preparing) else {
            return self.core.outputs.report_ignored(
                from,
                "PrepareResponse",
                "the batch is not being prepared",
            );
        };
        if batch.acceptor != from || batch.flows.len() != results.len() {
            return self.core.outputs.report_ignored(
                from,
                "PrepareResponse",
                "the sender or the number of results does not match the batch",
            );
        }
        let elapsed = batch.finish_stage(now, OutboundBatchStage::Waiting);
        batch.phases.prepare += elapsed;
        let mut refused = Vec::new();
        for (index, result) in results.into_iter().enumerate() {
            if let Err(error) = result {
                let ending_flow = batch.remove_flow(
                    seq,
                    index,
                    false,
                    FlowKeptReason::Refused {
                        by: from,
                        why: error.from_peer(),
                    },
                );
                let epoch = ending_flow.epoch;
                refused.push((ending_flow, epoch));
            }
        }
        self.set_deadline(seq, None);
        self.resume(refused);
        if !self.drain(now, seq) {
            self.enqueue_for_freeze(now, seq);
        }
    }

    /// Waits for the send queues of a batch, if the request wants a drain and one is worthwhile.
    fn drain(&mut self, now: Duration, seq: u64) -> bool {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return false;
        };
        let Some(limit) = batch.drain else {
            return false;
        };
        let active: Vec<_> = batch
            .active_indices()
            .map(|index| &batch.flows[index])
            .collect();
        let drain_waits = active
            .iter()
            .map(|flow| drain_prediction::drain_wait(&flow.queue, limit));
        let wait = drain_waits.max().unwrap_or_default();
        if wait.is_zero() {
            return false;
        }
        let flows = active.iter().map(|flow| flow.flow).collect();
        batch.stage = OutboundBatchStage::Draining;
        let deadline = now + wait;
        self.core
            .push_command(CommandPurpose::Drain(seq), |token| Command::Drain {
                token,
                flows,
                deadline,
            });
        true
    }

    pub(super) fn on_drained(&mut self, now: Duration, seq: u64, queues: Vec<SendQueueInfo>) {
        let Some(batch) = self.batch_in_stage(seq, OutboundBatchStage::Draining) else {
            return;
        };
        let active: Vec<usize> = batch.active_indices().collect();
        for (index, queue) in active.into_iter().zip(queues) {
            batch.flows[index].queue = queue;
        }
        batch.stage = OutboundBatchStage::Waiting;
        self.enqueue_for_freeze(now, seq);
    }

    fn enqueue_for_freeze(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get(&seq) else {
            return self.start_next_freeze(now);
        };
        if batch.active_indices().next().is_none() {
            // The acceptor refused all flows.
            self.start_settling(now, seq);
        } else {
            self.donor.freeze_queue.push_back(seq);
        }
        self.start_next_freeze(now);
    }

    /// Starts the freeze of the next batch.
    pub(super) fn start_next_freeze(&mut self, now: Duration) {
        while self.donor.freezing_batch.is_none() && !self.donor.is_paused {
            let Some(seq) = self.donor.freeze_queue.pop_front() else {
                return;
            };
            if self
                .batch_in_stage(seq, OutboundBatchStage::Waiting)
                .is_some()
            {
                self.donor.freezing_batch = Some(seq);
                self.donor.busy_since.get_or_insert(now);
                self.request_divert(now, seq);
            }
        }
    }

    /// Pauses at the end of a turn, if other programs need the processors: for half as long as the donor was busy.
    pub(super) fn start_yield_pause(&mut self, now: Duration) {
        let donor = &mut self.donor;
        let has_more = !donor.lanes.is_empty() || !donor.freeze_queue.is_empty();
        let busy_since = donor.busy_since.take_if(|_| donor.is_yielding || !has_more);
        if let Some(since) = busy_since.filter(|_| has_more) {
            donor.is_paused = true;
            let pause = (now.saturating_sub(since) / 2).min(self.core.config.yield_pause_max);
            self.core
                .timers
                .insert((now + pause, HandoffTimer::YieldPauseEnd));
        }
    }

    /// Ends the donor's pause, and goes on with its handoffs.
    pub(super) fn end_yield_pause(&mut self, now: Duration) {
        self.donor.is_paused = false;
        self.donor.busy_since = Some(now);
        let lanes: Vec<NodeId> = self.donor.lanes.keys().copied().collect();
        for acceptor in lanes {
            self.advance_lane(now, acceptor);
        }
    }

    fn request_divert(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        let acceptor = batch.acceptor;
        let mut changes = Vec::new();
        let mut queued = 0;
        for flow in batch.flows.iter().filter(|flow| flow.is_active) {
            changes.push(OwnershipChange {
                flow: flow.flow,
                kind: ChangeKind::Divert { acceptor },
                epoch: flow.epoch,
            });
            queued +=
                super::batch_cost::STATE_BYTES + drain_prediction::bytes_to_move(&flow.queue, None);
        }
        batch.predicted = self.donor.model.predict(changes.len(), queued);
        let deadline = now + self.core.config.divert_timeout;
        let request = self.request_changes(now, changes, HolderRequestPurpose::Divert(seq));
        if let Some(batch) = self.donor.batches.get_mut(&seq) {
            batch.phases.drain = batch.finish_stage(now, OutboundBatchStage::Diverting(request));
        }
        self.set_deadline(seq, Some(deadline));
        self.on_preparation_ended(now, acceptor);
    }

    /// Handles the end of a batch's preparation in the lane.
    pub(super) fn on_preparation_ended(&mut self, now: Duration, acceptor: NodeId) {
        if let Some(lane) = self.donor.lanes.get_mut(&acceptor) {
            lane.preparing_batches = lane.preparing_batches.saturating_sub(1);
        }
        self.advance_lane(now, acceptor);
    }

    pub(super) fn on_diverted(&mut self, now: Duration, seq: u64, answers: HolderAnswers) {
        let (node, view_epoch) = (self.core.config.node, self.core.view.epoch);
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.diverted_in_view = view_epoch;
        batch.phases.divert = batch.finish_stage(now, OutboundBatchStage::Freezing);
        let acceptor = batch.acceptor;
        let transit = RecordState::Transit {
            donor: node,
            acceptor,
        };
        let active: Vec<usize> = batch.active_indices().collect();
        let mut flows = Vec::with_capacity(active.len());
        let mut refused = Vec::new();
        for (index, answer) in active.into_iter().zip(answers) {
            match answer {
                Ok(Some(record)) if record.state == transit => {
                    let flow = batch.flows[index].flow;
                    flows.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                Ok(record) => {
                    let refusal = holdfast_wire::ChangeRefusal { current: record };
                    let ending_flow =
                        batch.remove_flow(seq, index, false, FlowKeptReason::NotDiverted(refusal));
                    refused.push((ending_flow, record));
                }
                Err(refusal) => {
                    let ending_flow =
                        batch.remove_flow(seq, index, false, FlowKeptReason::NotDiverted(refusal));
                    refused.push((ending_flow, refusal.current));
                }
            }
        }
        self.set_deadline(seq, None);
        let (mut flows_to_resume, mut flows_to_close) = (Vec::new(), Vec::new());
        for (ending_flow, record) in refused {
            self.decide_by_record(
                ending_flow,
                record,
                &mut flows_to_resume,
                &mut flows_to_close,
            );
        }
        self.resume(flows_to_resume);
        self.close(flows_to_close);
        if flows.is_empty() {
            self.send_abort(acceptor, seq, PeerFault::NoFlowDiverted.into());
            return self.start_settling(now, seq);
        }
        self.core
            .push_command(CommandPurpose::Freeze(seq), |token| Command::Freeze {
                token,
                acceptor,
                flows,
            });
    }
}
