//! Results of the demonstration, and their comparison with its promises.

use std::time::Duration;

use serde::Serialize;

use super::MigrateDemoSpec;
use holdfast_testbed::process_moves::openarena_game::{GameServerMove, PlayerLosses};
use holdfast_testbed::stats::Quantiles;

/// Freeze in the paper, milliseconds: "We experience a 20 milliseconds downtime" (paper 002, section VI B).
pub const PAPER_FREEZE_MS: f64 = 20.0;
/// Packet delay in the same section, Figure 4, milliseconds.
pub const PAPER_DELAY_MS: f64 = 25.0;

/// Results of the demonstration.
#[derive(Debug, Serialize)]
pub struct MigrateReport {
    /// Parameters of the demonstration.
    pub spec: MigrateDemoSpec,
    /// True if every promise is kept.
    pub passed: bool,
    /// Promises of the demonstration that were broken.
    pub problems: Vec<String>,
    /// The moves, in order.
    pub moves: Vec<GameServerMove>,
    /// Median freeze, milliseconds.
    pub freeze_ms_median: f64,
    /// Median over the moves of the longest delay that any player saw, milliseconds.
    pub added_delay_ms_median: f64,
    /// Losses of the players.
    pub losses: PlayerLosses,
    /// Duration of the demonstration, seconds.
    pub total_s: f64,
}

impl MigrateReport {
    pub(super) fn new(
        spec: &MigrateDemoSpec,
        moves: Vec<GameServerMove>,
        losses: PlayerLosses,
        total: Duration,
    ) -> MigrateReport {
        let median = |of: fn(&GameServerMove) -> f64| {
            Quantiles::new(moves.iter().map(of).collect()).median() / 1e3
        };
        let mut report = MigrateReport {
            spec: spec.clone(),
            passed: false,
            problems: Vec::new(),
            freeze_ms_median: median(|of| of.freeze_us),
            added_delay_ms_median: median(|of| of.added_delay_us),
            moves,
            losses,
            total_s: total.as_secs_f64(),
        };
        report.problems = report.problems();
        report.passed = report.problems.is_empty();
        report
    }

    fn problems(&self) -> Vec<String> {
        let PlayerLosses {
            disconnected,
            datagrams,
            silent,
        } = self.losses;
        let mut problems = Vec::new();
        let mut expect = |kept: bool, problem: String| {
            if !kept {
                problems.push(problem);
            }
        };
        let moves_made = self.moves.len();
        expect(
            moves_made == self.spec.moves,
            format!("only {moves_made} of {} moves were made", self.spec.moves),
        );
        expect(
            disconnected == 0,
            format!("{disconnected} players were disconnected"),
        );
        expect(
            silent == 0,
            format!("{silent} players received no snapshots"),
        );
        expect(datagrams == 0, format!("{datagrams} datagrams were lost"));
        problems
    }

    /// Returns the report as text of several lines.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{:>4}  {:<8}  {:>9}  {:>14}  {:>14}  {:>12}  {:>12}\n",
            "move",
            "nodes",
            "freeze ms",
            "added delay ms",
            "usual delay ms",
            "pre-copy KiB",
            "freeze KiB"
        );
        for (number, game_move) in (1..).zip(&self.moves) {
            text += &format!(
                "{number:>4}  {:<8}  {:>9.2}  {:>14.2}  {:>14.2}  {:>12}  {:>12}\n",
                format!("{} - {}", game_move.from, game_move.to),
                game_move.freeze_us / 1e3,
                game_move.added_delay_us / 1e3,
                game_move.usual_delay_us / 1e3,
                game_move.copied_bytes >> 10,
                game_move.freeze_bytes >> 10
            );
        }
        let rows = [
            (
                "freeze, median",
                format!("{:.2} ms (paper: {PAPER_FREEZE_MS})", self.freeze_ms_median),
            ),
            (
                "added delay, median",
                format!(
                    "{:.2} ms, longest of all players in each move (paper: {PAPER_DELAY_MS})",
                    self.added_delay_ms_median
                ),
            ),
            ("datagrams lost", self.losses.datagrams.to_string()),
            (
                "disconnected",
                format!(
                    "{} of {} players",
                    self.losses.disconnected, self.spec.game.players
                ),
            ),
            ("total time", format!("{:.1} s", self.total_s)),
        ];
        text.push('\n');
        text += &rows
            .map(|(name, value)| format!("{name:<24}{value}\n"))
            .concat();
        for problem in &self.problems {
            text += &format!("NOT AS PROMISED: {problem}\n");
        }
        if self.passed {
            text += "As promised: no player was disconnected, and no datagram was lost.\n";
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs};

    fn sample_move(freeze_us: f64) -> GameServerMove {
        GameServerMove {
            from: "n2",
            to: "n3",
            freeze_us,
            added_delay_us: freeze_us / 2.0,
            usual_delay_us: 100.0,
            copied_bytes: 48 << 20,
            freeze_bytes: 300 << 10,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
            span: (Duration::ZERO, Duration::ZERO),
        }
    }

    fn report(moves: Vec<GameServerMove>, losses: PlayerLosses) -> MigrateReport {
        let spec = MigrateDemoSpec {
            moves: 3,
            ..MigrateDemoSpec::default()
        };
        MigrateReport::new(&spec, moves, losses, Duration::from_secs(9))
    }

    #[test]
    fn text_shows_medians_and_losses() {
        let report = report(
            [1e3, 9e3, 2e3].map(sample_move).to_vec(),
            PlayerLosses {
                disconnected: 2,
                datagrams: 7,
                silent: 0,
            },
        );
        let text = report.text();
        for part in [
            "2.00 ms (paper: 20)",
            "1.00 ms, longest of all",
            "2 of 24 players",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(text.contains("NOT AS PROMISED: 7 datagrams were lost"));
        assert!(!report.passed);
    }

    #[test]
    fn missing_moves_break_the_promise() {
        let good = report(vec![sample_move(1e3); 3], PlayerLosses::default());
        assert!(good.passed && good.text().contains("As promised"));
        assert!(!report(vec![sample_move(1e3); 2], PlayerLosses::default()).passed);
    }
}
