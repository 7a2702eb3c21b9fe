//! The acceptor role: prepares sockets, restores state, commits the flows at the holder, and only then activates them.

use super::handoff_core::{CommandPurpose, HandoffTimer, MovingFlow};
use super::{Command, FlowToRestore, Handoff};
use core::time::Duration;
use holdfast_wire::failure::{Failure, NodeFault, PeerFault, ProtocolViolation};
use holdfast_wire::frame::{AcceptorPhaseTimes, BatchId, FlowToPrepare, FrozenFlowState};
use holdfast_wire::{Epoch, Flow, Frame, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// State of the acceptor's role in handoffs.
#[derive(Debug, Default)]
pub(super) struct Acceptor {
    pub batches: BTreeMap<BatchId, InboundBatch>,
    pub ended_batches: VecDeque<BatchId>,
}

/// Stage of a batch that this node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InboundBatchStage {
    Preparing,
    /// Waiting for the state of the donor's sockets.
    Waiting,
    Restoring,
    Committing,
    Activating,
}

/// A batch that this node takes.
#[derive(Debug)]
pub(super) struct InboundBatch {
    pub donor: NodeId,
    pub stage: InboundBatchStage,
    /// Time at which the stage began.
    pub since: Duration,
    pub deadline: Option<Duration>,
    pub flows: Vec<InboundFlow>,
    /// Received state, by flow index.
    pub states: BTreeMap<usize, FrozenFlowState>,
    pub times: AcceptorPhaseTimes,
    /// Reason for giving the batch up once its command is complete.
    pub pending_failure: Option<Failure>,
}

#[derive(Debug)]
pub(super) struct InboundFlow {
    pub flow: Flow,
    /// Epoch at which the donor owned the flow.
    pub epoch: Epoch,
    /// Reason the flow is not taken; none while it moves with the batch.
    pub refusal: Option<Failure>,
    /// Epoch at which this node owns the flow.
    pub owned_epoch: Option<Epoch>,
}

impl InboundBatch {
    /// Indices of the flows that still move with the batch.
    pub(super) fn active_indices(&self) -> Vec<usize> {
        let flows = self.flows.iter().enumerate();
        flows
            .filter(|(_, flow)| flow.refusal.is_none())
            .map(|(index, _)| index)
            .collect()
    }

    /// Finishes the current stage and enters `next`; returns the duration of the finished stage, in microseconds.
    pub(super) fn finish_stage(&mut self, now: Duration, next: InboundBatchStage) -> u32 {
        let elapsed = now.saturating_sub(self.since);
        self.since = now;
        self.stage = next;
        u32::try_from(elapsed.as_micros()).unwrap_or(u32::MAX)
    }

    /// Removes a flow from the batch.
    pub(super) fn refuse(&mut self, index: usize, reason: Failure) -> Flow {
        let flow = &mut self.flows[index];
        flow.refusal = Some(reason);
        flow.flow
    }
}

impl Handoff {
    pub(super) fn inbound_in_stage(
        &mut self,
        batch: BatchId,
        stage: InboundBatchStage,
    ) -> Option<&mut InboundBatch> {
        let inbound = self.acceptor.batches.get_mut(&batch)?;
        (inbound.stage == stage).then_some(inbound)
    }

    /// Handles `Prepare`: a donor wants sockets.
    pub(super) fn on_prepare(
        &mut self,
        now: Duration,
        from: NodeId,
        batch: BatchId,
        flows: Vec<FlowToPrepare>,
    ) {
        if batch.donor != from {
            return self.core.outputs.report_ignored(
                from,
                "Prepare",
                "the batch belongs to another donor",
            );
        }
        if self.acceptor.batches.contains_key(&batch)
            || self.acceptor.ended_batches.contains(&batch)
        {
            return self
                .core
                .outputs
                .report_ignored(from, "Prepare", "repeated frame");
        }
        let mut inbound = InboundBatch {
            donor: from,
            stage: InboundBatchStage::Preparing,
            since: now,
            deadline: None,
            flows: Vec::with_capacity(flows.len()),
            states: BTreeMap::new(),
            times: AcceptorPhaseTimes::default(),
            pending_failure: None,
        };
        let mut accepted = Vec::with_capacity(flows.len());
        for flow in flows {
            let refusal = if flow.flow.is_process() {
                Some(ProtocolViolation::ProcessAsFlow.into())
            } else if self.core.moving_flows.contains_key(&flow.flow) {
                Some(NodeFault::FlowInOtherHandoff.into())
            } else {
                None
            };
            let is_accepted = refusal.is_none();
            inbound.flows.push(InboundFlow {
                flow: flow.flow,
                epoch: flow.epoch,
                refusal,
                owned_epoch: None,
            });
            if is_accepted {
                self.core
                    .moving_flows
                    .insert(flow.flow, MovingFlow::default());
                accepted.push(flow);
            }
        }
        self.acceptor.batches.insert(batch, inbound);
        if accepted.is_empty() {
            return self.on_sockets_prepared(now, batch, Vec::new());
        }
        self.core
            .push_command(CommandPurpose::Prepare(batch), |token| {
                Command::PrepareSockets {
                    token,
                    batch,
                    flows: accepted,
                }
            });
    }

    pub(super) fn on_sockets_prepared(
        &mut self,
        now: Duration,
        batch: BatchId,
        results: Vec<Result<(), Failure>>,
    ) {
        let Some(inbound) = self.inbound_in_stage(batch, InboundBatchStage::Preparing) else {
            return;
        };
        inbound.finish_stage(now, InboundBatchStage::Waiting);
        let donor = inbound.donor;
        let doomed = inbound.pending_failure.take();
        let mut unprepared_flows = Vec::new();
        for (index, result) in inbound.active_indices().into_iter().zip(results) {
            if let Err(error) = result {
                unprepared_flows.push(inbound.refuse(index, error));
            }
        }
        let refusals = inbound
            .flows
            .iter()
            .map(|flow| flow.refusal.clone().map_or(Ok(()), Err));
        let results = refusals.collect();
        let is_empty = inbound.active_indices().is_empty();
        for flow in unprepared_flows {
            self.core.end_move(&flow, None);
        }
        if let Some(reason) = doomed {
            return self.discard_batch(batch, reason);
        }
        self.core
            .send(donor, Frame::PrepareResponse { batch, results });
        if is_empty {
            return self.end_batch(batch);
        }
        let deadline = now + self.core.config.state_timeout;
        if let Some(inbound) = self.acceptor.batches.get_mut(&batch) {
            inbound.deadline = Some(deadline);
        }
        self.core
            .timers
            .insert((deadline, HandoffTimer::InboundBatch(batch)));
    }

    /// Handles a `State` frame. Flows without state in the last frame or before are given up.
    pub(super) fn on_state(
        &mut self,
        now: Duration,
        from: NodeId,
        batch: BatchId,
        states: Vec<FrozenFlowState>,
        last: bool,
    ) {
        if batch.donor != from {
            return self.core.outputs.report_ignored(
                from,
                "State",
                "the batch belongs to another donor",
            );
        }
        if !self.acceptor.batches.contains_key(&batch) {
            let reason = NodeFault::UnknownBatch.into();
            self.core.send(from, Frame::Abort { batch, reason });
            return self
                .core
                .outputs
                .report_ignored(from, "State", "unknown batch");
        }
        let Some(inbound) = self.inbound_in_stage(batch, InboundBatchStage::Waiting) else {
            return self.core.outputs.report_ignored(
                from,
                "State",
                "the batch is not waiting for state",
            );
        };
        for state in states {
            let index = state.index as usize;
            if inbound
                .flows
                .get(index)
                .is_some_and(|flow| flow.refusal.is_none())
            {
                inbound.states.insert(index, state);
            }
        }
        if last {
            self.restore_batch(now, batch);
        }
    }

    fn restore_batch(&mut self, now: Duration, batch: BatchId) {
        let Some(inbound) = self.acceptor.batches.get_mut(&batch) else {
            return;
        };
        inbound.finish_stage(now, InboundBatchStage::Restoring);
        if let Some(deadline) = inbound.deadline.take() {
            self.core
                .timers
                .remove(&(deadline, HandoffTimer::InboundBatch(batch)));
        }
        let mut missing = Vec::new();
        for index in inbound.active_indices() {
            if !inbound.states.contains_key(&index) {
                missing.push(inbound.refuse(index, PeerFault::FlowStateMissing.into()));
            }
        }
        let flows: Vec<FlowToRestore> = std::mem::take(&mut inbound.states)
            .into_iter()
            .map(|(index, state)| FlowToRestore {
                flow: inbound.flows[index].flow,
                dynamic: state.dynamic,
                application: state.application,
            })
            .collect();
        if flows.is_empty() {
            self.discard_flows(Some(batch), missing, PeerFault::FlowStateMissing);
            return self.send_done(now, batch);
        }
        self.core
            .push_command(CommandPurpose::Restore(batch), |token| Command::Restore {
                token,
                batch,
                flows,
            });
        self.discard_flows(Some(batch), missing, PeerFault::FlowStateMissing);
    }
}
