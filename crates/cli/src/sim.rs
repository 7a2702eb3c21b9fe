//! `holdfast sim`: the daemons' machines in virtual time.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use holdfast_sim::pools::{Outcome, Window, run as simulate};
use holdfast_sim::scenario::{BUILT_IN, Scenario};
use holdfast_sim::{Estimate, seeds};
use serde::Serialize;

use crate::Ending;
use crate::control::print_json;
use crate::table::Table;

/// Simulate registrars, elements and users: the machines of the daemons, in virtual time
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  holdfast sim list
  holdfast sim run regions --seeds 24
  holdfast sim run my.toml --seed 7 --json
  holdfast sim seeds --count 200")]
pub struct SimArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Simulate a scenario, and say how long requests took
    Run(RunArgs),
    /// Name the scenarios that come with the program
    List(ListArgs),
    /// Simulate faults by chance, one schedule for each seed, and say whether all came right in the end
    Seeds(SeedsArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// A file, or the name of one that comes with the program; docs/simulation.md says how to write one
    scenario: String,
    /// How many seeds, for the confidence intervals
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    seeds: u32,
    /// The first of them
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SeedsArgs {
    /// How many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// The first of them
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Carries out `holdfast sim`.
///
/// # Errors
/// The scenario cannot be read.
pub fn run(args: &SimArgs) -> Result<Ending> {
    match &args.what {
        What::Run(args) => run_scenario(args).map(|()| Ending::Done),
        What::List(args) => list(args).map(|()| Ending::Done),
        What::Seeds(args) => Ok(try_seeds(args)),
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
struct Line {
    window: String,
    requests: f64,
    handling_s: Spread,
    queuing_s: f64,
    startup_s: f64,
    /// Of an element's capacity.
    speed: Spread,
    utilisation: f64,
    /// Requests that an element of the user's own zone did.
    local: f64,
    /// Requests that an element lost and another did.
    lost: f64,
}

#[derive(Serialize)]
struct Spread {
    mean: f64,
    ci95: Option<f64>,
}

impl From<Estimate> for Spread {
    fn from(estimate: Estimate) -> Spread {
        Spread {
            mean: estimate.mean,
            ci95: estimate.ci95,
        }
    }
}

fn run_scenario(args: &RunArgs) -> Result<()> {
    let Scenario {
        config,
        windows,
        about,
    } = scenario(&args.scenario)?;
    let all: Vec<u64> = (0..u64::from(args.seeds))
        .map(|nth| args.seed + nth)
        .collect();
    let outcomes = seeds::each(
        &all,
        |seed| simulate(&config, *seed),
        |done| eprint!("\r{done} of {} seeds", all.len()),
    );
    eprintln!();
    let name = |place: usize| windows.get(place).cloned().unwrap_or("all".to_owned());
    let count = outcomes.first().map_or(0, |outcome| outcome.windows.len());
    let lines: Vec<Line> = (0..count)
        .map(|place| line(name(place), &outcomes, place, config.workload.capacity))
        .collect();
    if args.json {
        return print_json(&lines);
    }
    println!("{about}");
    let events: u64 = outcomes.iter().map(|outcome| outcome.events).sum();
    println!("{} seeds, {events} events", args.seeds);
    let spread = |spread: &Spread, by: f64| {
        let ci95 = spread
            .ci95
            .map_or(String::new(), |ci95| format!(" ± {:.3}", by * ci95));
        format!("{:.3}{ci95}", by * spread.mean)
    };
    let mut table = Table::new([
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
            spread(&line.handling_s, 1.0),
            format!("{:.3}", line.queuing_s),
            format!("{:.3}", line.startup_s),
            spread(&line.speed, 100.0),
            format!("{:.1}", 100.0 * line.utilisation),
            format!("{:.1}", 100.0 * line.local),
            format!("{:.1}", line.lost),
        ]);
    }
    print!("{}", table.text());
    Ok(())
}

fn line(window: String, outcomes: &[Outcome], place: usize, capacity: f64) -> Line {
    let estimate = |of: &dyn Fn(&Window) -> f64| {
        let values: Vec<f64> = outcomes
            .iter()
            .map(|outcome| of(&outcome.windows[place]))
            .collect();
        Estimate::of(&values)
    };
    let share = |sum: f64, window: &Window| sum / window.requests as f64;
    Line {
        window,
        requests: estimate(&|window| window.requests as f64).mean,
        handling_s: estimate(&|window| window.handling_mean_s()).into(),
        queuing_s: estimate(&|window| share(window.queuing_s, window)).mean,
        startup_s: estimate(&|window| share(window.startup_s, window)).mean,
        speed: estimate(&|window| window.speed() / capacity).into(),
        utilisation: estimate(&|window| window.utilisation()).mean,
        local: estimate(&|window| window.local_share()).mean,
        lost: estimate(&|window| window.lost as f64).mean,
    }
}

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    about: String,
}

fn list(args: &ListArgs) -> Result<()> {
    let mut listed = Vec::new();
    for (name, text) in BUILT_IN {
        let about = Scenario::parse(text)?.about;
        listed.push(Listed { name, about });
    }
    if args.json {
        return print_json(&listed);
    }
    for Listed { name, about } in listed {
        println!("{name:<10}  {about}");
    }
    Ok(())
}

fn try_seeds(args: &SeedsArgs) -> Ending {
    let all: Vec<u64> = (0..u64::from(args.count))
        .map(|nth| args.seed + nth)
        .collect();
    let verdicts = seeds::each(
        &all,
        |seed| (*seed, holdfast_sim::faults::try_seed(*seed)),
        |done| {
            if done.is_multiple_of(10) || done == all.len() {
                eprint!("\r{done} of {} seeds", all.len());
            }
        },
    );
    eprintln!();
    let wrong: Vec<_> = verdicts
        .iter()
        .filter_map(|(seed, verdict)| Some((seed, verdict.as_ref().err()?)))
        .collect();
    for (seed, violation) in &wrong {
        println!("seed {seed}: {violation}");
    }
    println!(
        "{} of {} seeds came right",
        all.len() - wrong.len(),
        all.len()
    );
    if wrong.is_empty() {
        Ending::Done
    } else {
        Ending::Failed
    }
}
