//! Asking the holder, again and again until it answers.

use super::core::{Ask, AskPurpose, Purpose, Timer};
use super::event::Event;
use super::{Command, Handoff};
use core::time::Duration;
use holdfast_wire::{Change, ChangeKind, Frame, NodeId, Record, RecordState, Refusal};

/// What the holder says to each change.
pub(super) type Answers = Vec<Result<Option<Record>, Refusal>>;

/// The most changes of one question.
pub(super) const CHANGES_MAX: usize = 8_192;
/// After so many times without an answer the holder is called silent.
const TIMES_UNTIL_SILENT: u32 = 4;

impl Handoff {
    /// Asks the holder (which may be this node) and returns the question's number.
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

    /// Stops asking; an answer that still comes is ignored.
    pub(super) fn cancel_ask(&mut self, request: u64) {
        if let Some(ask) = self.core.asks.remove(&request) {
            self.core.timers.remove(&(ask.due, Timer::Ask(request)));
        }
    }

    /// The question is due again.
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

    /// There is a new channel to the holder: everything is asked at once, and from then on as if for the first time.
    pub(super) fn ask_all_again(&mut self, now: Duration) {
        let requests: Vec<u64> = self.core.asks.keys().copied().collect();
        for request in requests {
            if let Some(ask) = self.core.asks.get_mut(&request) {
                ask.wait = self.core.config.ask_retry_min / 2;
            }
            self.ask_again(now, request);
        }
    }

    /// The holder has answered.
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

    /// Takes the reports of the daemon; those of flows that move wait.
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

    /// Asks what there is to report, one question at a time, so that the order is kept whatever is lost.
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
                // Asked to make way for a removal, which tells how it went.
                (ChangeKind::Rollback, _) => {}
                _ => self.core.event(Event::Changed { change, result }),
            }
        }
        for change in again.into_iter().rev() {
            self.core.reports.push_front(change);
        }
        self.core.report_asked = false;
    }

    /// What to ask when a removal was refused with `record`. Only this node changes what it owns: another epoch is
    /// one that its entry was not told yet. A transit from this node that it does not know of was begun in an earlier
    /// life of the daemon, of a flow that was closed before it was frozen.
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
