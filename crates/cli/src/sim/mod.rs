//! `holdfast sim`: runs the daemons' state machines in virtual time.

mod balance;
mod faults;
mod node_group;
mod policies;

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use holdfast_sim::pools::{MeasurementWindow, PoolRunOutcome, run as simulate};
use holdfast_sim::scenario::{BUILT_IN, PoolScenario, Scenario, SimulationKind};
use holdfast_sim::{Estimate, Violation, seeds};
use serde::Serialize;

use crate::ExitResult;

use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// Simulate pools, handoffs, migrations, membership, conductors and replication: runs the daemons' state machines in virtual time
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast sim list
  holdfast sim run regions --seeds 24
  holdfast sim run my.toml --seed 7 --json
  holdfast sim run handoff --seed 7 --trace
  holdfast sim run balance --json
  holdfast sim run policies --seeds 4
  holdfast sim seeds --count 200
  holdfast sim seeds --count 5000 migration
  holdfast sim seeds --bug asks-once handoff
  holdfast sim seeds --count 1000 membership")]
pub struct SimArgs {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Simulate a scenario, and print the durations of requests, or what happened in a group
    Run(RunArgs),
    /// List the built-in scenarios
    List(ScenarioListArgs),
    /// Simulate random faults, one schedule for each seed, and check that all invariants hold in the end
    Seeds(SeedsArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// A file, or the name of a built-in scenario; docs/simulation.md describes the format
    scenario: String,
    /// Number of seeds, for the confidence intervals or the counts; by default 6, and 1 for a group without faults
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    seeds: Option<u32>,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print all events of the first seed (not for pools, nor for groups without faults)
    #[arg(long, conflicts_with = "json")]
    trace: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Number of seeds of a run by default.
const SEEDS_DEFAULT: u32 = 6;

impl RunArgs {
    /// Returns the number of seeds.
    fn seed_count(&self) -> u32 {
        self.seeds.unwrap_or(SEEDS_DEFAULT)
    }
}

#[derive(Debug, Args)]
struct ScenarioListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SeedsArgs {
    /// A file or name for handoffs, migrations, membership, conductors or replication; default: pools
    scenario: Option<String>,
    /// Number of seeds
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Break a rule deliberately, to see the violation found; docs/simulation.md lists the names
    #[arg(long, value_name = "NAME")]
    bug: Option<String>,
}

/// Runs `holdfast sim`.
///
/// # Errors
/// The scenario cannot be read.
pub fn run(args: &SimArgs) -> Result<ExitResult> {
    match &args.command {
        SimCommand::Run(args) => run_scenario(args),
        SimCommand::List(args) => list(args).map(|()| ExitResult::Success),
        SimCommand::Seeds(args) => faults::run(args),
    }
}

fn scenario(name: &str) -> Result<Scenario> {
    if let Some(built_in) = Scenario::built_in(name) {
        return built_in.with_context(|| name.to_owned());
    }
    let path = PathBuf::from(name);
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("read the scenario {name}; `holdfast sim list` names those that need no file")
    })?;
    Scenario::parse(&text).with_context(|| path.display().to_string())
}

#[derive(Serialize)]
struct ResultLine {
    window: String,
    requests: f64,
    handling_s: MeanWithCi,
    queuing_s: f64,
    startup_s: f64,
    /// Share of an element's capacity.
    speed: MeanWithCi,
    utilisation: f64,
    /// Share of requests served by an element in the user's own zone.
    local: f64,
    /// Share of requests that one element lost and another served.
    lost: f64,
}

#[derive(Serialize)]
struct MeanWithCi {
    mean: f64,
    ci95: Option<f64>,
}

impl From<Estimate> for MeanWithCi {
    fn from(estimate: Estimate) -> MeanWithCi {
        MeanWithCi {
            mean: estimate.mean,
            ci95: estimate.ci95,
        }
    }
}

/// A seed with a violation.
#[derive(Serialize)]
struct FailingSeed {
    seed: u64,
    /// Time of the violation, in virtual seconds.
    at_s: f64,
    violation: String,
}

impl FailingSeed {
    fn new(seed: u64, violation: &Violation) -> FailingSeed {
        FailingSeed {
            seed,
            at_s: violation.at.as_secs_f64(),
            violation: violation.description.clone(),
        }
    }
}

impl fmt::Display for FailingSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}: after {} s: {}",
            self.seed, self.at_s, self.violation
        )
    }
}

fn seed_range(first: u64, count: u32) -> Vec<u64> {
    let offsets = 0..u64::from(count);
    offsets.map(|nth| first.wrapping_add(nth)).collect()
}

fn run_scenario(args: &RunArgs) -> Result<ExitResult> {
    let Scenario { about, kind } = scenario(&args.scenario)?;
    match kind {
        SimulationKind::Pools(pools) => {
            ensure!(
                !args.trace,
                "pools have no trace: `{}` has pools",
                args.scenario
            );
            run_pools(args, &about, &pools).map(|()| ExitResult::Success)
        }
        SimulationKind::Group(group) => node_group::run(args, &about, &group),
        SimulationKind::Balance(scenario) => {
            ensure!(
                !args.trace,
                "large groups have no trace: `{}` is one",
                args.scenario
            );
            balance::run(args, &about, scenario)
        }
        SimulationKind::Policies(scenario) => {
            ensure!(
                !args.trace,
                "groups with changing loads have no trace: `{}` is one",
                args.scenario
            );
            policies::run(args, &about, &scenario).map(|()| ExitResult::Success)
        }
    }
}

fn run_pools(args: &RunArgs, about: &str, pools: &PoolScenario) -> Result<()> {
    let PoolScenario { config, windows } = pools;
    let seeds = seed_range(args.seed, args.seed_count());
    let outcomes = seeds::run_all(
        &seeds,
        |seed| simulate(config, *seed),
        |done| eprint!("\r{done} of {} seeds", seeds.len()),
    );
    eprintln!();
    let name = |place: usize| windows.get(place).cloned().unwrap_or("all".to_owned());
    let count = outcomes.first().map_or(0, |outcome| outcome.windows.len());
    let lines: Vec<ResultLine> = (0..count)
        .map(|place| result_line(name(place), &outcomes, place, config.workload.capacity))
        .collect();
    if args.json {
        return print_json(&lines);
    }
    output_line!("{about}");
    let events: u64 = outcomes.iter().map(|outcome| outcome.events).sum();
    output_line!("{} seeds, {events} events", args.seed_count());
    let mean_with_ci = |spread: &MeanWithCi, by: f64| {
        let ci95 = spread
            .ci95
            .map_or(String::new(), |ci95| format!(" ± {:.3}", by * ci95));
        format!("{:.3}{ci95}", by * spread.mean)
    };
    let mut table = TextTable::new([
        "WINDOW",
        "REQUESTS",
        "HANDLING S",
        "QUEUING S",
        "STARTUP S",
        "SPEED %",
        "UTILISATION %",
        "LOCAL %",
        "LOST",
    ]);
    for line in &lines {
        table.row([
            line.window.clone(),
            format!("{:.0}", line.requests),
            mean_with_ci(&line.handling_s, 1.0),
            format!("{:.3}", line.queuing_s),
            format!("{:.3}", line.startup_s),
            mean_with_ci(&line.speed, 100.0),
            format!("{:.1}", 100.0 * line.utilisation),
            format!("{:.1}", 100.0 * line.local),
            format!("{:.1}", line.lost),
        ]);
    }
    output!("{}", table.text());
    Ok(())
}

fn result_line(
    window: String,
    outcomes: &[PoolRunOutcome],
    index: usize,
    capacity: f64,
) -> ResultLine {
    let estimate = |value: &dyn Fn(&MeasurementWindow) -> f64| {
        let values: Vec<f64> = outcomes
            .iter()
            .map(|outcome| value(&outcome.windows[index]))
            .collect();
        Estimate::from_repeats(&values)
    };
    let share = |sum: f64, window: &MeasurementWindow| sum / window.requests as f64;
    ResultLine {
        window,
        requests: estimate(&|window| window.requests as f64).mean,
        handling_s: estimate(&|window| window.handling_mean_s()).into(),
        queuing_s: estimate(&|window| share(window.queuing_s, window)).mean,
        startup_s: estimate(&|window| share(window.startup_s, window)).mean,
        speed: estimate(&|window| window.speed() / capacity).into(),
        utilisation: estimate(&|window| window.utilisation()).mean,
        local: estimate(&|window| window.local_share()).mean,
        lost: estimate(&|window| window.retried as f64).mean,
    }
}

#[derive(Serialize)]
struct ScenarioEntry {
    name: &'static str,
    about: String,
}

fn list(args: &ScenarioListArgs) -> Result<()> {
    let mut listed = Vec::new();
    for (name, text) in BUILT_IN {
        let about = Scenario::parse(text)?.about;
        listed.push(ScenarioEntry { name, about });
    }
    if args.json {
        return print_json(&listed);
    }
    for ScenarioEntry { name, about } in listed {
        output_line!("{name:<10}  {about}");
    }
    Ok(())
}
