//! The end of a failed move at its donor: the process continues here, or it moved all the same.
//!
//! A move that may have been diverted is rolled back at the holder, and the holder's answer decides; a process that may
//! be stopped remains so until then. A process that was not stopped runs on meanwhile: no node can have committed it,
//! for its state was never sent.

use super::Migration;
use super::command::{Command, FlowEpoch};
use super::donor::{OutboundMove, OutboundMoveStage};
use super::donor_divert::OutboundFlowState;
use super::event::{Event, MoveOutcome, ProcessKeptReason};
use super::migration_core::{CommandPurpose, MovingFlow};
use super::requests_to_holder::{
    HolderAnswers, HolderRequestPurpose, OWNED_EPOCH, TRANSIT_EPOCH, process_change,
};
use crate::flow_ownership::is_disputed;
use core::time::Duration;
use holdfast_wire::failure::{Failure, PeerFault};
use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{ChangeKind, Flow, MoveId, OwnershipChange, OwnershipRecord, RecordState};
use std::collections::BTreeMap;

impl Migration {
    /// Gives up a move from this node: tells the acceptor, and rolls back a divert that may have taken place.
    pub(super) fn fail_move(&mut self, now: Duration, id: MoveId, reason: ProcessKeptReason) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let (to, divert_requested) = (outbound.to, outbound.divert_requested);
        match outbound.stage {
            OutboundMoveStage::Checking => return self.end_untouched(id, reason),
            OutboundMoveStage::Settling
            | OutboundMoveStage::Thawing
            | OutboundMoveStage::Releasing
            | OutboundMoveStage::Removing => return,
            _ => {}
        }
        let frame = MoveFrame::Abort {
            reason: reason.failure(),
        };
        self.core.send(to, id, frame);
        if outbound.stage == OutboundMoveStage::Offering {
            return self.end_untouched(id, reason);
        }
        outbound.reason = reason;
        self.set_deadline(id, None);
        self.cancel_outbound_request(id);
        match divert_requested {
            true => self.request_rollback(now, id),
            false => self.thaw(now, id),
        }
    }

    /// Cancels the open request to the holder about the move.
    pub(super) fn cancel_outbound_request(&mut self, id: MoveId) {
        let holder_request =
            (self.outbound_moves.get_mut(&id)).and_then(|outbound| outbound.holder_request.take());
        if let Some(holder_request) = holder_request {
            self.cancel_request_to_holder(holder_request);
        }
    }

    /// Rolls back a divert that has, or may have, taken place. The request names the process itself first, as the
    /// commit does: the first of the two that reaches the holder decides everything.
    pub(super) fn request_rollback(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Settling;
        let mut changes = Vec::new();
        // Unless the process was frozen, the divert may still be on its way: a record at a higher epoch fences it out.
        if !outbound.maybe_stopped {
            changes.push(process_change(id, ChangeKind::Establish, OWNED_EPOCH));
        }
        changes.push(process_change(id, ChangeKind::Rollback, TRANSIT_EPOCH));
        let flows = outbound.flows.iter();
        changes.extend(flows.map(|(flow, entry)| OwnershipChange {
            flow: *flow,
            kind: ChangeKind::Rollback,
            epoch: entry.epoch.saturating_add(1),
        }));
        let holder_request = self.request_changes(now, changes, HolderRequestPurpose::Rollback(id));
        if let Some(outbound) = self.outbound_moves.get_mut(&id) {
            outbound.holder_request = Some(holder_request);
        }
    }

    pub(super) fn on_rolled_back(&mut self, now: Duration, id: MoveId, answers: HolderAnswers) {
        let node = self.core.config.node;
        let moving = &self.core.moving_flows;
        let is_settling =
            |outbound: &&mut OutboundMove| outbound.stage == OutboundMoveStage::Settling;
        let Some(outbound) = self.outbound_moves.get_mut(&id).filter(is_settling) else {
            return;
        };
        outbound.holder_request = None;
        let records = answers.into_iter();
        let mut records = records.map(|answer| answer.unwrap_or_else(|refusal| refusal.current));
        let process = records.nth(usize::from(!outbound.maybe_stopped)).flatten();
        match process {
            Some(record) if record.is_owned_by(node) => {
                outbound.record_epoch = Some(record.epoch);
                for (entry, record) in outbound.flows.values_mut().zip(records) {
                    entry.epoch = record
                        .filter(|record| record.is_owned_by(node))
                        .map_or(entry.epoch, |record| record.epoch);
                }
                self.thaw(now, id);
            }
            Some(record) if is_disputed(record) && !outbound.maybe_stopped => self.thaw(now, id),
            Some(record) if is_disputed(record) && outbound.acceptor_gave_up => {
                self.thaw_without_record(now, id);
            }
            Some(record) if is_disputed(record) => self.resolve_doubt(now, id),
            // A flow closed before the freeze did not move with the process: its transit is rolled back.
            Some(_) => {
                let mut returns = Vec::new();
                for ((flow, entry), record) in outbound.flows.iter_mut().zip(records) {
                    let is_closed_here = moving.get(flow).is_some_and(MovingFlow::is_closed);
                    match record {
                        None => entry.state = OutboundFlowState::Unrecorded,
                        Some(record) if record.is_owned_by(node) => {
                            (entry.state, entry.epoch) = (OutboundFlowState::Closed, record.epoch);
                        }
                        Some(OwnershipRecord {
                            epoch,
                            state: RecordState::Transit { donor, .. },
                        }) if donor == node && is_closed_here => {
                            let (flow, kind) = (*flow, ChangeKind::Rollback);
                            returns.push(OwnershipChange { flow, kind, epoch });
                            let epoch = epoch.saturating_add(1);
                            (entry.state, entry.epoch) = (OutboundFlowState::Closed, epoch);
                        }
                        Some(_) => {}
                    }
                }
                outbound.is_committed = true;
                if !returns.is_empty() {
                    self.request_changes(now, returns, HolderRequestPurpose::ReturnFlows);
                }
                self.end_or_ask_acceptor(now, id);
            }
            // The state was never sent, so the original is the only process.
            None if !outbound.maybe_stopped => self.thaw(now, id),
            // A holder that has not heard of the commit, and cannot hear of it from an acceptor that is lost.
            None if outbound.is_committed => self.end_or_ask_acceptor(now, id),
            None if outbound.acceptor_gave_up => self.thaw_without_record(now, id),
            None => {
                // A flow closed before the freeze was rolled back already: it stays if the process turns out to have moved.
                for (entry, record) in outbound.flows.values_mut().zip(records) {
                    if let Some(record) = record.filter(|record| record.is_owned_by(node)) {
                        (entry.state, entry.epoch) = (OutboundFlowState::Closed, record.epoch);
                    }
                }
                self.resolve_doubt(now, id);
            }
        }
    }

    /// Ends a committed move once the acceptor knows of the commit, or asks the acceptor.
    ///
    /// The acceptor may have missed the holder's answer. If the holder is lost, a new one decides by what donor and
    /// acceptor report, so until the acceptor knows, the donor must be there to say that the process is not its own.
    fn end_or_ask_acceptor(&mut self, now: Duration, id: MoveId) {
        let view = &self.core.view;
        match self.outbound_moves.get(&id) {
            // The group has given up an acceptor outside of the view. A node with another number than at the move's beginning gets
            // no answer from the acceptor, which knows the former number.
            Some(outbound)
                if outbound.acceptor_runs
                    || !view.contains(outbound.to)
                    || id.donor != self.core.config.node =>
            {
                self.end_committed(id);
            }
            Some(outbound) => {
                let reason = outbound.reason.failure();
                self.ask_acceptor(now, id, reason);
            }
            None => {}
        }
    }

    /// Asks the acceptor, because the holder lost its table, and with it the answer whether the acceptor had committed.
    fn resolve_doubt(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        if !std::mem::replace(&mut outbound.in_doubt, true) {
            self.core.outputs.push_event(Event::HolderLostTable { id });
        }
        self.ask_acceptor(now, id, PeerFault::HolderLostRecord.into());
    }

    /// Has the acceptor say whether the process runs there. An acceptor that may still commit does not answer, so holder
    /// and acceptor are asked again later.
    fn ask_acceptor(&mut self, now: Duration, id: MoveId, reason: Failure) {
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return;
        };
        self.core.send(outbound.to, id, MoveFrame::Abort { reason });
        let retry_at = now + self.core.config.retry_max;
        self.set_deadline(id, Some(retry_at));
    }

    /// Resumes the process: the acceptor will never run it, and the holder has no record.
    pub(super) fn thaw_without_record(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let mut changes = Vec::new();
        let flows = outbound.flows.iter_mut();
        for (flow, entry) in flows.filter(|(_, entry)| entry.state != OutboundFlowState::Closed) {
            // Above the epoch of any rollback that the holder granted and forgot.
            entry.epoch = entry.epoch.saturating_add(TRANSIT_EPOCH);
            let (flow, kind, epoch) = (*flow, ChangeKind::Establish, entry.epoch);
            changes.push(OwnershipChange { flow, kind, epoch });
        }
        if !changes.is_empty() {
            self.core
                .outputs
                .push_event(Event::ReportChanges { changes });
        }
        self.thaw(now, id);
    }

    /// Resumes the process on this node.
    pub(super) fn thaw(&mut self, now: Duration, id: MoveId) {
        self.set_deadline(id, None);
        self.cancel_outbound_request(id);
        let Some(outbound) = self.outbound_moves.get(&id) else {
            return;
        };
        // Peers have heard of the move since acceptor and peers prepared for the freeze.
        if outbound.arm_count > 0 {
            let peers = outbound.peers.clone();
            self.undo_at_peers(now, id, peers);
        }
        self.command_thaw(id, 1);
    }

    pub(super) fn command_thaw(&mut self, id: MoveId, attempt: u32) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Thawing;
        let flows = outbound.flows.iter().map(|(flow, entry)| FlowEpoch {
            flow: *flow,
            epoch: entry.epoch,
        });
        let flows = flows.collect();
        let purpose = CommandPurpose::Thaw(id, attempt);
        self.core
            .push_command(purpose, |token| Command::Thaw { token, id, flows });
    }

    pub(super) fn on_thawed(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<(), Failure>,
    ) {
        if self
            .outbound_in_stage(id, OutboundMoveStage::Thawing)
            .is_none()
        {
            return;
        }
        let purpose = CommandPurpose::Thaw(id, attempt);
        if let Err(error) = result
            && self
                .core
                .retry_or_report(now, (id, "Thaw"), purpose, attempt, error)
        {
            return;
        }
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let owned_flows = outbound
            .flows
            .iter()
            .map(|(flow, entry)| (*flow, entry.epoch));
        let owned_flows: BTreeMap<Flow, _> = owned_flows.collect();
        let (record, cloned) = (outbound.record_epoch, outbound.clone_runs);
        let outcome = match cloned {
            true => MoveOutcome::Cloned,
            false => MoveOutcome::Kept {
                reason: outbound.reason.clone(),
            },
        };
        outbound.stage = OutboundMoveStage::Removing;
        self.end_flows(id, &owned_flows, |_| false);
        self.report_outcome(id, outcome);
        match record {
            _ if cloned => self.flush_holder(now, id),
            Some(epoch) => {
                let remove = process_change(id, ChangeKind::Remove, epoch);
                self.request_changes(now, vec![remove], HolderRequestPurpose::Remove(id));
            }
            None => self.on_removed(id),
        }
    }
}
