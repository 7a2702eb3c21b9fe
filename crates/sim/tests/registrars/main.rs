//! Two to five registrars and their elements against a failing network and failing processes, with oracles at every
//! step. Models stand for the elements.
//!
//! `HOLDFAST_SEED=n` runs that seed alone; `HOLDFAST_SEEDS=n` runs the first n seeds; `HOLDFAST_TRACE=1` prints all
//! events.

mod delivery;
mod element;
mod failures;
mod invariants;
mod world;

use holdfast_sim::pools::PoolBug;
use holdfast_sim::seeds;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use world::{EventTally, World, WorldEvent};

const FAULT_PERIOD: Duration = Duration::from_secs(12);

/// Deliberate bugs of registrars and elements. The oracles must find every one.
const BUGS: [PoolBug; 7] = [
    PoolBug::NoTables,
    PoolBug::OneBlock,
    PoolBug::NoRemovals,
    PoolBug::NoAdditions,
    PoolBug::NoPresences,
    PoolBug::KeepAliveAcksIgnored,
    PoolBug::NoMonitoring,
];

/// Runs one seed: twelve seconds of faults, then everything recovers and comes to rest.
fn run_seed(seed: u64, bug: Option<PoolBug>) -> EventTally {
    let mut world = World::new(seed, bug);
    schedule_faults(&mut world);
    run_faults_and_recovery(world)
}

fn run_faults_and_recovery(mut world: World) -> EventTally {
    world.run(FAULT_PERIOD);
    world.end_faults();
    world.run(Duration::from_secs(30));
    world.check_final_state();
    world.tally
}

fn schedule_faults(world: &mut World) {
    world.loses_messages = true;
    let (registrars, elements) = (world.registrars.len(), world.elements.len());
    for _ in 0..world.random.between(4, 14) {
        let at = Duration::from_micros(world.random.between(1_000_000, 10_000_000));
        let recovery_at = at + Duration::from_micros(world.random.between(200_000, 6_000_000));
        match world.random.between(0, 4) {
            0 => {
                let registrar = world.random.below(registrars);
                world.schedule(at, WorldEvent::Crash { registrar });
                world.schedule(recovery_at, WorldEvent::Boot { registrar });
            }
            1 => {
                let a = world.random.below(registrars + elements) as u32;
                let b = world.random.below(registrars) as u32;
                world.schedule(at, WorldEvent::Cut { a, b });
                world.schedule(recovery_at, WorldEvent::Restore { a, b });
            }
            2 => {
                let element = world.random.below(elements);
                world.schedule(at, WorldEvent::Kill { element });
                if world.random.chance(0.6) {
                    world.schedule(recovery_at, WorldEvent::StartElement { element });
                }
            }
            _ => {
                let element = world.random.below(elements);
                world.schedule(at, WorldEvent::Deregister { element });
                if world.random.chance(0.6) {
                    world.schedule(recovery_at, WorldEvent::StartElement { element });
                }
            }
        }
    }
}

#[test]
fn views_converge_and_live_elements_are_kept() {
    let seeds = seeds::from_environment(0, 400);
    let all = seeds.len() >= 300;
    let mut tally = EventTally::default();
    for seed in seeds {
        let run = catch_unwind(AssertUnwindSafe(|| run_seed(seed, None)));
        tally
            .add(&run.unwrap_or_else(|_| panic!("failed; run it again with HOLDFAST_SEED={seed}")));
    }
    println!("{tally:#?}");
    if all {
        assert_coverage(&tally);
    }
}

/// Two registrars that only multicast brings together, with the first presence on their association lost: neither
/// knows that the other exists.
#[test]
fn registrars_meet_despite_lost_first_presence() {
    for seed in 0..20 {
        let mut world = World::with_nodes(seed, 2, 1, true);
        world.loses_first_presence = true;
        let tally = run_faults_and_recovery(world);
        assert!(tally.counts["first presence lost"] > 0, "seed {seed}");
    }
}

/// Checks that the runs covered the situations they are meant for.
fn assert_coverage(tally: &EventTally) {
    let required_events = [
        "taken over",
        "takeover ended",
        "out of step",
        "in step",
        "removed: Silent",
        "removed: Unreachable",
        "removed: Deregistered",
        "peer dead",
        "mentor failed",
        "two homes",
    ];
    for event in required_events {
        let count = tally.counts.get(event).copied().unwrap_or(0);
        assert!(
            count >= 5,
            "`{event}` happened {count} times only: {tally:#?}"
        );
    }
}

/// Without failures no registrar is suspected, no element removed, and no view ever out of step.
#[test]
fn fault_free_run_has_no_removals_or_takeovers() {
    for seed in 0..60 {
        let mut world = World::new(seed, None);
        world.run(Duration::from_secs(20));
        world.check_final_state();
        let unexpected = world.tally.counts.keys().find(|what| {
            let what = what.as_str();
            what.starts_with("removed") || what == "peer dead" || what == "taken over"
        });
        assert_eq!(unexpected, None, "seed {seed}");
    }
}

#[test]
fn same_seed_gives_same_run() {
    for seed in 0..20 {
        let (first, second) = (run_seed(seed, None), run_seed(seed, None));
        assert_eq!(first.counts, second.counts, "seed {seed}");
    }
}

#[test]
fn oracles_detect_each_deliberate_fault() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut undetected = Vec::new();
    for bug in BUGS {
        let found = (0..300).find(|seed| {
            let run = catch_unwind(AssertUnwindSafe(|| run_seed(*seed, Some(bug))));
            run.is_err()
        });
        match found {
            Some(seed) => println!("{bug:?}: found by seed {seed}"),
            None => undetected.push(bug),
        }
    }
    let _ = std::panic::take_hook();
    assert!(undetected.is_empty(), "not found: {undetected:?}");
}
