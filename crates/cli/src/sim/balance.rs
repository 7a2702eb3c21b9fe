//! Scenarios of large groups without faults, whose conductors spread the load of a tenth of the nodes.

use std::time::Instant;

use anyhow::{Result, anyhow};
use holdfast_sim::conductor::{
    BalanceTimes, ConductorFrameRates, measure_balance_times, measure_conductor_frame_rates,
};
use holdfast_sim::scenario::BalanceScenario;
use serde::Serialize;

use super::{FailingSeed, RunArgs, seed_range};
use crate::ExitResult;
use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// Sizes of groups whose frames are counted, beside the scenario's own.
const FRAME_SIZES: [usize; 2] = [10, 10_000];
/// Bar: the conductors take at most so many times as long as the central planner.
const TIMES_OF_PLANNER_MAX: f64 = 2.0;
/// Bar: most moves of one process.
const MOVES_OF_ONE_MAX: usize = 2;

/// Report of `sim run` for a large group.
#[derive(Serialize)]
struct BalanceReport {
    nodes: usize,
    processes: usize,
    runs: Vec<BalanceRow>,
    frames: Vec<FrameRow>,
    /// True if every run is within the bars.
    is_within_bars: bool,
}

/// Results of one simulated run.
#[derive(Serialize)]
struct BalanceRow {
    seed: u64,
    /// Time until balance of a central planner that knows all loads, under the same limits, seconds.
    balanced_s: f64,
    /// The same for a central planner that knows all loads, under the same limits.
    planner_s: f64,
    moves: u64,
    moves_of_one_max: usize,
    /// Moves that brought a process back to its former node within 10 minutes.
    undone: u64,
    events: u64,
    /// Events in a second of the machine's time.
    events_per_s: f64,
}

/// Frames per second and node of a group at rest.
#[derive(Serialize)]
struct FrameRow {
    nodes: usize,
    sent: f64,
    sent_max: f64,
    received: f64,
    received_max: f64,
}

impl BalanceRow {
    fn new(seed: u64, times: &BalanceTimes, elapsed_s: f64) -> BalanceRow {
        BalanceRow {
            seed,
            balanced_s: times.conductors.as_secs_f64(),
            planner_s: times.planner.as_secs_f64(),
            moves: times.moves,
            moves_of_one_max: times.moves_of_one_max,
            undone: times.undone,
            events: times.events,
            events_per_s: times.events as f64 / elapsed_s,
        }
    }

    fn is_within_bars(&self) -> bool {
        self.balanced_s <= TIMES_OF_PLANNER_MAX * self.planner_s
            && self.moves_of_one_max <= MOVES_OF_ONE_MAX
            && self.undone == 0
    }
}

impl FrameRow {
    fn new(nodes: usize, rates: &ConductorFrameRates) -> FrameRow {
        FrameRow {
            nodes,
            sent: rates.sent,
            sent_max: rates.sent_max,
            received: rates.received,
            received_max: rates.received_max,
        }
    }
}

/// Simulates the group, one seed after the other, since each run is timed, and groups of other sizes at rest.
pub(super) fn run(args: &RunArgs, about: &str, scenario: BalanceScenario) -> Result<ExitResult> {
    let BalanceScenario {
        nodes,
        processes_per_node,
    } = scenario;
    let mut runs = Vec::new();
    for seed in seed_range(args.seed, args.seeds.unwrap_or(1)) {
        eprintln!("seed {seed}: {} processes", nodes * processes_per_node);
        let began = Instant::now();
        let times = measure_balance_times(nodes, processes_per_node, seed)
            .map_err(|violation| anyhow!("{}", FailingSeed::new(seed, &violation)))?;
        runs.push(BalanceRow::new(seed, &times, began.elapsed().as_secs_f64()));
    }
    let mut sizes = [FRAME_SIZES[0], nodes, FRAME_SIZES[1]].to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    let mut frames = Vec::new();
    for size in sizes {
        eprintln!("frames of {size} nodes");
        let rates = measure_conductor_frame_rates(size, args.seed)
            .map_err(|violation| anyhow!("{}", FailingSeed::new(args.seed, &violation)))?;
        frames.push(FrameRow::new(size, &rates));
    }
    let report = BalanceReport {
        nodes,
        processes: nodes * processes_per_node,
        is_within_bars: runs.iter().all(BalanceRow::is_within_bars),
        runs,
        frames,
    };
    let ending = match report.is_within_bars {
        true => ExitResult::Success,
        false => ExitResult::Failed,
    };
    match args.json {
        true => print_json(&report)?,
        false => print_text(about, &report),
    }
    Ok(ending)
}

fn print_text(about: &str, report: &BalanceReport) {
    output_line!("{about}");
    let mut table = TextTable::new([
        "SEED",
        "BALANCED AFTER S",
        "PLANNER S",
        "MOVES",
        "MOST OF ONE",
        "UNDONE",
        "EVENTS",
        "EVENTS/S",
    ]);
    for row in &report.runs {
        table.row([
            row.seed.to_string(),
            format!("{:.0}", row.balanced_s),
            format!("{:.0}", row.planner_s),
            row.moves.to_string(),
            row.moves_of_one_max.to_string(),
            row.undone.to_string(),
            row.events.to_string(),
            format!("{:.0}", row.events_per_s),
        ]);
    }
    output!("{}", table.text());
    output_line!("\nframes per second and node, at rest:");
    let mut table = TextTable::new(["NODES", "SENT", "MOST", "RECEIVED", "MOST"]);
    for row in &report.frames {
        table.row([
            row.nodes.to_string(),
            format!("{:.2}", row.sent),
            format!("{:.2}", row.sent_max),
            format!("{:.2}", row.received),
            format!("{:.2}", row.received_max),
        ]);
    }
    output!("{}", table.text());
    if !report.is_within_bars {
        output_line!(
            "not within the bars: {TIMES_OF_PLANNER_MAX} times the planner's time, {MOVES_OF_ONE_MAX} moves of a process, none undone"
        );
    }
}
