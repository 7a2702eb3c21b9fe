//! Decides whether another round of copying pays.
//!
//! Rounds continue until the predicted freeze is short enough or no longer shrinks, or until a limit on their number or
//! time is reached.

use super::command::{Command, RoundReport};
use super::donor::OutboundMoveStage;
use super::event::{Event, ProcessKeptReason};
use super::freeze_cost::FreezeLoad;
use super::migration_core::{CommandPurpose, MoveTimer};
use super::{Migration, MigrationMachineConfig};
use core::time::Duration;
use holdfast_wire::MoveId;
use holdfast_wire::failure::{Failure, MigrationStep};

/// Share by which a round must shorten the predicted freeze to pay.
const SHRINK_MIN: f64 = 0.1;
/// Number of rounds without a gain after which copying ends.
const STALE_ROUNDS_MAX: u32 = 2;

/// Ratio of a freeze to one without memory from which on memory counts as most of the freeze.
const MEMORY_BOUND_RATIO: u32 = 2;

/// The copying rounds of one move.
#[derive(Debug, Default)]
pub(super) struct CopyRounds {
    pub count: u32,
    /// End of the first round.
    pub first_ended: Option<Duration>,
    /// End of the last round.
    pub last_ended: Duration,
    /// The shortest predicted freeze.
    shortest_freeze: Option<Duration>,
    stale_rounds: u32,
}

/// The step that follows a round of copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepAfterRound {
    CopyAgain,
    Freeze { post_copy: bool },
    TooLong { predicted: Duration, max: Duration },
}

impl CopyRounds {
    /// Judges the round that has just ended, by the predicted freeze and the predicted freeze without memory.
    pub(super) fn choose_next_step(
        &mut self,
        now: Duration,
        (predicted, bare): (Duration, Duration),
        (max, post_copy): (Option<Duration>, bool),
        config: &MigrationMachineConfig,
    ) -> StepAfterRound {
        let first_ended = *self.first_ended.get_or_insert(now);
        let best = self.shortest_freeze.unwrap_or(Duration::MAX);
        if predicted < best.mul_f64_or_max(1.0 - SHRINK_MIN) {
            self.stale_rounds = 0;
        } else {
            self.stale_rounds += 1;
        }
        let best = best.min(predicted);
        self.shortest_freeze = Some(best);
        if max.is_some_and(|max| predicted <= max) {
            return StepAfterRound::Freeze { post_copy: false };
        }
        let more = self.count < config.rounds_max && now - first_ended < config.rounds_time_max;
        if self.stale_rounds < STALE_ROUNDS_MAX && more {
            return StepAfterRound::CopyAgain;
        }
        match max {
            None => StepAfterRound::Freeze {
                post_copy: post_copy && predicted >= bare * MEMORY_BOUND_RATIO,
            },
            Some(_) if post_copy => StepAfterRound::Freeze { post_copy: true },
            Some(max) => StepAfterRound::TooLong {
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
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.stage = OutboundMoveStage::Copying;
        outbound.rounds.count += 1;
        let (process, to) = (outbound.process, outbound.to);
        let (options, round) = (outbound.options, outbound.rounds.count);
        self.core
            .push_command(CommandPurpose::CopyRound(id), |token| Command::CopyRound {
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

    pub(super) fn on_round_ended(
        &mut self,
        now: Duration,
        id: MoveId,
        result: Result<RoundReport, Failure>,
    ) {
        let Some(outbound) = self.outbound_in_stage(id, OutboundMoveStage::Copying) else {
            return;
        };
        let report = match result {
            Ok(report) => report,
            Err(error) => {
                let step = MigrationStep::Copy;
                return self.fail_move(now, id, ProcessKeptReason::Failed { step, why: error });
            }
        };
        if !report.refusals.is_empty() {
            let (by, whys) = (outbound.to, report.refusals);
            return self.fail_move(now, id, ProcessKeptReason::Refused { by, whys });
        }
        if outbound.options.rehearsal {
            return self.fail_move(now, id, ProcessKeptReason::Rehearsed);
        }
        outbound.rounds.last_ended = now;
        outbound.summary.copied_bytes += report.sent_bytes;
        outbound.summary.saved_bytes += report.saved_bytes;
        outbound.summary.rounds = outbound.rounds.count;
        if let Err(reason) = self.update_sockets(id, &report) {
            return self.fail_move(now, id, reason);
        }
        let model = &mut self.model;
        // Compressed bytes count in full, as in memory.
        model.learn_round(report.sent_bytes + report.saved_bytes, report.duration);
        let rate = model.rate();
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        outbound.load = FreezeLoad {
            dirty_bytes: model.dirty_at_freeze(
                outbound.options.sockets,
                report.dirty_bytes,
                report.dirty_interval,
            ),
            sockets: outbound.options.sockets_in_freeze(report.sockets),
            tree: report.tree,
        };
        let predicted = model.predict(outbound.options.sockets, outbound.load);
        outbound.summary.predicted = predicted;
        let seconds = report.dirty_interval.as_secs_f64().max(1e-6);
        self.core.outputs.push_event(Event::RoundEnded {
            id,
            round: outbound.rounds.count,
            sent_bytes: report.sent_bytes,
            saved_bytes: report.saved_bytes,
            dirty_bytes: report.dirty_bytes,
            dirty_rate: (report.dirty_bytes as f64 / seconds) as u64,
            send_rate: rate,
            predicted,
        });
        if outbound.acceptor_ready {
            self.judge_round(now, id, predicted);
        } else {
            outbound.stage = OutboundMoveStage::AwaitingAcceptor;
        }
    }

    /// Updates the sockets of the process after a round.
    fn update_sockets(
        &mut self,
        id: MoveId,
        report: &RoundReport,
    ) -> Result<(), ProcessKeptReason> {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return Ok(());
        };
        if outbound.options.clone {
            return Ok(());
        }
        outbound.peers = report.peers.clone();
        outbound.forwarded = report.forwarded.clone();
        outbound.flows = report
            .flows
            .iter()
            .map(super::donor_divert::outbound_flow)
            .collect();
        self.check_sockets(id)
    }

    fn judge_round(&mut self, now: Duration, id: MoveId, predicted: Duration) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        let limits = (outbound.options.max_freeze, outbound.options.post_copy);
        let without_memory = FreezeLoad {
            dirty_bytes: 0,
            ..outbound.load
        };
        let memoryless_freeze = self.model.predict(outbound.options.sockets, without_memory);
        let predictions = (predicted, memoryless_freeze);
        match outbound
            .rounds
            .choose_next_step(now, predictions, limits, &self.core.config)
        {
            StepAfterRound::CopyAgain => self.copy_round(id),
            StepAfterRound::Freeze { post_copy } => {
                outbound.post_copy_allowed = post_copy;
                if post_copy {
                    outbound.summary.predicted = memoryless_freeze;
                }
                outbound.summary.phases.copy = now.saturating_sub(outbound.since);
                self.prepare_freeze(now, id);
            }
            StepAfterRound::TooLong { predicted, max } => {
                self.fail_move(now, id, ProcessKeptReason::FreezeTooLong { predicted, max });
            }
        }
    }

    /// Handles `Ready`: the acceptor has made the stub process. A round that ended before is stale, so another one
    /// starts.
    pub(super) fn on_ready(&mut self, now: Duration, id: MoveId, result: Result<(), Failure>) {
        let Some(outbound) = self.outbound_moves.get_mut(&id) else {
            return;
        };
        if !matches!(
            outbound.stage,
            OutboundMoveStage::Copying | OutboundMoveStage::AwaitingAcceptor
        ) || outbound.acceptor_ready
        {
            let to = outbound.to;
            return self
                .core
                .outputs
                .report_ignored(to, "Ready", "unexpected in this state");
        }
        if let Err(error) = result {
            let whys = vec![error];
            let by = outbound.to;
            return self.fail_move(now, id, ProcessKeptReason::Refused { by, whys });
        }
        outbound.acceptor_ready = true;
        let is_waiting = outbound.stage == OutboundMoveStage::AwaitingAcceptor;
        self.core
            .set_timer(MoveTimer::OutboundMove(id), &mut outbound.deadline, None);
        if is_waiting {
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
    fn judge(predictions: &[u64], max: Option<u64>, post_copy: bool) -> (usize, StepAfterRound) {
        let config = MigrationMachineConfig::new(NodeId(1), 1);
        let mut rounds = CopyRounds::default();
        let mut verdict = StepAfterRound::CopyAgain;
        for (index, predicted) in predictions.iter().enumerate() {
            rounds.count += 1;
            let now = ms(1_000 * index as u64);
            let freezes = (ms(*predicted), ms(8));
            verdict = rounds.choose_next_step(now, freezes, (max.map(ms), post_copy), &config);
            if verdict != StepAfterRound::CopyAgain {
                return (index + 1, verdict);
            }
        }
        (predictions.len(), verdict)
    }

    const FREEZE: StepAfterRound = StepAfterRound::Freeze { post_copy: false };

    #[test]
    fn rounds_end_when_freeze_stops_shrinking() {
        assert_eq!(judge(&[100, 50, 20, 19, 19, 1], None, false), (5, FREEZE));
        assert_eq!(
            judge(&[100, 99, 50, 51, 20], None, false),
            (5, StepAfterRound::CopyAgain)
        );
    }

    #[test]
    fn rounds_end_when_freeze_is_short_enough() {
        assert_eq!(judge(&[100, 50, 9, 1], Some(10), false), (3, FREEZE));
    }

    #[test]
    fn too_long_freeze_is_refused_or_uses_post_copy() {
        let (predicted, max) = (ms(20), ms(10));
        let too_long = StepAfterRound::TooLong { predicted, max };
        assert_eq!(judge(&[100, 20, 30, 25], Some(10), false), (4, too_long));
        let post_copy = StepAfterRound::Freeze { post_copy: true };
        assert_eq!(judge(&[100, 20, 30, 25], Some(10), true), (4, post_copy));
    }

    #[test]
    fn post_copy_is_used_if_memory_dominates_freeze() {
        let post_copy = StepAfterRound::Freeze { post_copy: true };
        assert_eq!(judge(&[100, 20, 20, 20], None, true), (4, post_copy));
        assert_eq!(judge(&[100, 15, 15, 15], None, true), (4, FREEZE));
    }

    #[test]
    fn rounds_are_limited_in_number_and_time() {
        let shrinking: Vec<u64> = (0..200)
            .map(|round| 2_000_000 / 2_u64.pow(round % 20))
            .collect();
        let config = MigrationMachineConfig::new(NodeId(1), 1);
        let mut rounds = CopyRounds {
            count: 30,
            ..CopyRounds::default()
        };
        assert_eq!(
            rounds.choose_next_step(ms(0), (ms(5), ms(5)), (None, false), &config),
            FREEZE
        );
        let mut rounds = CopyRounds::default();
        assert_eq!(
            rounds.choose_next_step(ms(0), (ms(5_000), ms(5)), (None, false), &config),
            StepAfterRound::CopyAgain
        );
        assert_eq!(
            rounds.choose_next_step(ms(121_000), (ms(5), ms(5)), (None, false), &config),
            FREEZE
        );
        assert!(judge(&shrinking, None, false).0 <= 30);
    }
}
