//! The end of a failed move at its donor: the process continues here, or it moved all the same.
//!
//! A move that may have been diverted is rolled back at the holder, and the holder's answer decides; a process that may
//! be stopped remains so until then. A process that was not stopped runs on meanwhile: no node can have committed it,
//! for its state was never sent.

use super::Migration;
use super::command::{Command, FlowEpoch};
use super::donor::OutboundMoveStage;
use super::donor_divert::OutboundFlowState;
use super::event::{Event, MoveOutcome, ProcessKeptReason};
use super::migration_core::CommandPurpose;
use super::requests_to_holder::{
    HolderAnswers, HolderRequestPurpose, OWNED_EPOCH, TRANSIT_EPOCH, process_change,
};
use core::time::Duration;
use holdfast_wire::failure::{Failure, PeerFault};
use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{ChangeKind, Flow, MoveId, OwnershipChange};
use std::collections::BTreeMap;

impl Migration {
    /// Fails a move.
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
        let Some(outbound) = self.outbound_in_stage(id, OutboundMoveStage::Settling) else {
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
            // A flow closed before the freeze did not move with the process: this request rolled its transit back.
            Some(_) => {
                for (entry, record) in outbound.flows.values_mut().zip(records) {
                    match record {
                        None => entry.state = OutboundFlowState::Unrecorded,
                        Some(record) if record.is_owned_by(node) => {
                            (entry.state, entry.epoch) = (OutboundFlowState::Closed, record.epoch);
                        }
                        Some(_) => {}
                    }
                }
                self.end_committed(id);
            }
            // The state was never sent, so the original is the only process.
            None if !outbound.maybe_stopped => self.thaw(now, id),
            None => self.ask_acceptor(now, id),
        }
    }

    /// Asks the acceptor, because the holder lost its table, and with it the answer whether the acceptor had committed.
    fn ask_acceptor(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let to = outbound.to;
        if !std::mem::replace(&mut outbound.in_doubt, true) {
            self.core.outputs.push_event(Event::HolderLostTable { id });
        }
        let reason = PeerFault::HolderLostRecord.into();
        self.core.send(to, id, MoveFrame::Abort { reason });
        let retry_at = now + self.core.config.retry_max;
        self.set_deadline(id, Some(retry_at));
    }

    /// Resumes the process: the acceptor will never run it, and the holder has no record.
    pub(super) fn thaw_without_record(&mut self, now: Duration, id: MoveId) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let mut changes = Vec::new();
        for (flow, entry) in &mut outbound.flows {
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
        self.core.end_flows(id, &owned_flows, |_| false);
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
