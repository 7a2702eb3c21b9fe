//! Two to five registrars and their elements against a failing network and failing processes, with oracles at every
//! step; and the rules of RFC 5352 and 5353 one by one.
//!
//! `HOLDFAST_SEED=n` runs that seed alone; `HOLDFAST_SEEDS=n` runs the first n seeds; `HOLDFAST_TRACE=1` prints all
//! events.

mod addresses;
mod asked;
mod distances;
mod element;
mod enrp_rules;
mod fault;
mod granted;
mod limits;
mod net;
mod recorded;
mod refresh;
mod rng;
mod rules;
mod security;
mod setup;
mod trouble;
mod updates;
mod wires;
mod world;

use fault::Fault;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use world::{Tally, What, World};

const STORM: Duration = Duration::from_secs(12);

/// Runs one seed: twelve seconds of faults, then everything recovers and comes to rest.
fn run(seed: u64, fault: Fault) -> Tally {
    let mut world = World::new(seed, fault);
    plan(&mut world);
    world.run(STORM);
    world.heal();
    world.run(Duration::from_secs(30));
    world.check_end();
    world.tally
}

fn plan(world: &mut World) {
    world.hostile = true;
    let (registrars, elements) = (world.nodes.len(), world.elements.len());
    for _ in 0..world.rng.range(4, 14) {
        let at = Duration::from_micros(world.rng.range(1_000_000, 10_000_000));
        let later = at + Duration::from_micros(world.rng.range(200_000, 6_000_000));
        match world.rng.range(0, 4) {
            0 => {
                let node = world.rng.index(registrars);
                world.at(at, What::Crash { node });
                world.at(later, What::Boot { node });
            }
            1 => {
                let ends = world.ends();
                let a = world.rng.index(ends);
                let b = world.rng.index(registrars);
                world.at(at, What::Cut { a, b });
                world.at(later, What::Mend { a, b });
            }
            2 => {
                let element = world.rng.index(elements);
                world.at(at, What::Kill { element });
                if world.rng.percent(60) {
                    world.at(later, What::Join { element });
                }
            }
            _ => {
                let element = world.rng.index(elements);
                world.at(at, What::Leave { element });
                if world.rng.percent(60) {
                    world.at(later, What::Join { element });
                }
            }
        }
    }
}

#[test]
fn views_become_equal_and_no_live_element_is_lost() {
    let seeds = rng::seeds(400);
    let all = seeds.end - seeds.start >= 300;
    let mut tally = Tally::default();
    for seed in seeds {
        let run = catch_unwind(AssertUnwindSafe(|| run(seed, Fault::None)));
        tally
            .add(&run.unwrap_or_else(|_| panic!("failed; run it again with HOLDFAST_SEED={seed}")));
    }
    println!("{tally:#?}");
    if all {
        assert_worth(&tally);
    }
}

/// Two registrars that only multicast brings together, with the first presence on their association lost: neither
/// knew that the other existed.
#[test]
fn registrars_that_lose_their_first_words_meet() {
    run(1380, Fault::None);
}

/// Checks that the runs covered the situations they are meant for.
fn assert_worth(tally: &Tally) {
    let met = [
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
    for what in met {
        let count = tally.counts.get(what).copied().unwrap_or(0);
        assert!(
            count >= 5,
            "`{what}` happened {count} times only: {tally:#?}"
        );
    }
}

/// Without failures no registrar is suspected, no element removed, and no view ever out of step.
#[test]
fn in_a_calm_world_nothing_happens() {
    for seed in 0..60 {
        let mut world = World::new(seed, Fault::None);
        world.run(Duration::from_secs(20));
        world.check_end();
        let odd = world.tally.counts.keys().find(|what| {
            let what = what.as_str();
            what.starts_with("removed") || what == "peer dead" || what == "taken over"
        });
        assert_eq!(odd, None, "seed {seed}");
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..20 {
        let (once, again) = (run(seed, Fault::None), run(seed, Fault::None));
        assert_eq!(once.counts, again.counts, "seed {seed}");
    }
}

#[test]
fn the_oracles_find_each_deliberate_fault() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for fault in fault::ALL {
        let found = (0..300).find(|seed| {
            let run = catch_unwind(AssertUnwindSafe(|| run(*seed, fault)));
            run.is_err()
        });
        match found {
            Some(seed) => println!("{fault:?}: found by seed {seed}"),
            None => missed.push(fault),
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
