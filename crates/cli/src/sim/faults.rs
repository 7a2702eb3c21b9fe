//! `holdfast sim seeds`: simulates random faults and checks that all invariants hold.

use anyhow::{Result, bail};
use holdfast_sim::bug_names::by_name;
use holdfast_sim::scenario::{GroupScenario, SimulationKind};
use holdfast_sim::{Time, Violation, pool_faults, pools, seeds};

use super::{FailingSeed, SeedsArgs, scenario, seed_range};
use crate::ExitResult;
use crate::output::output_line;

/// Number of lines printed from the end of a failing seed's trace.
const LAST_LINES: usize = 40;

/// A simulation with random faults.
enum FaultSimulation {
    Pools(Option<pools::PoolBug>),
    Group(GroupScenario),
}

/// The smallest failing case of a seed.
struct ShrunkCase {
    plan: Vec<(Time, String)>,
    violation: Violation,
    trace: Vec<String>,
}

impl FaultSimulation {
    fn new(args: &SeedsArgs) -> Result<FaultSimulation> {
        let bug = args.bug.as_deref();
        let Some(name) = &args.scenario else {
            let bug = bug
                .map(|bug| by_name(&pools::PoolBug::ALL, bug))
                .transpose()?;
            return Ok(FaultSimulation::Pools(bug));
        };
        match (scenario(name)?.kind, bug) {
            (SimulationKind::Group(group), None) => Ok(FaultSimulation::Group(group)),
            (SimulationKind::Group(group), Some(bug)) => {
                Ok(FaultSimulation::Group(group.with_bug(bug)?))
            }
            (SimulationKind::Balance(_) | SimulationKind::Policies(_), _) => {
                bail!("scenario `{name}` has no faults; use `holdfast sim run {name}`")
            }
            (SimulationKind::Pools(_), _) => {
                bail!(
                    "scenario `{name}` lists the events of its pools; random faults of pools need no scenario"
                )
            }
        }
    }

    fn try_seed(&self, seed: u64) -> Result<(), Violation> {
        match self {
            FaultSimulation::Pools(None) => pool_faults::try_seed(seed),
            FaultSimulation::Pools(Some(bug)) => pool_faults::try_bug(seed, *bug),
            FaultSimulation::Group(group) => group.try_seed(seed, None).map(|_| ()),
        }
    }

    fn shrink(&self, seed: u64) -> Option<ShrunkCase> {
        match self {
            FaultSimulation::Pools(bug) => {
                let (plan, violation) = pool_faults::shrink(seed, *bug)?;
                let plan = plan.into_iter();
                Some(ShrunkCase {
                    plan: plan
                        .map(|(at, action)| (at, format!("{action:?}")))
                        .collect(),
                    violation,
                    trace: Vec::new(),
                })
            }
            FaultSimulation::Group(group) => {
                let shrunk = group.shrink(seed)?;
                Some(ShrunkCase {
                    plan: shrunk.plan,
                    violation: shrunk.violation,
                    trace: shrunk.trace,
                })
            }
        }
    }
}

pub(super) fn run(args: &SeedsArgs) -> Result<ExitResult> {
    let faults = FaultSimulation::new(args)?;
    let seeds = seed_range(args.seed, args.count);
    let verdicts = seeds::run_all(
        &seeds,
        |seed| faults.try_seed(*seed),
        |done| {
            if done.is_multiple_of(10) || done == seeds.len() {
                eprint!("\r{done} of {} seeds", seeds.len());
            }
        },
    );
    eprintln!();
    let failures: Vec<FailingSeed> = (seeds.iter().zip(&verdicts))
        .filter_map(|(seed, verdict)| Some(FailingSeed::new(*seed, verdict.as_ref().err()?)))
        .collect();
    for wrong in &failures {
        output_line!("{wrong}");
    }
    let passed = seeds.len() - failures.len();
    output_line!("{passed} of {} seeds passed", seeds.len());
    let Some(first) = failures.first() else {
        return Ok(ExitResult::Success);
    };
    if let Some(shrunk) = faults.shrink(first.seed) {
        print_case(first.seed, &shrunk);
    }
    Ok(ExitResult::Failed)
}

fn print_case(seed: u64, shrunk: &ShrunkCase) {
    output_line!(
        "\nsmallest case that fails with seed {seed} ({}):",
        shrunk.violation
    );
    for (at, action) in &shrunk.plan {
        output_line!("  {:.6} s  {action}", at.as_secs_f64());
    }
    let skipped = shrunk.trace.len().saturating_sub(LAST_LINES);
    if !shrunk.trace.is_empty() {
        output_line!(
            "\nend of the trace, which has {} lines:",
            shrunk.trace.len()
        );
    }
    for line in &shrunk.trace[skipped..] {
        output_line!("  {line}");
    }
}
