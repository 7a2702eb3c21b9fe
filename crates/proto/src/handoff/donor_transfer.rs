//! The donor's last third: the frozen batch is transferred, and moved or given up.

use super::donor::{OutboundBatch, OutboundBatchStage};
use super::event::FlowKeptReason;
use super::{FrozenFlow, Handoff};
use core::time::Duration;
use holdfast_wire::failure::{Failure, HandoffStep, NodeFault, ProtocolViolation};
use holdfast_wire::frame::{AcceptorPhaseTimes, FrozenFlowState};
use holdfast_wire::{Epoch, Frame, LENGTH_MAX, NodeId};

/// Most bytes of state in a frame, unless one flow alone has more.
const STATE_FRAME_BYTES_MAX: usize = 8 << 20;
/// Most bytes of state of a flow: a frame has to hold them and little else.
const FLOW_STATE_BYTES_MAX: usize = LENGTH_MAX - (64 << 10);

impl Handoff {
    /// Handles the completion of `Freeze`. The hot path: the state is sent in the order it was extracted, its blobs
    /// untouched.
    pub(super) fn on_frozen(
        &mut self,
        now: Duration,
        seq: u64,
        results: Vec<Result<FrozenFlow, Failure>>,
    ) {
        let Some(batch) = self.batch_in_stage(seq, OutboundBatchStage::Freezing) else {
            return;
        };
        let acceptor = batch.acceptor;
        batch.phases.extract = batch.finish_stage(now, OutboundBatchStage::Transferring);
        if let Some(reason) = batch.pending_failure.take() {
            let flows = batch.remove_all_flows(seq, true, &reason);
            self.start_settling(now, seq);
            return self.roll_back(now, flows);
        }
        let active: Vec<usize> = batch.active_indices().collect();
        let mut states = Vec::with_capacity(active.len());
        let mut failed = Vec::new();
        for (index, result) in active.into_iter().zip(results) {
            let reason = match result {
                Err(error) => FlowKeptReason::Extract(error),
                Ok(FrozenFlow {
                    dynamic,
                    application,
                }) => {
                    let bytes = dynamic.len() + application.len();
                    if bytes <= FLOW_STATE_BYTES_MAX {
                        batch.bytes += bytes;
                        let index = index as u32;
                        states.push(FrozenFlowState {
                            index,
                            dynamic,
                            application,
                        });
                        continue;
                    }
                    FlowKeptReason::TooBig { bytes }
                }
            };
            failed.push(batch.remove_flow(seq, index, true, reason));
        }
        let bytes = batch.bytes;
        if states.is_empty() {
            self.send_abort(acceptor, seq, NodeFault::NoFlowFrozen.into());
            self.start_settling(now, seq);
        } else {
            self.send_states(acceptor, seq, states);
            let timeout =
                self.core.config.transfer_timeout + self.donor.model.predict_transfer(bytes) * 4;
            self.set_deadline(seq, Some(now + timeout));
        }
        self.roll_back(now, failed);
    }

    fn send_states(&mut self, acceptor: NodeId, seq: u64, states: Vec<FrozenFlowState>) {
        let batch = self.batch_id(seq);
        let mut flows = Vec::with_capacity(states.len());
        let mut bytes = 0;
        for state in states {
            let flow_bytes = state.dynamic.len() + state.application.len();
            if bytes + flow_bytes > STATE_FRAME_BYTES_MAX && !flows.is_empty() {
                let flows = std::mem::take(&mut flows);
                self.core.send(
                    acceptor,
                    Frame::State {
                        batch,
                        flows,
                        last: false,
                    },
                );
                bytes = 0;
            }
            bytes += flow_bytes;
            flows.push(state);
        }
        self.core.send(
            acceptor,
            Frame::State {
                batch,
                flows,
                last: true,
            },
        );
    }

    /// Handles `Done`: the acceptor has finished the batch. A later holder than that of the divert may have heard only of
    /// the transit, and is asked about the flows that have moved.
    pub(super) fn on_done(
        &mut self,
        now: Duration,
        from: NodeId,
        seq: u64,
        results: Vec<Result<Epoch, Failure>>,
        times: AcceptorPhaseTimes,
    ) {
        let view_epoch = self.core.view.epoch;
        let Some(batch) = self.batch_in_stage(seq, OutboundBatchStage::Transferring) else {
            return self.core.outputs.report_ignored(
                from,
                "Done",
                "the batch is not being transferred",
            );
        };
        if batch.acceptor != from || batch.flows.len() != results.len() {
            return self.core.outputs.report_ignored(
                from,
                "Done",
                "the sender or the number of results does not match the batch",
            );
        }
        let restore = Duration::from_micros(times.restore_us.into());
        let commit = Duration::from_micros(times.commit_us.into());
        let elapsed = batch.finish_stage(now, OutboundBatchStage::Settling);
        batch.phases.transfer = elapsed.saturating_sub(restore + commit);
        batch.phases.restore = restore;
        batch.phases.commit = commit;
        let mut moved = Vec::new();
        let mut doubtful = Vec::new();
        let is_holder_new = batch.diverted_in_view != view_epoch;
        let active: Vec<usize> = batch.active_indices().collect();
        for index in active {
            let committed_epoch = batch.flows[index].epoch.saturating_add(2);
            match &results[index] {
                Ok(epoch) if *epoch == committed_epoch => {
                    let reason = FlowKeptReason::AlreadyMoving;
                    let mut taken = batch.remove_flow(seq, index, true, reason);
                    taken.is_taken = true;
                    match is_holder_new {
                        true => doubtful.push(taken),
                        false => moved.push((taken, committed_epoch)),
                    }
                }
                Ok(_) => {
                    doubtful.push(batch.remove_flow(
                        seq,
                        index,
                        true,
                        FlowKeptReason::Refused {
                            by: from,
                            why: ProtocolViolation::EpochMismatch.into(),
                        },
                    ));
                }
                Err(error) => {
                    doubtful.push(batch.remove_flow(
                        seq,
                        index,
                        true,
                        FlowKeptReason::Refused {
                            by: from,
                            why: error.clone().from_peer(),
                        },
                    ));
                }
            }
        }
        let (bytes, phases) = (batch.bytes, batch.phases);
        self.donor.model.learn(moved.len(), bytes, &phases);
        self.start_settling(now, seq);
        self.close(moved);
        self.roll_back(now, doubtful);
    }

    /// Ends the batch's turn or preparation; its flows settle one by one.
    pub(super) fn start_settling(&mut self, now: Duration, seq: u64) {
        self.set_deadline(seq, None);
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.stage = OutboundBatchStage::Settling;
        let acceptor = batch.acceptor;
        if self.donor.freezing_batch == Some(seq) {
            self.donor.freezing_batch = None;
            self.start_yield_pause(now);
        } else {
            self.on_preparation_ended(now, acceptor);
        }
    }

    pub(super) fn send_abort(&mut self, acceptor: NodeId, seq: u64, reason: Failure) {
        let batch = self.batch_id(seq);
        self.core.send(acceptor, Frame::Abort { batch, reason });
    }

    /// Handles the timeout of a batch.
    pub(super) fn on_outbound_timeout(&mut self, now: Duration, seq: u64) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        batch.deadline = None;
        let (peer, step) = match batch.stage {
            OutboundBatchStage::Diverting(_) => {
                (self.core.holder_client.holder(), HandoffStep::Divert)
            }
            OutboundBatchStage::Transferring => (batch.acceptor, HandoffStep::Transfer),
            _ => (batch.acceptor, HandoffStep::Prepare),
        };
        let acceptor = batch.acceptor;
        let reason = FlowKeptReason::TimedOut { peer, step };
        if step == HandoffStep::Prepare {
            self.fail_lane(acceptor, &reason);
        }
        self.fail_batch(now, seq, reason);
    }

    /// Gives a batch up, in any stage.
    pub(super) fn fail_batch(&mut self, now: Duration, seq: u64, reason: FlowKeptReason) {
        let Some(batch) = self.donor.batches.get_mut(&seq) else {
            return;
        };
        let (acceptor, stage) = (batch.acceptor, batch.stage);
        match stage {
            OutboundBatchStage::Settling => return,
            OutboundBatchStage::Freezing if batch.pending_failure.is_some() => return,
            // The flows are being frozen; the completion of `Freeze` decides how to undo that.
            OutboundBatchStage::Freezing => batch.pending_failure = Some(reason.clone()),
            OutboundBatchStage::Preparing
            | OutboundBatchStage::Draining
            | OutboundBatchStage::Waiting => {
                let flows = batch.remove_all_flows(seq, false, &reason);
                let flows = flows.into_iter().map(|ending_flow| {
                    let epoch = ending_flow.epoch;
                    (ending_flow, epoch)
                });
                let flows = flows.collect();
                self.start_settling(now, seq);
                self.resume(flows);
            }
            OutboundBatchStage::Diverting(request) => {
                let flows = batch.remove_all_flows(seq, false, &reason);
                self.cancel_request_to_holder(request);
                self.start_settling(now, seq);
                self.roll_back(now, flows);
            }
            OutboundBatchStage::Transferring => {
                let flows = batch.remove_all_flows(seq, true, &reason);
                self.start_settling(now, seq);
                self.roll_back(now, flows);
            }
        }
        self.send_abort(acceptor, seq, reason.failure());
    }

    /// Handles the loss of the channel to an acceptor.
    pub(super) fn on_acceptor_lost(&mut self, now: Duration, peer: NodeId) {
        let step = HandoffStep::Prepare;
        self.fail_lane(peer, &FlowKeptReason::PeerLost { peer, step });
        let batches = self.donor.batches.iter();
        let affected = batches.filter(|(_, batch)| batch.acceptor == peer);
        let affected: Vec<(u64, HandoffStep)> =
            affected.map(|(seq, batch)| (*seq, batch.step())).collect();
        for (seq, step) in affected {
            self.fail_batch(now, seq, FlowKeptReason::PeerLost { peer, step });
        }
    }
}

impl OutboundBatch {
    /// Returns the step of the batch's stage.
    pub(super) fn step(&self) -> HandoffStep {
        match self.stage {
            OutboundBatchStage::Preparing => HandoffStep::Prepare,
            OutboundBatchStage::Draining | OutboundBatchStage::Waiting => HandoffStep::Drain,
            OutboundBatchStage::Diverting(_) => HandoffStep::Divert,
            OutboundBatchStage::Freezing => HandoffStep::Extract,
            OutboundBatchStage::Transferring | OutboundBatchStage::Settling => {
                HandoffStep::Transfer
            }
        }
    }
}
