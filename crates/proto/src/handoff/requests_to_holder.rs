//! Requests to the holder, repeated until it answers.

use super::donor::OutboundBatchStage;
use super::event::Event;
use super::handoff_core::{CommandPurpose, HandoffTimer, HolderRequestPurpose};
use super::{Command, Handoff};
pub(super) use crate::holder_client::HolderAnswers;
use crate::holder_client::{AnswerShape, HolderRequestBody};
use core::time::Duration;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};

/// Most changes in one request.
pub(super) const CHANGES_MAX: usize = 8_192;

impl Handoff {
    /// Sends a request to the holder (which may be this node) and returns the request's number.
    pub(super) fn request_changes(
        &mut self,
        now: Duration,
        changes: Vec<OwnershipChange>,
        purpose: HolderRequestPurpose,
    ) -> u64 {
        let request = self.core.next_request_number();
        let body = HolderRequestBody::Change(changes);
        let due = self
            .core
            .holder_client
            .open(now, request, body.clone(), purpose);
        self.submit_request(request, body, due);
        request
    }

    /// Sends an open request, or decides it if this node is the holder.
    fn submit_request(&mut self, request: u64, body: HolderRequestBody, due: Duration) {
        if !self.core.holder_client.is_holder() {
            let timer = (due, HandoffTimer::HolderRequest(request));
            self.core.timers.insert(timer);
            return self.send_holder_request(request, body);
        }
        let HolderRequestBody::Change(changes) = body else {
            return;
        };
        let changes = self.raise_epochs(changes);
        let asker = self.core.config.node;
        let purpose = CommandPurpose::ArbitrateOwn { request };
        self.core.push_command(purpose, |token| Command::Arbitrate {
            token,
            asker,
            changes,
        });
    }

    fn send_holder_request(&mut self, request: u64, body: HolderRequestBody) {
        let holder = self.core.holder_client.holder();
        self.core.send(holder, body.into_frame(request));
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_request_to_holder(&mut self, request: u64) {
        if let Some(open) = self.core.holder_client.cancel(request) {
            self.core
                .timers
                .remove(&(open.due, HandoffTimer::HolderRequest(request)));
        }
    }

    /// Sends a request to the holder again, because no answer has come in time.
    pub(super) fn repeat_request_to_holder(&mut self, now: Duration, request: u64) {
        let Some(repetition) = self.core.holder_client.repeat(now, request) else {
            return;
        };
        let timer = HandoffTimer::HolderRequest(request);
        self.core.timers.remove(&(repetition.previous_due, timer));
        self.core.timers.insert((repetition.due, timer));
        let items = repetition.body.len();
        self.send_holder_request(request, repetition.body);
        if repetition.is_holder_silent {
            self.core.outputs.push_event(Event::HolderSilent {
                holder: self.core.holder_client.holder(),
                changes: items,
            });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn repeat_all_requests_to_holder(&mut self, now: Duration) {
        for request in self.core.holder_client.restart_waits() {
            self.repeat_request_to_holder(now, request);
        }
    }

    /// Submits all open requests to the holder of a new view. The requests get new numbers, because an earlier term of
    /// that node may have answered the former ones: the answer may still be under way, and others have decided since.
    pub(super) fn redirect_requests_to_holder(&mut self, now: Duration, holder: NodeId) {
        self.core.holder_client.set_holder(holder);
        for former in self.core.holder_client.restart_waits() {
            let request = self.core.next_request_number();
            self.core.holder_client.renumber(former, request);
            for batch in self.donor.batches.values_mut() {
                if batch.stage == OutboundBatchStage::Diverting(former) {
                    batch.stage = OutboundBatchStage::Diverting(request);
                }
            }
            if let Some(repetition) = self.core.holder_client.repeat(now, request) {
                let timer = HandoffTimer::HolderRequest(former);
                self.core.timers.remove(&(repetition.previous_due, timer));
                self.submit_request(request, repetition.body, repetition.due);
            }
        }
    }

    /// Handles the holder's answer.
    pub(super) fn on_holder_answer(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        answers: HolderAnswers,
    ) {
        let shape = AnswerShape::Changes(answers.len());
        let open = match self.core.holder_client.take_answered(from, request, shape) {
            Ok(open) => open,
            Err(reason) => {
                return self
                    .core
                    .outputs
                    .report_ignored(from, "ChangeResponse", reason);
            }
        };
        self.core
            .timers
            .remove(&(open.due, HandoffTimer::HolderRequest(request)));
        match (open.purpose, open.body) {
            (HolderRequestPurpose::Divert(seq), _) => self.on_diverted(now, seq, answers),
            (HolderRequestPurpose::Rollback(settling), _) => {
                self.on_rolled_back(now, settling, answers);
            }
            (HolderRequestPurpose::Commit(batch), _) => self.on_committed(now, batch, answers),
            (HolderRequestPurpose::Recovery(takes), _) => self.on_recovery_answered(takes, answers),
            (HolderRequestPurpose::Report, HolderRequestBody::Change(changes)) => {
                self.on_reports_answered(changes.into_iter().zip(answers));
            }
            (HolderRequestPurpose::Report, HolderRequestBody::Lookup(_)) => {}
        }
    }

    /// Queues the daemon's reports; reports of moving flows are deferred.
    pub(super) fn queue_reports(&mut self, changes: Vec<OwnershipChange>) {
        for change in changes {
            if !matches!(change.kind, ChangeKind::Establish | ChangeKind::Remove) {
                let node = self.core.config.node;
                self.core.outputs.report_ignored(
                    node,
                    "change",
                    "the handoff machine makes this change itself",
                );
            } else if let Some(moving) = self.core.moving_flows.get_mut(&change.flow) {
                moving.deferred.push(change);
            } else {
                self.core.reports.push_back(change);
            }
        }
    }

    /// Sends queued reports, one request at a time, so that their order is kept whatever is lost.
    pub(super) fn send_reports(&mut self, now: Duration) {
        if self.core.report_in_flight || self.core.reports.is_empty() {
            return;
        }
        let count = self.core.reports.len().min(CHANGES_MAX);
        let changes = self.core.reports.drain(..count).collect();
        self.core.report_in_flight = true;
        self.request_changes(now, changes, HolderRequestPurpose::Report);
    }

    fn on_reports_answered(
        &mut self,
        results: impl Iterator<
            Item = (
                OwnershipChange,
                Result<Option<OwnershipRecord>, ChangeRefusal>,
            ),
        >,
    ) {
        let mut corrected = Vec::new();
        for (change, result) in results {
            match (&change.kind, &result) {
                (
                    ChangeKind::Remove,
                    Err(ChangeRefusal {
                        current: Some(record),
                    }),
                ) => {
                    let corrections = self.corrected_removal(&change, record);
                    if corrections.is_empty() {
                        self.core
                            .outputs
                            .push_event(Event::ReportAnswered { change, result });
                    }
                    corrected.extend(corrections);
                }
                // This rollback only prepared a removal, and the removal reports the result.
                (ChangeKind::Rollback, _) => {}
                _ => self
                    .core
                    .outputs
                    .push_event(Event::ReportAnswered { change, result }),
            }
        }
        for change in corrected.into_iter().rev() {
            self.core.reports.push_front(change);
        }
        self.core.report_in_flight = false;
    }

    /// Returns the changes to request after a removal was refused with `record`.
    ///
    /// Only this node changes records it owns, so a different epoch is one that its entry has not got yet. A transit
    /// from this node without a move here was begun before the daemon restarted, for a flow that was closed before it
    /// was frozen.
    fn corrected_removal(
        &self,
        change: &OwnershipChange,
        record: &OwnershipRecord,
    ) -> Vec<OwnershipChange> {
        let node = self.core.config.node;
        match record.state {
            RecordState::Owned { owner } if owner == node && record.epoch != change.epoch => {
                vec![OwnershipChange {
                    epoch: record.epoch,
                    ..*change
                }]
            }
            RecordState::Transit { donor, .. }
                if donor == node && !self.core.moving_flows.contains_key(&change.flow) =>
            {
                let kind = ChangeKind::Rollback;
                let epoch = record.epoch;
                let removal = OwnershipChange {
                    epoch: epoch.saturating_add(1),
                    ..*change
                };
                vec![
                    OwnershipChange {
                        kind,
                        epoch,
                        ..*change
                    },
                    removal,
                ]
            }
            _ => Vec::new(),
        }
    }
}
