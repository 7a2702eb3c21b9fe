//! `holdfast sim seeds`: simulates random faults and checks that all invariants hold.

use anyhow::{Result, bail};
use holdfast_sim::bugs::named;
use holdfast_sim::scenario::{Group, Kind};
use holdfast_sim::{Time, Violation, faults, pools, seeds};

use super::{SeedsArgs, WrongSeed, scenario, seeds_from};
use crate::Ending;

/// Number of lines printed from the end of a failing seed's trace.
const LAST_LINES: usize = 40;

/// A simulation with random faults.
enum Faults {
    Pools(Option<pools::Bug>),
    Group(Group),
}

/// The smallest failing case of a seed.
struct Shrunk {
    plan: Vec<(Time, String)>,
    violation: Violation,
    trace: Vec<String>,
}

impl Faults {
    fn new(args: &SeedsArgs) -> Result<Faults> {
        let bug = args.bug.as_deref();
        let Some(name) = &args.scenario else {
            let bug = bug.map(|bug| named(&pools::Bug::ALL, bug)).transpose()?;
            return Ok(Faults::Pools(bug));
        };
        match (scenario(name)?.kind, bug) {
            (Kind::Group(group), None) => Ok(Faults::Group(group)),
            (Kind::Group(group), Some(bug)) => Ok(Faults::Group(group.broken(bug)?)),
            (Kind::Pools(_), _) => {
                bail!(
                    "what happens to the pools of `{name}` is written there; without a scenario, pools have faults by chance"
                )
            }
        }
    }

    fn try_seed(&self, seed: u64) -> Result<(), Violation> {
        match self {
            Faults::Pools(None) => faults::try_seed(seed),
            Faults::Pools(Some(bug)) => faults::try_bug(seed, *bug),
            Faults::Group(group) => group.try_seed(seed, None).map(|_| ()),
        }
    }

    fn shrink(&self, seed: u64) -> Option<Shrunk> {
        match self {
            Faults::Pools(bug) => {
                let (plan, violation) = faults::shrink(seed, *bug)?;
                let plan = plan.into_iter();
                Some(Shrunk {
                    plan: plan
                        .map(|(at, action)| (at, format!("{action:?}")))
                        .collect(),
                    violation,
                    trace: Vec::new(),
                })
            }
            Faults::Group(group) => {
                let shrunk = group.shrink(seed)?;
                let plan = shrunk.plan.into_iter();
                Some(Shrunk {
                    plan: plan.map(|(at, action)| (at, action.to_string())).collect(),
                    violation: shrunk.violation,
                    trace: shrunk.trace,
                })
            }
        }
    }
}

pub(super) fn run(args: &SeedsArgs) -> Result<Ending> {
    let faults = Faults::new(args)?;
    let all = seeds_from(args.seed, args.count);
    let verdicts = seeds::each(
        &all,
        |seed| faults.try_seed(*seed),
        |done| {
            if done.is_multiple_of(10) || done == all.len() {
                eprint!("\r{done} of {} seeds", all.len());
            }
        },
    );
    eprintln!();
    let wrong: Vec<WrongSeed> = (all.iter().zip(&verdicts))
        .filter_map(|(seed, verdict)| Some(WrongSeed::new(*seed, verdict.as_ref().err()?)))
        .collect();
    for wrong in &wrong {
        println!("{wrong}");
    }
    let right = all.len() - wrong.len();
    println!("{right} of {} seeds came right", all.len());
    let Some(first) = wrong.first() else {
        return Ok(Ending::Done);
    };
    if let Some(shrunk) = faults.shrink(first.seed) {
        explain(first.seed, &shrunk);
    }
    Ok(Ending::Failed)
}

fn explain(seed: u64, shrunk: &Shrunk) {
    println!(
        "\nseed {seed} fails with no more than this ({}):",
        shrunk.violation
    );
    for (at, action) in &shrunk.plan {
        println!("  {:.6} s  {action}", at.as_secs_f64());
    }
    let skipped = shrunk.trace.len().saturating_sub(LAST_LINES);
    if !shrunk.trace.is_empty() {
        println!("\nthen, the last of {} lines:", shrunk.trace.len());
    }
    for line in &shrunk.trace[skipped..] {
        println!("  {line}");
    }
}
