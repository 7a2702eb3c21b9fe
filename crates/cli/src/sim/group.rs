//! Scenarios of handoffs and migrations.

use std::collections::BTreeMap;

use anyhow::Result;
use holdfast_sim::group::Outcome;
use holdfast_sim::scenario::Group;
use holdfast_sim::{Violation, seeds};
use serde::Serialize;

use super::{RunArgs, WrongSeed, seeds_from};
use crate::Ending;
use crate::control::print_json;
use crate::table::Table;

/// Report of `sim run` for a group.
#[derive(Serialize)]
struct Report<'a> {
    kind: &'static str,
    seeds: u32,
    first_seed: u64,
    /// Number of frames, timers, steps of commands and actions, in the seeds without a violation.
    events: u64,
    /// Number of occurrences by kind of event, in the seeds without a violation.
    counts: &'a BTreeMap<String, u64>,
    wrong: Vec<WrongSeed>,
}

pub(super) fn run(args: &RunArgs, about: &str, group: &Group) -> Result<Ending> {
    if args.trace {
        return Ok(trace(args.seed, group));
    }
    let all = seeds_from(args.seed, args.seeds);
    let verdicts = seeds::each(
        &all,
        |seed| group.try_seed(*seed, None),
        |done| eprint!("\r{done} of {} seeds", all.len()),
    );
    eprintln!();
    let (events, counts) = sum(&verdicts);
    let wrong: Vec<WrongSeed> = (all.iter().zip(&verdicts))
        .filter_map(|(seed, verdict)| Some(WrongSeed::new(*seed, verdict.as_ref().err()?)))
        .collect();
    let ending = match wrong.is_empty() {
        true => Ending::Done,
        false => Ending::Failed,
    };
    if args.json {
        let report = Report {
            kind: group.name(),
            seeds: args.seeds,
            first_seed: args.seed,
            events,
            counts: &counts,
            wrong,
        };
        return print_json(&report).map(|()| ending);
    }
    println!("{about}");
    let right = all.len() - wrong.len();
    println!(
        "{right} of {} seeds came right, {events} events",
        args.seeds
    );
    for wrong in &wrong {
        println!("{wrong}");
    }
    let mut table = Table::new(["WHAT", "TIMES"]);
    for (what, count) in counts {
        table.row([what, count.to_string()]);
    }
    print!("{}", table.text());
    Ok(ending)
}

fn sum(verdicts: &[Result<Outcome, Violation>]) -> (u64, BTreeMap<String, u64>) {
    let (mut events, mut counts) = (0, BTreeMap::new());
    for outcome in verdicts.iter().flatten() {
        events += outcome.events;
        for (what, count) in &outcome.counts {
            *counts.entry(what.clone()).or_default() += count;
        }
    }
    (events, counts)
}

/// Prints all events of one seed.
fn trace(seed: u64, group: &Group) -> Ending {
    let mut trace = Vec::new();
    let verdict = group.try_seed(seed, Some(&mut trace));
    for line in trace {
        println!("{line}");
    }
    match verdict {
        Ok(_) => Ending::Done,
        Err(violation) => {
            println!("{}", WrongSeed::new(seed, &violation));
            Ending::Failed
        }
    }
}
