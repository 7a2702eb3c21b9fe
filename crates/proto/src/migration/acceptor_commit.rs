//! The acceptor's second half: the process is restored, committed at the holder, and only then runs.

use super::Migration;
use super::acceptor::InboundMoveStage;
use super::command::{Command, FlowEpoch, ResumeReport};
use super::donor::OutboundMoveStage::Removing;
use super::event::Event;
use super::migration_core::CommandPurpose;
use super::requests_to_holder::{
    HolderAnswers, HolderRequestPurpose, TRANSIT_EPOCH, process_change,
};
use core::time::Duration;
use holdfast_wire::failure::{Context, Failure, PeerFault, ProtocolViolation};
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame, PeerConnections, TranslationStep};
use holdfast_wire::{ChangeKind, Epoch, Flow, MoveId, NodeId, OwnershipChange, OwnershipRecord};
use std::collections::BTreeMap;

impl Migration {
    /// Handles `Final`: the donor has sent everything.
    pub(super) fn on_final(
        &mut self,
        now: Duration,
        from: NodeId,
        id: MoveId,
        flows: Vec<DonorFlowEpoch>,
        (peers, forwarded, bytes): (Vec<PeerConnections>, Vec<Flow>, u64),
    ) {
        let Some(inbound) = self.inbound_moves.get_mut(&id) else {
            return self.refuse_unknown_move(from, id, "Final");
        };
        if id.donor != from || inbound.stage != InboundMoveStage::Waiting {
            return (self.core.outputs).report_ignored(
                from,
                "Final",
                "wrong sender or state of the move",
            );
        }
        if flows
            .iter()
            .any(|flow| !inbound.held_flows.contains(&flow.flow))
        {
            self.discard(id, ProtocolViolation::UnannouncedFlows);
            return self.send_never_runs(id, ProtocolViolation::UnannouncedFlows);
        }
        inbound.finish_stage(now, InboundMoveStage::Restoring);
        inbound.flows = flows.clone();
        inbound.peers = peers.clone();
        self.set_inbound_deadline(id, None);
        self.core
            .push_command(CommandPurpose::Restore(id), |token| Command::Restore {
                token,
                id,
                flows,
                peers,
                forwarded,
                bytes,
            });
    }

    pub(super) fn on_restored(&mut self, now: Duration, id: MoveId, result: Result<(), Failure>) {
        let Some(inbound) = self.inbound_in_stage(id, InboundMoveStage::Restoring) else {
            return;
        };
        if let Err(error) = result {
            let failure = error.within(Context::ProcessNotRestored);
            self.discard(id, failure.clone());
            return self.send_never_runs(id, failure);
        }
        inbound.times.restore_us = inbound.finish_stage(now, InboundMoveStage::Committing);
        // The flows are the ones diverted with the process: none was closed before the freeze, and none appeared late.
        if inbound.arm_count == 1 && inbound.flows.len() == inbound.held_flows.len() {
            let flows = inbound.flows.len() as u32;
            let commit_all = process_change(id, ChangeKind::CommitAll { flows }, TRANSIT_EPOCH);
            self.request_changes(now, vec![commit_all], HolderRequestPurpose::CommitAll(id));
        } else {
            self.request_commits(now, id);
        }
    }

    fn request_commits(&mut self, now: Duration, id: MoveId) {
        if let Some(inbound) = self.inbound_moves.get(&id) {
            let changes = process_and_flow_changes(id, ChangeKind::Commit, &inbound.flows);
            self.request_changes(now, changes, HolderRequestPurpose::Commit(id));
        }
    }

    /// Handles the holder's decision about the process and all its flows.
    pub(super) fn on_committed_all(&mut self, now: Duration, id: MoveId, answers: HolderAnswers) {
        let node = self.core.config.node;
        let Some(inbound) = self.inbound_in_stage(id, InboundMoveStage::Committing) else {
            return;
        };
        match answers.first() {
            Some(Ok(Some(process))) if process.is_owned_by(node) => {
                let flows = inbound.flows.iter();
                let committed_record = |flow: &DonorFlowEpoch| {
                    OwnershipRecord::owned(node, flow.epoch.saturating_add(TRANSIT_EPOCH))
                };
                let records: Vec<_> = flows.map(|flow| Some(committed_record(flow))).collect();
                inbound.committed_unnamed = inbound.flows.clone();
                self.resume(now, id, *process, records.into_iter());
            }
            // The holder does not know which flows were diverted together, or refuses; a second refusal is final.
            _ => self.request_commits(now, id),
        }
    }

    /// Handles the holder's decision about each record.
    pub(super) fn on_committed(&mut self, now: Duration, id: MoveId, answers: HolderAnswers) {
        let node = self.core.config.node;
        if self
            .inbound_in_stage(id, InboundMoveStage::Committing)
            .is_none()
        {
            return;
        }
        // A refused commit is not this node's, whatever the record says.
        let mut records = answers.into_iter().map(|answer| answer.ok().flatten());
        match records.next().flatten() {
            Some(record) if record.is_owned_by(node) => self.resume(now, id, record, records),
            _ => {
                self.discard(id, PeerFault::MoveNotCommitted);
                self.send_never_runs(id, PeerFault::MoveNotCommitted);
            }
        }
    }

    /// Runs the process that this node owns, and has its peers send to this node.
    pub(super) fn resume(
        &mut self,
        now: Duration,
        id: MoveId,
        record: OwnershipRecord,
        records: impl Iterator<Item = Option<OwnershipRecord>>,
    ) {
        let node = self.core.config.node;
        let Some(inbound) = self.inbound_moves.get_mut(&id) else {
            return;
        };
        inbound.stage = InboundMoveStage::Resuming;
        inbound.epoch = record.epoch;
        for (DonorFlowEpoch { flow, .. }, record) in inbound.flows.iter().zip(records) {
            match record.filter(|record| record.is_owned_by(node)) {
                Some(record) => inbound.owned_flows.push((*flow, record.epoch)),
                None => inbound.lost_flows.push(*flow),
            }
        }
        self.command_resume(id, 1);
        self.switch_translations(now, id);
    }

    pub(super) fn command_resume(&mut self, id: MoveId, attempt: u32) {
        let Some(inbound) = self.inbound_moves.get(&id) else {
            return;
        };
        let lost_flows = inbound.lost_flows.clone();
        let owned_flows = inbound.owned_flows.iter();
        let flows = owned_flows.map(|&(flow, epoch)| FlowEpoch { flow, epoch });
        let flows = flows.collect();
        self.core
            .push_command(CommandPurpose::Resume(id, attempt), |token| {
                Command::Resume {
                    token,
                    id,
                    flows,
                    lost_flows,
                }
            });
    }

    pub(super) fn switch_translations(&mut self, now: Duration, id: MoveId) {
        let node = self.core.config.node;
        let Some(inbound) = self.inbound_moves.get(&id) else {
            return;
        };
        let (hops, peers) = (inbound.hops, inbound.peers.clone());
        self.request_translation(now, id, (hops, node), TranslationStep::Switch, peers);
    }

    pub(super) fn on_resumed(
        &mut self,
        now: Duration,
        id: MoveId,
        attempt: u32,
        result: Result<ResumeReport, Failure>,
    ) {
        if self
            .inbound_in_stage(id, InboundMoveStage::Resuming)
            .is_none()
        {
            return;
        }
        let report = match result {
            Ok(went) => went,
            Err(error) => {
                let purpose = CommandPurpose::Resume(id, attempt);
                if self
                    .core
                    .retry_or_report(now, (id, "Resume"), purpose, attempt, error)
                {
                    return;
                }
                ResumeReport::default()
            }
        };
        let Some(inbound) = self.inbound_moves.get_mut(&id) else {
            return;
        };
        inbound.steps = report.steps;
        inbound.times.commit_us = inbound.finish_stage(
            now.saturating_sub(report.running_for),
            InboundMoveStage::Running,
        );
        inbound.done_retry_wait = self.core.config.retry_min;
        let flows = inbound.owned_flows.clone();
        let owned_flows: BTreeMap<Flow, _> = flows.iter().copied().collect();
        // The donor waits for this frame, but no node for the rest.
        self.send_done(now, id);
        self.end_flows(id, &owned_flows, |flow| !owned_flows.contains_key(flow));
        self.core
            .outputs
            .push_event(Event::ProcessAccepted { id, flows });
    }

    /// Tells the donor that its process runs here, until the donor reports that nothing of it is left there.
    pub(super) fn send_done(&mut self, now: Duration, id: MoveId) {
        let max = self.core.config.retry_max;
        let Some(inbound) = self
            .inbound_in_stage(id, InboundMoveStage::Running)
            .filter(|inbound| !inbound.donor_released)
        else {
            return;
        };
        let (result, times) = (Ok(inbound.epoch), inbound.times);
        let (ran_us, steps) = (inbound.micros_in_stage(now), inbound.steps.clone());
        let due = now + inbound.done_retry_wait;
        inbound.done_retry_wait = (inbound.done_retry_wait * 2).min(max);
        self.core.send(
            id.donor,
            id,
            MoveFrame::Done {
                result,
                times,
                since_resume_us: ran_us,
                steps,
            },
        );
        self.set_inbound_deadline(id, Some(due));
    }

    /// Repeats `Done` over a new channel to a donor.
    pub(super) fn resend_done(&mut self, now: Duration, donor: NodeId) {
        let moves: Vec<MoveId> = self.inbound_moves.keys().copied().collect();
        for id in moves.into_iter().filter(|id| id.donor == donor) {
            self.send_done(now, id);
        }
    }

    pub(super) fn on_donor_released(&mut self, now: Duration, from: NodeId, id: MoveId) {
        if id.donor != from {
            return (self.core.outputs).report_ignored(
                from,
                "Released",
                "the move belongs to another donor",
            );
        }
        if let Some(inbound) = self.inbound_in_stage(id, InboundMoveStage::Running) {
            inbound.donor_released = true;
            self.set_inbound_deadline(id, None);
            self.remove_if_finished(now, id);
        }
    }

    /// Removes the move's record once donor and peers have answered, since no node needs it any more.
    pub(super) fn remove_if_finished(&mut self, now: Duration, id: MoveId) {
        if self
            .translate_requests
            .keys()
            .any(|(move_id, _)| *move_id == id)
        {
            return;
        }
        let Some(inbound) = self
            .inbound_in_stage(id, InboundMoveStage::Running)
            .filter(|inbound| inbound.donor_released)
        else {
            return;
        };
        inbound.stage = InboundMoveStage::Forgetting;
        // A holder that crashed after it decided about all flows may have written none of their records.
        let mut flows = std::mem::take(&mut inbound.committed_unnamed);
        // The donor may have reported the transit of a flow that is gone from here to a new holder, which committed nothing.
        let gone_flows = std::mem::take(&mut inbound.gone_flows);
        flows.retain(|flow| !gone_flows.contains(&flow.flow));
        let is_gone = |flow: &&DonorFlowEpoch| gone_flows.contains(&flow.flow);
        let gone = inbound.flows.iter().filter(is_gone);
        let ends = gone.flat_map(|flow| [commit_change(flow), removal(flow)]);
        let mut changes: Vec<OwnershipChange> = flows.iter().map(commit_change).collect();
        changes.extend(ends);
        changes.push(process_change(id, ChangeKind::Remove, inbound.epoch));
        self.request_changes(now, changes, HolderRequestPurpose::Remove(id));
    }

    /// Ends the flows of a move ([`super::migration_core::MigrationCore::end_flows`]), and notes the flows that are gone.
    pub(super) fn end_flows(
        &mut self,
        id: MoveId,
        owned_flows: &BTreeMap<Flow, Epoch>,
        has_moved: impl Fn(&Flow) -> bool,
    ) {
        for flow in self.core.end_flows(id, owned_flows, has_moved) {
            self.note_gone_flow(flow);
        }
    }

    /// Notes that a flow is gone from here, if the flow came with a process whose move has not ended yet.
    pub(super) fn note_gone_flow(&mut self, flow: Flow) {
        for inbound in self.inbound_moves.values_mut() {
            if inbound.stage == InboundMoveStage::Running && inbound.held_flows.contains(&flow) {
                inbound.gone_flows.insert(flow);
            }
        }
    }

    /// Forgets the saved state of a move whose record is gone.
    pub(super) fn on_removed(&mut self, id: MoveId) {
        let outbound = self.outbound_in_stage(id, Removing).is_some();
        if outbound
            || self
                .inbound_in_stage(id, InboundMoveStage::Forgetting)
                .is_some()
        {
            match outbound {
                true => drop(self.outbound_moves.remove(&id)),
                false => self.end_inbound(id),
            }
            self.core
                .push_command(CommandPurpose::Forget(id), |token| Command::Forget {
                    token,
                    id,
                });
        }
    }
}

/// Returns a change of the process's record, and the same change of its flows' transits.
pub(super) fn process_and_flow_changes(
    id: MoveId,
    kind: ChangeKind,
    flows: &[DonorFlowEpoch],
) -> Vec<OwnershipChange> {
    let flows = flows.iter().map(|flow| OwnershipChange {
        kind,
        ..commit_change(flow)
    });
    std::iter::once(process_change(id, kind, TRANSIT_EPOCH))
        .chain(flows)
        .collect()
}

/// Returns the removal of a flow after its commit.
fn removal(flow: &DonorFlowEpoch) -> OwnershipChange {
    OwnershipChange {
        flow: flow.flow,
        kind: ChangeKind::Remove,
        epoch: flow.epoch.saturating_add(TRANSIT_EPOCH),
    }
}

/// Returns the commit of a single flow.
fn commit_change(flow: &DonorFlowEpoch) -> OwnershipChange {
    OwnershipChange {
        flow: flow.flow,
        kind: ChangeKind::Commit,
        epoch: flow.epoch.saturating_add(1),
    }
}
