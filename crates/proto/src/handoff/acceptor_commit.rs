//! The acceptor's second half: restored flows are committed at the holder and then activated; or they are given up.

use super::acceptor::{InboundBatchStage, InboundFlow};
use super::command_retry::Retryable;
use super::event::Event;
use super::handoff_core::{CommandPurpose, HandoffTimer, HolderRequestPurpose};
use super::requests_to_holder::HolderAnswers;
use super::{Command, FlowEpoch, Handoff};
use core::time::Duration;
use holdfast_wire::failure::{Context, Failure, PeerFault};
use holdfast_wire::frame::BatchId;
use holdfast_wire::{ChangeKind, Flow, Frame, NodeId, OwnershipChange};

/// Number of ended batches to remember, to tell a repeated `Prepare` from a new one.
const ENDED_BATCHES_MAX: usize = 256;

impl Handoff {
    pub(super) fn on_restored(
        &mut self,
        now: Duration,
        batch: BatchId,
        results: Vec<Result<(), Failure>>,
    ) {
        let Some(inbound) = self.inbound_in_stage(batch, InboundBatchStage::Restoring) else {
            return;
        };
        inbound.times.restore_us = inbound.finish_stage(now, InboundBatchStage::Committing);
        if let Some(reason) = inbound.pending_failure.take() {
            return self.discard_batch(batch, reason);
        }
        let mut failed = Vec::new();
        let mut failure = None;
        let mut changes = Vec::new();
        for (index, result) in inbound.active_indices().into_iter().zip(results) {
            match result {
                Ok(()) => changes.push(commit_change(&inbound.flows[index])),
                Err(error) => {
                    let reason = error.within(Context::FlowNotRestored);
                    failure.get_or_insert_with(|| reason.clone());
                    failed.push(inbound.refuse(index, reason));
                }
            }
        }
        if changes.is_empty() {
            self.send_done(now, batch);
        } else {
            self.request_changes(now, changes, HolderRequestPurpose::Commit(batch));
        }
        if let Some(failure) = failure {
            self.discard_flows(Some(batch), failed, failure);
        }
    }

    /// Handles the holder's answer. A flow that the holder does not grant to this node is discarded.
    pub(super) fn on_committed(&mut self, now: Duration, batch: BatchId, answers: HolderAnswers) {
        let node = self.core.config.node;
        let Some(inbound) = self.inbound_in_stage(batch, InboundBatchStage::Committing) else {
            return;
        };
        let mut refused = Vec::new();
        let mut activations = Vec::new();
        for (index, answer) in inbound.active_indices().into_iter().zip(answers) {
            match answer {
                Ok(Some(record)) if record.is_owned_by(node) => {
                    inbound.flows[index].owned_epoch = Some(record.epoch);
                    let flow = inbound.flows[index].flow;
                    activations.push(FlowEpoch {
                        flow,
                        epoch: record.epoch,
                    });
                }
                _ => refused.push(inbound.refuse(index, PeerFault::FlowNotCommitted.into())),
            }
        }
        inbound.stage = InboundBatchStage::Activating;
        if activations.is_empty() {
            self.send_done(now, batch);
        } else {
            self.command_activate(Some(batch), Retryable::first_attempt(activations));
        }
        self.discard_flows(Some(batch), refused, PeerFault::FlowNotCommitted);
    }

    pub(super) fn command_activate(
        &mut self,
        batch: Option<BatchId>,
        retryable: Retryable<FlowEpoch>,
    ) {
        let flows = retryable.flows.clone();
        let purpose = CommandPurpose::Activate(batch, retryable);
        self.core
            .push_command(purpose, |token| Command::Activate { token, flows });
    }

    pub(super) fn on_activated(
        &mut self,
        now: Duration,
        batch: Option<BatchId>,
        retryable: Retryable<FlowEpoch>,
        results: Vec<Result<(), Failure>>,
    ) {
        let (ended, to_retry) = self.core.split_ended(retryable, results, "Activate", true);
        let complete = to_retry.is_none();
        if let Some(to_retry) = to_retry {
            self.core
                .schedule_command_retry(now, CommandPurpose::Activate(batch, to_retry));
        }
        for flow in &ended {
            self.core.end_move(&flow.flow, Some(flow.epoch));
        }
        let flows: Vec<_> = ended
            .into_iter()
            .map(|flow| (flow.flow, flow.epoch))
            .collect();
        if !flows.is_empty() {
            self.core
                .outputs
                .push_event(Event::FlowsAccepted { batch, flows });
        }
        if let Some(batch) = batch
            && complete
        {
            self.send_done(now, batch);
        }
    }

    /// Reports the batch's results to the donor.
    pub(super) fn send_done(&mut self, now: Duration, batch: BatchId) {
        let Some(inbound) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        inbound.times.commit_us = inbound.finish_stage(now, InboundBatchStage::Activating);
        let (donor, times) = (inbound.donor, inbound.times);
        let results = inbound
            .flows
            .iter()
            .map(|flow| match (&flow.owned_epoch, &flow.refusal) {
                (Some(epoch), _) => Ok(*epoch),
                (None, Some(why)) => Err(why.clone()),
                (None, None) => Err(PeerFault::HandoffAborted.into()),
            });
        let results = results.collect();
        self.core.send(
            donor,
            Frame::Done {
                batch,
                results,
                times,
            },
        );
        self.end_batch(batch);
    }

    pub(super) fn end_batch(&mut self, batch: BatchId) {
        if let Some(inbound) = self.acceptor.batches.remove(&batch)
            && let Some(deadline) = inbound.deadline
        {
            self.core
                .timers
                .remove(&(deadline, HandoffTimer::InboundBatch(batch)));
        }
        self.acceptor.ended_batches.push_back(batch);
        if self.acceptor.ended_batches.len() > ENDED_BATCHES_MAX {
            self.acceptor.ended_batches.pop_front();
        }
    }

    /// Gives up a batch for which no commit was requested.
    pub(super) fn discard_batch(&mut self, batch: BatchId, reason: Failure) {
        let Some(inbound) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        let flows = inbound
            .active_indices()
            .into_iter()
            .map(|index| inbound.refuse(index, reason.clone()))
            .collect();
        self.end_batch(batch);
        self.discard_flows(Some(batch), flows, reason);
    }

    pub(super) fn discard_flows(
        &mut self,
        batch: Option<BatchId>,
        flows: Vec<Flow>,
        reason: impl Into<Failure>,
    ) {
        if flows.is_empty() {
            return;
        }
        let purpose = CommandPurpose::Discard(flows.clone());
        let discarded = flows.clone();
        self.core
            .push_command(purpose, |token| Command::Discard { token, flows });
        self.core.outputs.push_event(Event::FlowsDiscarded {
            batch,
            flows: discarded,
            reason: reason.into(),
        });
    }

    pub(super) fn on_discarded(&mut self, flows: Vec<Flow>) {
        for flow in flows {
            self.core.end_move(&flow, None);
        }
    }

    /// Gives a batch up, because the donor wants it or is unreachable. A batch with a requested commit continues. True
    /// `complete_state_continues` lets a batch with all its state continue as well.
    pub(super) fn abort_inbound(
        &mut self,
        batch: BatchId,
        reason: Failure,
        complete_state_continues: bool,
    ) {
        let Some(inbound) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        match inbound.stage {
            InboundBatchStage::Preparing => inbound.pending_failure = Some(reason),
            InboundBatchStage::Restoring if !complete_state_continues => {
                inbound.pending_failure = Some(reason)
            }
            InboundBatchStage::Waiting => self.discard_batch(batch, reason),
            InboundBatchStage::Restoring
            | InboundBatchStage::Committing
            | InboundBatchStage::Activating => {}
        }
    }

    /// Handles the loss of the channel to a donor. A batch with all its state continues: the holder decides.
    pub(super) fn on_donor_lost(&mut self, peer: NodeId) {
        let batches = self.acceptor.batches.iter();
        let affected = batches.filter(|(_, inbound)| inbound.donor == peer);
        let affected: Vec<BatchId> = affected.map(|(batch, _)| *batch).collect();
        for batch in affected {
            self.abort_inbound(batch, PeerFault::DonorChannelLost.into(), true);
        }
    }

    /// Handles the timeout of a batch that waits for its state.
    pub(super) fn on_inbound_timeout(&mut self, batch: BatchId) {
        let Some(inbound) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        inbound.deadline = None;
        let donor = inbound.donor;
        let failure = Failure::from(PeerFault::FlowStateLate);
        let reason = failure.clone();
        self.core.send(donor, Frame::Abort { batch, reason });
        self.discard_batch(batch, failure);
    }
}

fn commit_change(flow: &InboundFlow) -> OwnershipChange {
    OwnershipChange {
        flow: flow.flow,
        kind: ChangeKind::Commit,
        epoch: flow.epoch.saturating_add(1),
    }
}
