//! Scenarios of handoffs, migrations, membership, conductors and replication.

use std::collections::BTreeMap;

use anyhow::Result;
use holdfast_sim::node_group::GroupRunOutcome;
use holdfast_sim::scenario::GroupScenario;
use holdfast_sim::{Violation, seeds};
use serde::Serialize;

use super::{FailingSeed, RunArgs, seed_range};
use crate::ExitResult;

use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// Report of `sim run` for a group.
#[derive(Serialize)]
struct GroupRunReport<'a> {
    kind: &'static str,
    seeds: u32,
    first_seed: u64,
    /// Number of frames, timers, steps of commands and actions, in the seeds without a violation.
    events: u64,
    /// Number of occurrences by kind of event, in the seeds without a violation.
    counts: &'a BTreeMap<String, u64>,
    failing_seeds: Vec<FailingSeed>,
}

pub(super) fn run(args: &RunArgs, about: &str, group: &GroupScenario) -> Result<ExitResult> {
    if args.trace {
        return Ok(print_trace(args.seed, group));
    }
    let seeds = seed_range(args.seed, args.seed_count());
    let verdicts = seeds::run_all(
        &seeds,
        |seed| group.try_seed(*seed, None),
        |done| eprint!("\r{done} of {} seeds", seeds.len()),
    );
    eprintln!();
    let (events, counts) = sum_outcomes(&verdicts);
    let failures: Vec<FailingSeed> = (seeds.iter().zip(&verdicts))
        .filter_map(|(seed, verdict)| Some(FailingSeed::new(*seed, verdict.as_ref().err()?)))
        .collect();
    let ending = match failures.is_empty() {
        true => ExitResult::Success,
        false => ExitResult::Failed,
    };
    if args.json {
        let report = GroupRunReport {
            kind: group.name(),
            seeds: args.seed_count(),
            first_seed: args.seed,
            events,
            counts: &counts,
            failing_seeds: failures,
        };
        return print_json(&report).map(|()| ending);
    }
    output_line!("{about}");
    let passed = seeds.len() - failures.len();
    output_line!(
        "{passed} of {} seeds passed, {events} events",
        args.seed_count()
    );
    for wrong in &failures {
        output_line!("{wrong}");
    }
    let mut table = TextTable::new(["WHAT", "TIMES"]);
    for (what, count) in counts {
        table.row([what, count.to_string()]);
    }
    output!("{}", table.text());
    Ok(ending)
}

fn sum_outcomes(verdicts: &[Result<GroupRunOutcome, Violation>]) -> (u64, BTreeMap<String, u64>) {
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
fn print_trace(seed: u64, group: &GroupScenario) -> ExitResult {
    let mut trace = Vec::new();
    let verdict = group.try_seed(seed, Some(&mut trace));
    for line in trace {
        output_line!("{line}");
    }
    match verdict {
        Ok(_) => ExitResult::Success,
        Err(violation) => {
            output_line!("{}", FailingSeed::new(seed, &violation));
            ExitResult::Failed
        }
    }
}
