//! Figure 4: "Packet delay due to migration (OpenArena server, 24 clients)" (section VI B).

use std::time::Duration;

use anyhow::{Context, Result};

use crate::repro::{
    Estimate, Experiment, ExperimentOutcome, Figure, Panel, Point, ResultRow, Series,
    StatementCheck,
};
use crate::repro::{ExperimentSettings, experiment_outcome::format_significant};
use holdfast_testbed::openarena::PlayerTrace;
use holdfast_testbed::process_moves::openarena_game::{
    GameServerMove, GameSpec, PlayerLosses, RunningGame,
};
use holdfast_testbed::stats::Quantiles;

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "dve/figure4",
    about: "delay of a game server's packets while it moves, with 24 players",
    run,
};

/// Moves by default.
const MOVES_DEFAULT: u32 = 10;
/// Freeze in the paper, milliseconds: "a 20 milliseconds downtime of the server process execution" (section VI B).
const PAPER_FREEZE_MS: f64 = 20.0;
/// Added delay in the paper, milliseconds: "the imposed delay compared to the expected packet transmission is
/// approximately 25 milliseconds" (section VI B).
const PAPER_DELAY_MS: f64 = 25.0;
/// Bar for our own results, milliseconds: for the medians over the moves.
const TARGET_MS: f64 = 3.0;
/// Packets shown on either side of the packet that the move delayed.
const PACKETS_PER_SIDE: usize = 16;

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let spec = GameSpec::default();
    eprintln!("OpenArena's server with {} players", spec.players);
    let mut game = RunningGame::start(&spec)?;
    let mut moves = Vec::new();
    for number in 1..=settings.repeats_or(MOVES_DEFAULT) {
        let moved = game.move_server()?;
        eprintln!("move {number}: frozen {:.1} ms", moved.freeze_us / 1e3);
        moves.push(moved);
    }
    let interval = game.snapshot_interval();
    let (reports, losses) = game.end()?;
    let traces: Vec<&PlayerTrace> = reports.iter().map(|report| &report.trace).collect();
    let series = delay_series(&traces, &moves, interval)?;
    Ok(build_outcome(&spec, &moves, losses, series))
}

fn build_outcome(
    spec: &GameSpec,
    moves: &[GameServerMove],
    losses: PlayerLosses,
    series: Series,
) -> ExperimentOutcome {
    let freezes: Vec<f64> = moves.iter().map(|of| of.freeze_us / 1e3).collect();
    let delays: Vec<f64> = moves.iter().map(|of| of.added_delay_us / 1e3).collect();
    let usual: Vec<f64> = moves.iter().map(|of| of.usual_delay_us / 1e3).collect();
    let row = |point: &str, paper, values: &[f64]| {
        ResultRow::new(point, paper, Estimate::from_repeats(values), "ms")
    };
    let mut rows = vec![
        row("freeze of the server", Some(PAPER_FREEZE_MS), &freezes),
        row("delay added by a move", Some(PAPER_DELAY_MS), &delays),
        row("the same without a move", None, &usual),
    ];
    let panel = Panel {
        title: format!("{} players, {} moves", spec.players, moves.len()),
        x: "ms".to_owned(),
        y: "delay beyond the server's interval".to_owned(),
        unit: "ms".to_owned(),
        y_log: false,
        series: vec![series],
    };
    let figure = Figure {
        title: "Paper 002, figure 4".to_owned(),
        panels: vec![panel],
    };
    rows.extend(figure.rows());
    ExperimentOutcome {
        notes: notes(spec, moves.len()),
        rows,
        checks: vec![
            check_below_target("freeze, median", &freezes),
            check_below_target("delay added by a move, median", &delays),
            check_zero("datagrams lost", losses.datagrams),
            check_zero(
                "players disconnected or without snapshots",
                (losses.disconnected + losses.silent) as u64,
            ),
        ],
        figure: Some(figure),
    }
}

fn notes(spec: &GameSpec, moves: usize) -> Vec<String> {
    vec![
        format!(
            "OpenArena's dedicated server, {} snapshots a second to each of {} players; {moves} moves between two nodes of one",
            spec.snapshots, spec.players
        ),
        "machine; a delay is the longest time between two snapshots of any player, minus the server's interval. The \
         curve shows"
            .to_owned(),
        format!(
            "the packets of the player with the longest delay in each move; the packet that the move delayed is at {} \
             ms",
            50 * PACKETS_PER_SIDE
        ),
    ]
}

fn check_below_target(what: &str, values: &[f64]) -> StatementCheck {
    let median = Quantiles::new(values.to_vec()).median();
    StatementCheck {
        statement: format!("{what}: at most {TARGET_MS} ms"),
        holds: median <= TARGET_MS,
        seen: format!("{} ms", format_significant(median)),
    }
}

fn check_zero(what: &str, count: u64) -> StatementCheck {
    StatementCheck {
        statement: format!("{what}: none"),
        holds: count == 0,
        seen: count.to_string(),
    }
}

/// Returns the delays of packets around the one that a move delayed longest, as means over the moves.
fn delay_series(
    traces: &[&PlayerTrace],
    moves: &[GameServerMove],
    interval: Duration,
) -> Result<Series> {
    let curves = moves
        .iter()
        .map(|of| delays_around_move(traces, of, interval));
    let curves: Vec<Vec<f64>> = curves.collect::<Option<_>>().context("too few packets")?;
    let point = |slot: usize| {
        let values: Vec<f64> = curves.iter().map(|curve| curve[slot]).collect();
        Point {
            x: (interval * slot as u32).as_micros() as f64 / 1e3,
            ours: Estimate::from_repeats(&values),
            paper: (slot == PACKETS_PER_SIDE).then_some(PAPER_DELAY_MS),
        }
    };
    Ok(Series {
        name: "the player delayed longest".to_owned(),
        points: (0..=2 * PACKETS_PER_SIDE).map(point).collect(),
    })
}

/// Returns delays in milliseconds, with the longest of the move in the middle.
fn delays_around_move(
    traces: &[&PlayerTrace],
    of: &GameServerMove,
    interval: Duration,
) -> Option<Vec<f64>> {
    let (from, to) = (of.span.0, of.span.1 + interval * 2);
    let longest = |trace: &&&PlayerTrace| trace.longest_gap(from..=to);
    let trace = traces.iter().max_by_key(longest)?;
    let gaps: Vec<(Duration, Duration)> = trace
        .snapshot_gaps(Duration::ZERO..=Duration::MAX)
        .collect();
    let within = |(_, (at, _)): &(usize, &(Duration, Duration))| (from..=to).contains(at);
    let during = gaps.iter().enumerate().filter(within);
    let (middle, _) = during.max_by_key(|(_, (_, gap))| *gap)?;
    let shown = gaps.get(middle.checked_sub(PACKETS_PER_SIDE)?..=middle + PACKETS_PER_SIDE)?;
    let delay = |(_, gap): &(Duration, Duration)| gap.saturating_sub(interval).as_secs_f64() * 1e3;
    Some(shown.iter().map(delay).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_api::control::{MigrationPhasesUs, MigrationStepsUs};
    use holdfast_testbed::openarena::SnapshotArrival;

    fn trace(late_ms: u64) -> PlayerTrace {
        let mut trace = PlayerTrace::default();
        for number in 0..100 {
            let late = if number >= 50 { late_ms } else { 0 };
            trace.arrivals.push(SnapshotArrival {
                at: Duration::from_millis(50 * number + late),
                server_time_ms: 0,
            });
        }
        trace
    }

    #[test]
    fn delayed_packet_is_centred_in_the_series() {
        let ms = Duration::from_millis;
        let of = GameServerMove {
            from: "n2",
            to: "n3",
            freeze_us: 4_000.0,
            added_delay_us: 7_000.0,
            usual_delay_us: 0.0,
            copied_bytes: 0,
            freeze_bytes: 0,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
            span: (ms(2_300), ms(2_700)),
        };
        let (short, long) = (trace(3), trace(7));
        let series = delay_series(&[&short, &long], &[of], ms(50)).unwrap();
        assert_eq!(series.points.len(), 2 * PACKETS_PER_SIDE + 1);
        for (slot, point) in series.points.iter().enumerate() {
            let expected = if slot == PACKETS_PER_SIDE { 7.0 } else { 0.0 };
            assert!((point.ours.mean - expected).abs() < 1e-9, "{slot}");
            assert_eq!(point.paper.is_some(), slot == PACKETS_PER_SIDE);
        }
    }

    #[test]
    fn missed_target_fails_the_check() {
        assert!(check_below_target("freeze", &[2.0, 9.0, 3.0]).holds);
        assert!(!check_below_target("freeze", &[2.0, 9.0, 3.1]).holds);
        assert!(!check_zero("lost", 1).holds);
    }
}
