//! Requests to the holder, repeated until it answers.

use super::core::{CommandPurpose, HandoffTimer, HolderRequestPurpose, RequestToHolder};
use super::event::Event;
use super::{Command, Handoff};
use core::time::Duration;
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Frame, NodeId, OwnershipChange, OwnershipRecord, RecordState,
};

/// The holder's answer to each change.
pub(super) type HolderAnswers = Vec<Result<Option<OwnershipRecord>, ChangeRefusal>>;

/// Most changes in one request.
pub(super) const CHANGES_MAX: usize = 8_192;
/// Number of transmissions without an answer after which the holder is reported as silent.
const SILENT_AFTER_ATTEMPTS: u32 = 4;

impl Handoff {
    /// Sends a request to the holder (which may be this node) and returns the request's number.
    pub(super) fn request_changes(
        &mut self,
        now: Duration,
        changes: Vec<OwnershipChange>,
        purpose: HolderRequestPurpose,
    ) -> u64 {
        let request = self.core.next_number();
        let config = &self.core.config;
        let due = now + config.holder_retry_min;
        let holder_request = RequestToHolder {
            changes: changes.clone(),
            purpose,
            due,
            next_wait: config.holder_retry_min,
            transmissions: 1,
        };
        self.core.holder_requests.insert(request, holder_request);
        if config.holder == config.node {
            let changes = self.raise_epochs(changes);
            let asker = self.core.config.node;
            let purpose = CommandPurpose::ArbitrateOwn { request };
            self.core.push_command(purpose, |token| Command::Arbitrate {
                token,
                asker,
                changes,
            });
        } else {
            let to = config.holder;
            self.core
                .timers
                .insert((due, HandoffTimer::HolderRequest(request)));
            self.core
                .send(to, Frame::ChangeRequest { request, changes });
        }
        request
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_request_to_holder(&mut self, request: u64) {
        if let Some(holder_request) = self.core.holder_requests.remove(&request) {
            self.core
                .timers
                .remove(&(holder_request.due, HandoffTimer::HolderRequest(request)));
        }
    }

    /// Repeats a request.
    pub(super) fn repeat_request_to_holder(&mut self, now: Duration, request: u64) {
        let max = self.core.config.holder_retry_max;
        let holder = self.core.config.holder;
        let Some(holder_request) = self.core.holder_requests.get_mut(&request) else {
            return;
        };
        self.core
            .timers
            .remove(&(holder_request.due, HandoffTimer::HolderRequest(request)));
        holder_request.next_wait = (holder_request.next_wait * 2).min(max);
        holder_request.due = now + holder_request.next_wait;
        holder_request.transmissions += 1;
        let (due, transmissions, change_count) = (
            holder_request.due,
            holder_request.transmissions,
            holder_request.changes.len(),
        );
        let changes = holder_request.changes.clone();
        self.core
            .timers
            .insert((due, HandoffTimer::HolderRequest(request)));
        self.core
            .send(holder, Frame::ChangeRequest { request, changes });
        if transmissions == SILENT_AFTER_ATTEMPTS {
            self.core.push_event(Event::HolderSilent {
                holder,
                changes: change_count,
            });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn repeat_all_requests_to_holder(&mut self, now: Duration) {
        let requests: Vec<u64> = self.core.holder_requests.keys().copied().collect();
        for request in requests {
            if let Some(holder_request) = self.core.holder_requests.get_mut(&request) {
                holder_request.next_wait = self.core.config.holder_retry_min / 2;
            }
            self.repeat_request_to_holder(now, request);
        }
    }

    /// Handles the holder's answer.
    pub(super) fn on_holder_answer(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        mut answers: HolderAnswers,
    ) {
        if from != self.core.config.holder {
            return self.core.report_ignored(
                from,
                "ChangeResponse",
                "the sender is not the holder",
            );
        }
        let Some(holder_request) = self.core.holder_requests.get(&request) else {
            return self.core.report_ignored(
                from,
                "ChangeResponse",
                "no open request with this number",
            );
        };
        if holder_request.changes.len() != answers.len() {
            return self.core.report_ignored(
                from,
                "ChangeResponse",
                "the number of results differs from the number of changes",
            );
        }
        let holder_request = self
            .core
            .holder_requests
            .remove(&request)
            .expect("the request was found above");
        self.core
            .timers
            .remove(&(holder_request.due, HandoffTimer::HolderRequest(request)));
        match holder_request.purpose {
            HolderRequestPurpose::Divert(seq) => self.on_diverted(now, seq, answers),
            HolderRequestPurpose::Rollback(settling) => self.on_rolled_back(now, settling, answers),
            HolderRequestPurpose::Commit(batch) => self.on_committed(now, batch, answers),
            HolderRequestPurpose::Recovery(takes) => self.on_recovery_answered(takes, answers),
            HolderRequestPurpose::Report => {
                let changes = holder_request.changes.into_iter();
                self.on_reports_answered(changes.zip(answers.drain(..)));
            }
        }
    }

    /// Queues the daemon's reports; reports of moving flows are deferred.
    pub(super) fn queue_reports(&mut self, changes: Vec<OwnershipChange>) {
        for change in changes {
            if !matches!(change.kind, ChangeKind::Establish | ChangeKind::Remove) {
                let node = self.core.config.node;
                self.core.report_ignored(
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
                            .push_event(Event::ReportAnswered { change, result });
                    }
                    corrected.extend(corrections);
                }
                // This rollback only prepared a removal, and the removal reports the result.
                (ChangeKind::Rollback, _) => {}
                _ => self
                    .core
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
