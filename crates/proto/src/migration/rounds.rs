//! Decides whether another round of copying pays.
//!
//! Rounds continue until the predicted freeze is short enough or no longer shrinks, or until a limit on their number or
//! time is reached.

use super::command::{Command, RoundReport};
use super::core::{Purpose, Timer};
use super::donor::Stage;
use super::event::{Event, Reason, Step};
use super::predict::Load;
use super::{Config, Migration};
use core::time::Duration;
use holdfast_wire::MoveId;

/// Share by which a round must shorten the predicted freeze to pay.
const SHRINKS: f64 = 0.1;
/// Number of rounds without a gain after which copying ends.
const STALE_MAX: u32 = 2;

/// Ratio of a freeze to one without memory from which on memory counts as most of the freeze.
const MOSTLY_MEMORY: u32 = 2;

/// The rounds of one move.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    pub count: u32,
    /// End of the first round.
    pub begun: Option<Duration>,
    /// End of the last round.
    pub ended: Duration,
    /// The shortest predicted freeze.
    best: Option<Duration>,
    stale: u32,
}

/// The step that follows a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Another,
    Freeze { post_copy: bool },
    TooLong { predicted: Duration, max: Duration },
}

impl Rounds {
    /// Judges the round that has just ended, by the predicted freeze and the predicted freeze without memory.
    pub(super) fn judge(
        &mut self,
        now: Duration,
        (predicted, bare): (Duration, Duration),
        (max, post_copy): (Option<Duration>, bool),
        config: &Config,
    ) -> Verdict {
        let begun = *self.begun.get_or_insert(now);
        let best = self.best.unwrap_or(Duration::MAX);
        if predicted < best.mul_f64_or_max(1.0 - SHRINKS) {
            self.stale = 0;
        } else {
            self.stale += 1;
        }
        let best = best.min(predicted);
        self.best = Some(best);
        if max.is_some_and(|max| predicted <= max) {
            return Verdict::Freeze { post_copy: false };
        }
        let more = self.count < config.rounds_max && now - begun < config.rounds_time_max;
        if self.stale < STALE_MAX && more {
            return Verdict::Another;
        }
        match max {
            None => Verdict::Freeze {
                post_copy: post_copy && predicted >= bare * MOSTLY_MEMORY,
            },
            Some(_) if post_copy => Verdict::Freeze { post_copy: true },
            Some(max) => Verdict::TooLong {
                predicted: best,
                max,
            },
        }
    }
}

/// Multiplication that saturates: `Duration::MAX` times a fraction would overflow in rounding.
trait MulOrMax {
    fn mul_f64_or_max(self, factor: f64) -> Duration;
}

impl MulOrMax for Duration {
    fn mul_f64_or_max(self, factor: f64) -> Duration {
        Duration::try_from_secs_f64(self.as_secs_f64() * factor).unwrap_or(Duration::MAX)
    }
}

impl Migration {
    pub(super) fn copy_round(&mut self, id: MoveId) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.stage = Stage::Copying;
        given.rounds.count += 1;
        let (process, to) = (given.process, given.to);
        let (options, round) = (given.options, given.rounds.count);
        self.core
            .command(Purpose::Round(id), |token| Command::CopyRound {
                token,
                id,
                process,
                to,
                sockets: options.sockets,
                clone: options.clone,
                verify: options.verify,
                rehearsal: options.rehearsal,
                round,
            });
    }

    pub(super) fn round_ended(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<RoundReport, String>,
    ) {
        let Some(given) = self.given_in(id, Stage::Copying) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(why) => {
                let step = Step::Copy;
                return self.fail(now, id, Reason::Failed { step, why });
            }
        };
        if !report.refusals.is_empty() {
            let (by, whys) = (given.to, report.refusals);
            return self.fail(now, id, Reason::Refused { by, whys });
        }
        if given.options.rehearsal {
            return self.fail(now, id, Reason::Rehearsed);
        }
        given.rounds.ended = now;
        given.summary.copied += report.copied;
        given.summary.saved += report.saved;
        given.summary.rounds = given.rounds.count;
        if let Err(reason) = self.update_sockets(id, &report) {
            return self.fail(now, id, reason);
        }
        let model = &mut self.model;
        // Compressed bytes count in full, as in memory.
        model.learn_round(report.copied + report.saved, report.duration);
        let rate = model.rate();
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        given.load = Load {
            dirty: model.dirty_at_freeze(given.options.sockets, report.dirty, report.dirtied_in),
            sockets: given.options.sockets_in_freeze(report.sockets),
            shape: report.shape,
        };
        let predicted = model.predict(given.options.sockets, given.load);
        given.summary.predicted = predicted;
        let seconds = report.dirtied_in.as_secs_f64().max(1e-6);
        self.core.event(Event::Round {
            id,
            round: given.rounds.count,
            copied: report.copied,
            saved: report.saved,
            dirty: report.dirty,
            dirty_rate: (report.dirty as f64 / seconds) as u64,
            rate,
            predicted,
        });
        if given.built {
            self.judge_round(now, id, predicted);
        } else {
            given.stage = Stage::Awaiting;
        }
    }

    /// Updates the sockets of the process after a round.
    fn update_sockets(&mut self, id: MoveId, report: &RoundReport) -> Result<(), Reason> {
        let Some(given) = self.donor.get_mut(&id) else {
            return Ok(());
        };
        if given.options.clone {
            return Ok(());
        }
        given.peers = report.peers.clone();
        given.forwarded = report.forwarded.clone();
        given.flows = report.flows.iter().map(super::give::place).collect();
        self.check_sockets(id)
    }

    fn judge_round(&mut self, now: Duration, id: MoveId, predicted: Duration) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        let may = (given.options.max_freeze, given.options.post_copy);
        let without_memory = Load {
            dirty: 0,
            ..given.load
        };
        let bare = self.model.predict(given.options.sockets, without_memory);
        let both = (predicted, bare);
        match given.rounds.judge(now, both, may, &self.core.config) {
            Verdict::Another => self.copy_round(id),
            Verdict::Freeze { post_copy } => {
                given.may_follow = post_copy;
                if post_copy {
                    given.summary.predicted = bare;
                }
                given.summary.phases.copy = now.saturating_sub(given.since);
                self.prepare_freeze(now, id);
            }
            Verdict::TooLong { predicted, max } => {
                self.fail(now, id, Reason::FreezeTooLong { predicted, max });
            }
        }
    }

    /// Handles `Ready`: the acceptor has made the empty process. A round that ended before is stale, so another one
    /// starts.
    pub(super) fn ready(&mut self, now: Duration, id: MoveId, result: Result<(), String>) {
        let Some(given) = self.donor.get_mut(&id) else {
            return;
        };
        if !matches!(given.stage, Stage::Copying | Stage::Awaiting) || given.built {
            let to = given.to;
            return self.core.ignored(to, "Ready", "it is not waited for");
        }
        if let Err(why) = result {
            let whys = vec![why];
            let by = given.to;
            return self.fail(now, id, Reason::Refused { by, whys });
        }
        given.built = true;
        let waits = given.stage == Stage::Awaiting;
        self.core
            .set_timer(Timer::Given(id), &mut given.deadline, None);
        if waits {
            self.copy_round(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::NodeId;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Judges rounds of a second with these predictions, in milliseconds; returns the number of rounds and the last
    /// verdict.
    fn judge(predictions: &[u64], max: Option<u64>, post_copy: bool) -> (usize, Verdict) {
        let config = Config::new(NodeId(1), 1, NodeId(1), []);
        let mut rounds = Rounds::default();
        let mut verdict = Verdict::Another;
        for (index, predicted) in predictions.iter().enumerate() {
            rounds.count += 1;
            let now = ms(1_000 * index as u64);
            let both = (ms(*predicted), ms(8));
            verdict = rounds.judge(now, both, (max.map(ms), post_copy), &config);
            if verdict != Verdict::Another {
                return (index + 1, verdict);
            }
        }
        (predictions.len(), verdict)
    }

    const FREEZE: Verdict = Verdict::Freeze { post_copy: false };

    #[test]
    fn rounds_end_when_the_freeze_no_longer_shrinks() {
        assert_eq!(judge(&[100, 50, 20, 19, 19, 1], None, false), (5, FREEZE));
        assert_eq!(
            judge(&[100, 99, 50, 51, 20], None, false),
            (5, Verdict::Another)
        );
    }

    #[test]
    fn rounds_end_when_the_freeze_is_short_enough() {
        assert_eq!(judge(&[100, 50, 9, 1], Some(10), false), (3, FREEZE));
    }

    #[test]
    fn a_freeze_that_stays_too_long_is_refused_or_memory_follows() {
        let (predicted, max) = (ms(20), ms(10));
        let too_long = Verdict::TooLong { predicted, max };
        assert_eq!(judge(&[100, 20, 30, 25], Some(10), false), (4, too_long));
        let post_copy = Verdict::Freeze { post_copy: true };
        assert_eq!(judge(&[100, 20, 30, 25], Some(10), true), (4, post_copy));
    }

    #[test]
    fn memory_follows_where_it_is_the_most_of_a_freeze() {
        let post_copy = Verdict::Freeze { post_copy: true };
        assert_eq!(judge(&[100, 20, 20, 20], None, true), (4, post_copy));
        assert_eq!(judge(&[100, 15, 15, 15], None, true), (4, FREEZE));
    }

    #[test]
    fn rounds_are_bounded_in_number_and_time() {
        let shrinking: Vec<u64> = (0..200)
            .map(|round| 2_000_000 / 2_u64.pow(round % 20))
            .collect();
        let config = Config::new(NodeId(1), 1, NodeId(1), []);
        let mut rounds = Rounds {
            count: 30,
            ..Rounds::default()
        };
        assert_eq!(
            rounds.judge(ms(0), (ms(5), ms(5)), (None, false), &config),
            FREEZE
        );
        let mut rounds = Rounds::default();
        assert_eq!(
            rounds.judge(ms(0), (ms(5_000), ms(5)), (None, false), &config),
            Verdict::Another
        );
        assert_eq!(
            rounds.judge(ms(121_000), (ms(5), ms(5)), (None, false), &config),
            FREEZE
        );
        assert!(judge(&shrinking, None, false).0 <= 30);
    }
}
