//! Simulates groups of nodes that run themselves, hand flows off, move processes, even out loads and replicate connections,
//! with failing channels and daemons, and checks oracles at every step.
//!
//! `HOLDFAST_SEED=n` runs only that seed; `HOLDFAST_SEEDS=n` runs the first `n` seeds.

use holdfast_sim::node_group::{GroupRunOutcome, ShrunkSeedFailure};
use holdfast_sim::scenario::{BUILT_IN, Scenario, SimulationKind};
use holdfast_sim::{Violation, seeds};
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Makes the tests that the simulation of every machine has: of its determinism, of its deliberate bugs, each of which one
/// of the first `seeds_per_bug` seeds must detect, and of shrinking. The simulation's `DEFAULT`, `draw_run_config`,
/// `shrink` and `try_run` must be in scope.
macro_rules! common_simulation_tests {
    ($Bug:ident, seeds_per_bug: $seeds_per_bug:literal) => {
        fn run(seed: u64, bug: Option<$Bug>) -> Result<GroupRunOutcome, Violation> {
            try_run(&draw_run_config(&DEFAULT, seed, bug), seed, None)
        }

        #[test]
        fn equal_seeds_give_equal_runs() {
            assert_deterministic(|seed| run(seed, None));
        }

        #[test]
        fn deliberate_bugs_are_detected_and_shrink() {
            assert_bugs_detected(
                &$Bug::ALL,
                $seeds_per_bug,
                |seed, bug| run(seed, Some(bug)).is_err(),
                |seed, bug| shrink(&DEFAULT, seed, Some(bug)),
                |config| config.plan,
            );
        }

        #[test]
        fn successful_run_does_not_shrink() {
            assert!(shrink(&DEFAULT, 1, None).is_none());
        }
    };
}

mod conductor;
mod handoff;
mod membership;
mod membership_store;
mod migration;
mod replication;

/// Checks that all seeds succeed (`default_count` of them, if the environment says nothing else), and that so many or more
/// cover each of these events five times.
fn assert_all<C: Debug>(
    default_count: u64,
    run: impl Fn(u64) -> Result<GroupRunOutcome, Violation> + Sync,
    shrink: impl Fn(u64) -> Option<ShrunkSeedFailure<C>>,
    expected_counts: &[&str],
) {
    let seeds = seeds::from_environment(0, default_count);
    let covering = usize::try_from(default_count).expect("a number of seeds");
    assert_seeds(&seeds, covering, run, shrink, expected_counts);
}

/// Checks that these seeds succeed, and that they cover each of these events five times, if there are at least `covering`
/// seeds.
fn assert_seeds<C: Debug>(
    seeds: &[u64],
    covering: usize,
    run: impl Fn(u64) -> Result<GroupRunOutcome, Violation> + Sync,
    shrink: impl Fn(u64) -> Option<ShrunkSeedFailure<C>>,
    expected_counts: &[&str],
) {
    let outcomes = seeds::run_all(seeds, |seed| run(*seed), |_| ());
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for (seed, outcome) in seeds.iter().zip(outcomes) {
        let outcome = outcome.unwrap_or_else(|violation| {
            let shrunk = shrink(*seed).expect("it fails again");
            println!("{}\n{:#?}", shrunk.trace.join("\n"), shrunk.config);
            panic!("{violation}; run it again with HOLDFAST_SEED={seed}")
        });
        for (what, count) in outcome.counts {
            *counts.entry(what).or_default() += count;
        }
    }
    println!("{counts:#?}");
    let is_rare = |what: &&&str| counts.get(**what).copied().unwrap_or(0) < 5;
    let seldom: Vec<_> = expected_counts.iter().filter(is_rare).collect();
    assert!(
        seeds.len() < covering || seldom.is_empty(),
        "{seldom:?} of {counts:#?}"
    );
}

fn assert_deterministic(run: impl Fn(u64) -> Result<GroupRunOutcome, Violation>) {
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
    let digest = |seed| run(seed).expect("no violation").digest;
    assert_ne!(digest(0), digest(1));
}

/// Checks that one of `budget` seeds detects each bug, and that it shrinks to a few actions.
fn assert_bugs_detected<B: Copy + Debug + Sync, C, A: Debug + Send>(
    bugs: &[B],
    budget: u64,
    fails: impl Fn(u64, B) -> bool + Sync,
    shrink: impl Fn(u64, B) -> Option<ShrunkSeedFailure<C>> + Sync,
    plan: impl Fn(C) -> Vec<A> + Sync,
) {
    let find = |bug: &B| {
        let seed = (0..budget).find(|seed| fails(*seed, *bug))?;
        let shrunk = shrink(seed, *bug)?;
        let violation = shrunk.violation.to_string();
        Some((seed, plan(shrunk.config), shrunk.trace.len(), violation))
    };
    let found = seeds::run_all(bugs, find, |_| ());
    for (bug, found) in bugs.iter().zip(&found) {
        println!("{bug:?}: {found:?}");
    }
    for (bug, found) in bugs.iter().zip(&found) {
        let (_, plan, trace, _) = found.as_ref().unwrap_or_else(|| panic!("{bug:?}"));
        assert!(plan.len() <= 8 && *trace > 0, "{bug:?}: {plan:?}");
    }
}

/// Checks the built-in scenarios, with some seeds each.
#[test]
fn built_in_group_scenarios_succeed() {
    let seeds: Vec<u64> = (0..20).collect();
    for (name, text) in BUILT_IN {
        let SimulationKind::Group(group) = Scenario::parse(text).expect(name).kind else {
            continue;
        };
        let outcomes = seeds::run_all(&seeds, |seed| group.try_seed(*seed, None), |_| ());
        let mut results = 0;
        for (seed, outcome) in seeds.iter().zip(outcomes) {
            let outcome = outcome.unwrap_or_else(|violation| panic!("{name} {seed}: {violation}"));
            let counts =
                ["moved", "view committed", "client Done"].map(|what| outcome.counts.get(what));
            results += counts.into_iter().flatten().sum::<u64>();
        }
        assert!(results > 0, "{name}");
    }
}
