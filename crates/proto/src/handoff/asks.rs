//! Requests to the holder, repeated until it answers.

use super::core::{Ask, AskPurpose, Purpose, Timer};
use super::event::Event;
use super::{Command, Handoff};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Frame, NodeId, Record, RecordState, Refusal};

/// The holder's answer to each change.
pub(super) type Answers = Vec<Result<Option<Record>, Refusal>>;

/// Most changes in one request.
pub(super) const CHANGES_MAX: usize = 8_192;
/// Number of transmissions without an answer after which the holder is reported as silent.
const TIMES_UNTIL_SILENT: u32 = 4;

impl Handoff {
    /// Sends a request to the holder (which may be this node) and returns the request's number.
    pub(super) fn ask(&mut self, now: Duration, changes: Vec<Change>, purpose: AskPurpose) -> u64 {
        let request = self.core.number();
        let config = &self.core.config;
        let due = now + config.ask_retry_min;
        let ask = Ask {
            changes: changes.clone(),
            purpose,
            due,
            wait: config.ask_retry_min,
            times: 1,
        };
        self.core.asks.insert(request, ask);
        if config.holder == config.node {
            let changes = self.lift_epochs(changes);
            let asker = self.core.config.node;
            let purpose = Purpose::ArbitrateOwn { request };
            self.core.command(purpose, |token| Command::Arbitrate {
                token,
                asker,
                changes,
            });
        } else {
            let to = config.holder;
            self.core.timers.insert((due, Timer::Ask(request)));
            self.core.send(to, Frame::Ask { request, changes });
        }
        request
    }

    /// Cancels a request; a later answer is ignored.
    pub(super) fn cancel_ask(&mut self, request: u64) {
        if let Some(ask) = self.core.asks.remove(&request) {
            self.core.timers.remove(&(ask.due, Timer::Ask(request)));
        }
    }

    /// Repeats a request.
    pub(super) fn ask_again(&mut self, now: Duration, request: u64) {
        let max = self.core.config.ask_retry_max;
        let holder = self.core.config.holder;
        let Some(ask) = self.core.asks.get_mut(&request) else {
            return;
        };
        self.core.timers.remove(&(ask.due, Timer::Ask(request)));
        ask.wait = (ask.wait * 2).min(max);
        ask.due = now + ask.wait;
        ask.times += 1;
        let (due, times, waiting) = (ask.due, ask.times, ask.changes.len());
        let changes = ask.changes.clone();
        self.core.timers.insert((due, Timer::Ask(request)));
        self.core.send(holder, Frame::Ask { request, changes });
        if times == TIMES_UNTIL_SILENT {
            self.core.event(Event::HolderSilent {
                holder,
                changes: waiting,
            });
        }
    }

    /// Repeats all requests at once over a new channel to the holder, and starts their waits from the beginning.
    pub(super) fn ask_all_again(&mut self, now: Duration) {
        let requests: Vec<u64> = self.core.asks.keys().copied().collect();
        for request in requests {
            if let Some(ask) = self.core.asks.get_mut(&request) {
                ask.wait = self.core.config.ask_retry_min / 2;
            }
            self.ask_again(now, request);
        }
    }

    /// Handles the holder's answer.
    pub(super) fn answered(
        &mut self,
        now: Duration,
        from: NodeId,
        request: u64,
        mut answers: Answers,
    ) {
        if from != self.core.config.holder {
            return self.core.ignored(from, "Answer", "it is not the holder's");
        }
        let Some(ask) = self.core.asks.get(&request) else {
            return self.core.ignored(from, "Answer", "nobody waits for it");
        };
        if ask.changes.len() != answers.len() {
            return self.core.ignored(
                from,
                "Answer",
                "it has another number of results than there were changes",
            );
        }
        let ask = self.core.asks.remove(&request).expect("it was there");
        self.core.timers.remove(&(ask.due, Timer::Ask(request)));
        match ask.purpose {
            AskPurpose::Divert(seq) => self.diverted(now, seq, answers),
            AskPurpose::Rollback(settling) => self.rolled_back(now, settling, answers),
            AskPurpose::Commit(batch) => self.committed(now, batch, answers),
            AskPurpose::Restarted(takes) => self.restarted_takes_answered(takes, answers),
            AskPurpose::Report => {
                let changes = ask.changes.into_iter();
                self.reported(changes.zip(answers.drain(..)));
            }
        }
    }

    /// Queues the daemon's reports; reports of moving flows are deferred.
    pub(super) fn report(&mut self, changes: Vec<Change>) {
        for change in changes {
            if !matches!(change.kind, ChangeKind::Establish | ChangeKind::Remove) {
                let node = self.core.config.node;
                self.core
                    .ignored(node, "change", "the machine makes it itself");
            } else if let Some(moving) = self.core.moving.get_mut(&change.flow) {
                moving.deferred.push(change);
            } else {
                self.core.reports.push_back(change);
            }
        }
    }

    /// Sends queued reports, one request at a time, so that their order is kept whatever is lost.
    pub(super) fn pump_reports(&mut self, now: Duration) {
        if self.core.report_asked || self.core.reports.is_empty() {
            return;
        }
        let count = self.core.reports.len().min(CHANGES_MAX);
        let changes = self.core.reports.drain(..count).collect();
        self.core.report_asked = true;
        self.ask(now, changes, AskPurpose::Report);
    }

    fn reported(
        &mut self,
        results: impl Iterator<Item = (Change, Result<Option<Record>, Refusal>)>,
    ) {
        let mut again = Vec::new();
        for (change, result) in results {
            match (&change.kind, &result) {
                (
                    ChangeKind::Remove,
                    Err(Refusal {
                        current: Some(record),
                    }),
                ) => {
                    let better = self.better_removal(&change, record);
                    if better.is_empty() {
                        self.core.event(Event::Changed { change, result });
                    }
                    again.extend(better);
                }
                // This rollback only prepared a removal, and the removal reports the result.
                (ChangeKind::Rollback, _) => {}
                _ => self.core.event(Event::Changed { change, result }),
            }
        }
        for change in again.into_iter().rev() {
            self.core.reports.push_front(change);
        }
        self.core.report_asked = false;
    }

    /// Returns the changes to request after a removal was refused with `record`.
    ///
    /// Only this node changes records it owns, so a different epoch is one that its entry has not got yet. A transit
    /// from this node without a move here was begun before the daemon restarted, for a flow that was closed before it
    /// was frozen.
    fn better_removal(&self, change: &Change, record: &Record) -> Vec<Change> {
        let node = self.core.config.node;
        match record.state {
            RecordState::Owned { owner } if owner == node && record.epoch != change.epoch => {
                vec![Change {
                    epoch: record.epoch,
                    ..*change
                }]
            }
            RecordState::Transit { donor, .. }
                if donor == node && !self.core.moving.contains_key(&change.flow) =>
            {
                let kind = ChangeKind::Rollback;
                let epoch = record.epoch;
                let after = Change {
                    epoch: epoch.saturating_add(1),
                    ..*change
                };
                vec![
                    Change {
                        kind,
                        epoch,
                        ..*change
                    },
                    after,
                ]
            }
            _ => Vec::new(),
        }
    }
}
