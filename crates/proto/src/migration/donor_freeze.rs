//! The freeze at the donor: the process is stopped, the rest is sent, and the acceptor reports the result.

use super::command::{Command, FlowEpoch, FreezeReport};
use super::donor::OutboundMoveStage;
use super::donor_divert::{OutboundFlowState, outbound_flow};
use super::event::{Event, MoveOutcome, ProcessKeptReason};
use super::freeze_cost::FreezeLoad;
use super::migration_core::CommandPurpose;
use super::requests_to_holder::HolderRequestPurpose;
use super::{Migration, requests_to_holder};
use core::time::Duration;
use holdfast_wire::failure::{Failure, MigrationStep};
use holdfast_wire::frame::AcceptorPhaseTimes;
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame, StepTime};
use holdfast_wire::{ChangeKind, Epoch, Flow, MoveId, NodeId, OwnershipChange};
use std::collections::{BTreeMap, BTreeSet};

impl Migration {
    /// Commands the freeze once everything is diverted; a repeated freeze sends the flows that appeared late.
    pub(super) fn freeze(&mut self, now: Duration, id: MoveId) {
        self.set_deadline(id, None);
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Freezing;
        let clone = outbound.options.clone;
        if !outbound.maybe_stopped {
            outbound.summary.phases.divert =
                outbound.finish_stage(now, OutboundMoveStage::Freezing);
            self.model
                .learn_scan_to_freeze(now.saturating_sub(outbound.rounds.last_ended));
        }
        // The original of a clone continues, whatever becomes of the clone.
        outbound.maybe_stopped = !clone;
        let post_copy = outbound.post_copy_allowed;
        let flows = outbound
            .flows_in(OutboundFlowState::Diverted)
            .map(|flow| FlowEpoch {
                flow: flow.flow,
                epoch: flow.epoch.saturating_add(1),
            });
        let flows = flows.collect();
        self.core
            .push_command(CommandPurpose::Freeze(id), |token| Command::Freeze {
                token,
                id,
                flows,
                post_copy,
                clone,
            });
    }

    pub(super) fn on_frozen(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<FreezeReport, Failure>,
    ) {
        let Some(outbound) = self.outbound_in_stage(id, OutboundMoveStage::Freezing) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(error) => {
                let step = MigrationStep::Freeze;
                return self.fail_move(now, id, ProcessKeptReason::Failed { step, why: error });
            }
        };
        // The process continued to run for a while after the command.
        let before_stop = now.saturating_sub(outbound.since + report.stopped_for);
        outbound.since += before_stop;
        outbound.summary.phases.divert += before_stop;
        outbound.summary.freeze_bytes += report.sent_bytes;
        outbound.summary.saved_bytes += report.saved_bytes;
        outbound.summary.post_copy_bytes = report.post_copy_bytes;
        outbound.summary.post_copy = outbound.summary.post_copy_bytes > 0;
        outbound.freeze_saved_bytes += report.saved_bytes;
        outbound.summary.steps[0] = report.steps;
        let closed_flows: BTreeSet<Flow> = report.closed_flows.iter().copied().collect();
        let mut kept = Vec::new();
        for (flow, entry) in &mut outbound.flows {
            match entry.state {
                OutboundFlowState::Diverted if closed_flows.contains(flow) => {
                    kept.push(OwnershipChange {
                        flow: *flow,
                        kind: ChangeKind::Rollback,
                        epoch: entry.epoch.saturating_add(1),
                    });
                    entry.epoch = entry
                        .epoch
                        .saturating_add(requests_to_holder::TRANSIT_EPOCH);
                    entry.state = OutboundFlowState::Closed;
                }
                OutboundFlowState::Diverted => entry.state = OutboundFlowState::Frozen,
                _ => {}
            }
        }
        // Flows closed before the freeze return to this node, whether or not the process moves.
        if !kept.is_empty() {
            self.request_changes(now, kept, HolderRequestPurpose::ReturnFlows);
        }
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        if outbound.options.clone || report.late_flows.is_empty() {
            return self.send_final(now, id);
        }
        for late_flow in &report.late_flows {
            let (flow, entry) = outbound_flow(late_flow);
            outbound.flows.entry(flow).or_insert(entry);
        }
        if let Err(reason) = self.check_sockets(id) {
            return self.fail_move(now, id, reason);
        }
        self.set_deadline(id, Some(now + self.core.config.divert_timeout));
        self.send_arm(id);
    }

    /// Tells the acceptor that the whole process has been sent.
    fn send_final(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.summary.phases.extract =
            outbound.finish_stage(now, OutboundMoveStage::Transferring);
        let (to, bytes) = (outbound.to, outbound.summary.freeze_bytes);
        let frame = MoveFrame::Final {
            flows: outbound.flows_in(OutboundFlowState::Frozen).collect(),
            peers: outbound.peers.clone(),
            forwarded: outbound.forwarded.clone(),
            bytes,
        };
        self.core.send(to, id, frame);
        let bytes_take = self.model.predict_transfer(bytes) * 4;
        let deadline = now + self.core.config.transfer_timeout + bytes_take;
        self.set_deadline(id, Some(deadline));
    }

    /// Handles the acceptor's report on the end of the move.
    pub(super) fn on_done(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        result: Result<Epoch, Failure>,
        (times, ran_at, steps): (AcceptorPhaseTimes, Duration, Vec<StepTime>),
    ) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            // Nothing of the move is left here: this node released it before a restart, or the frame is a repetition.
            if result.is_ok() {
                self.core.send(from, id, MoveFrame::Released);
            }
            return self
                .core
                .outputs
                .report_ignored(from, "MoveDone", "unknown move");
        };
        if outbound.to != from {
            return (self.core.outputs).report_ignored(
                from,
                "MoveDone",
                "the sender is not the acceptor",
            );
        }
        match (outbound.stage, result) {
            (OutboundMoveStage::Transferring, Ok(_)) => {
                outbound.summary.steps[1] = steps;
                self.learn_freeze_cost(ran_at, id, times);
                self.end_committed(id);
            }
            // Otherwise the donor waits for the holder, which also tells the flows that did not move.
            (OutboundMoveStage::Settling, Ok(_)) => {
                outbound.acceptor_runs = true;
                if outbound.in_doubt || outbound.is_committed {
                    self.end_committed(id);
                }
            }
            // The acceptor has lost the process since its commit.
            (OutboundMoveStage::Settling, Err(_)) if outbound.is_committed => {
                self.end_committed(id);
            }
            // The holder may have records by now, from a report of this node to it: the transits, or what the acceptor has
            // rolled back.
            (OutboundMoveStage::Settling, Err(_))
                if outbound.in_doubt && !outbound.acceptor_gave_up =>
            {
                outbound.acceptor_gave_up = true;
                self.set_deadline(id, None);
                self.cancel_outbound_request(id);
                self.request_rollback(now, id);
            }
            (
                OutboundMoveStage::Checking
                | OutboundMoveStage::Settling
                | OutboundMoveStage::Removing,
                _,
            )
            | (_, Ok(_)) => {
                self.core
                    .outputs
                    .report_ignored(from, "MoveDone", "unexpected in this state");
            }
            (_, Err(why)) => self.fail_move(now, id, ProcessKeptReason::Aborted { by: from, why }),
        }
    }

    /// Learns the cost of the freeze, which ended at `ran_at` at the latest.
    fn learn_freeze_cost(&mut self, ran_at: Duration, id: MoveId, times: AcceptorPhaseTimes) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let elapsed = ran_at.saturating_sub(outbound.since);
        let phases = &mut outbound.summary.phases;
        phases.restore = Duration::from_micros(times.restore_us.into());
        phases.commit = Duration::from_micros(times.commit_us.into());
        phases.transfer = elapsed.saturating_sub(phases.restore + phases.commit);
        let load = FreezeLoad {
            dirty_bytes: outbound.summary.freeze_bytes + outbound.freeze_saved_bytes,
            ..outbound.load
        };
        let freeze = phases.freeze();
        // The original of a clone continues before the acceptor restores anything.
        if outbound.options.clone {
            return;
        }
        let expected = outbound.load.dirty_bytes;
        (self.model).learn_dirty(outbound.options.sockets, expected, load.dirty_bytes);
        self.model
            .learn_freeze(outbound.options.sockets, load, freeze);
    }

    /// Ends a committed move: releases the original, or resumes it if it was cloned.
    pub(super) fn end_committed(&mut self, id: MoveId) {
        self.set_deadline(id, None);
        self.cancel_outbound_request(id);
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.clone_runs = outbound.options.clone;
        let (clone_runs, bytes) = (outbound.clone_runs, outbound.summary.post_copy_bytes);
        if bytes > 0 {
            self.core
                .outputs
                .push_event(Event::PostCopyStarted { id, bytes });
        }
        if clone_runs {
            return self.command_thaw(id, 1);
        }
        self.command_release(id, 1);
    }

    pub(super) fn command_release(&mut self, id: MoveId, attempt: u32) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Releasing;
        let (to, forwarded) = (outbound.to, outbound.forwarded.clone());
        let flows = outbound.flows_in(OutboundFlowState::Frozen);
        let flows = flows.chain(outbound.flows_in(OutboundFlowState::Unrecorded));
        let flows = flows.map(|DonorFlowEpoch { flow, epoch }| FlowEpoch {
            flow,
            epoch: epoch.saturating_add(requests_to_holder::TRANSIT_EPOCH),
        });
        let flows = flows.collect();
        let kept = outbound.flows_in(OutboundFlowState::Closed);
        let kept = kept.map(|DonorFlowEpoch { flow, epoch }| FlowEpoch { flow, epoch });
        let kept = kept.collect();
        let purpose = CommandPurpose::Release(id, attempt);
        self.core.push_command(purpose, |token| Command::Release {
            token,
            id,
            to,
            flows,
            kept,
            forwarded,
        });
    }

    pub(super) fn on_released(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<(), Failure>,
    ) {
        if self
            .outbound_in_stage(id, OutboundMoveStage::Releasing)
            .is_none()
        {
            return;
        }
        let purpose = CommandPurpose::Release(id, attempt);
        if let Err(error) = result
            && self
                .core
                .retry_or_report(now, (id, "Release"), purpose, attempt, error)
        {
            return;
        }
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Removing;
        let moved = outbound.flows_in(OutboundFlowState::Frozen);
        let moved: BTreeSet<Flow> = moved.map(|flow| flow.flow).collect();
        let kept = outbound
            .flows_in(OutboundFlowState::Closed)
            .map(|flow| (flow.flow, flow.epoch));
        let kept: BTreeMap<Flow, Epoch> = kept.collect();
        self.end_flows(id, &kept, |flow| moved.contains(flow));
        self.report_outcome(id, MoveOutcome::Moved);
        self.flush_holder(now, id);
    }

    /// Sends the holder one more request, without effect, to flush out earlier ones.
    ///
    /// Once the acceptor hears that all is released, it has the record removed. A repeated request of this node that
    /// arrived behind the removal would make a new record. Requests of one channel arrive in order, so the answer
    /// to this one proves that no earlier one is under way.
    pub(super) fn flush_holder(&mut self, now: Duration, id: MoveId) {
        let no_op_change = requests_to_holder::process_change(
            id,
            ChangeKind::Rollback,
            requests_to_holder::TRANSIT_EPOCH,
        );
        self.request_changes(now, vec![no_op_change], HolderRequestPurpose::Flush(id));
    }

    /// Reports to the acceptor that nothing of the move is left here.
    pub(super) fn on_flushed(&mut self, id: MoveId) {
        if let Some(outbound) = self.outbound_in_stage(id, OutboundMoveStage::Removing) {
            let to = outbound.to;
            self.core.send(to, id, MoveFrame::Released);
            self.on_removed(id);
        }
    }
}
