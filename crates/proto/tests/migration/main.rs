//! The migration machines of three to five nodes against a net and nodes that fail, with oracles at every step.
//!
//! `HOLDFAST_SEED=n` runs that seed alone; `HOLDFAST_SEEDS=n` runs so many; `HOLDFAST_TRACE=1` prints all.

mod commands;
mod fault;
mod give;
mod holder;
mod host;
#[path = "../handoff/net.rs"]
mod net;
mod oracle;
mod people;
#[path = "../handoff/rng.rs"]
mod rng;
mod take;
mod wires;
mod world;

use fault::Fault;
use holdfast_proto::migration::Options;
use net::Net;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use world::{Tally, What, World};

/// One run: two seconds of moves and faults, then everything heals and comes to rest.
fn run(seed: u64, fault: Fault) -> Tally {
    let mut world = World::new(seed, fault);
    plan(&mut world);
    world.run(Duration::from_secs(2));
    heal(&mut world);
    let quiet = world.run(Duration::from_secs(2_000));
    world.check_end(quiet);
    world.tally
}

fn plan(world: &mut World) {
    let when = |world: &mut World| Duration::from_micros(world.rng.range(0, 2_000_000));
    let nodes = world.hosts.len();
    for _ in 0..world.rng.range(3, 14) {
        let at = when(world);
        world.at(at, What::Request);
        let soon = |world: &mut World| at + Duration::from_micros(world.rng.range(0, 15_000));
        // Trouble comes while something moves: mostly within the next milliseconds.
        if world.rng.percent(40) {
            let node = world.rng.index(nodes);
            let soon = soon(world);
            world.at(soon, What::Crash { node });
            let later = soon + Duration::from_micros(world.rng.range(100, 700_000));
            world.at(later, What::Restart { node });
        }
        if world.rng.percent(25) {
            let pairs = Net::pairs(nodes);
            let (a, b) = pairs[world.rng.index(pairs.len())];
            let soon = soon(world);
            world.at(soon, What::Cut { a, b });
            let later = soon + Duration::from_micros(world.rng.range(100, 1_500_000));
            world.at(later, What::Heal { a, b });
        }
        for (chance, what) in [(40, What::Close), (3, What::Kill), (8, What::Cancel)] {
            if world.rng.percent(chance) {
                let soon = soon(world);
                world.at(soon, what);
            }
        }
        for _ in 0..5 {
            let soon = soon(world);
            world.at(soon, What::Work);
            let soon = at + Duration::from_micros(world.rng.range(0, 15_000));
            if world.rng.percent(40) {
                world.at(soon, What::Open);
            }
        }
    }
}

fn heal(world: &mut World) {
    world.hostile = false;
    world.flaky = 0;
    let nodes = world.hosts.len();
    for node in 0..nodes {
        world.at(Duration::ZERO, What::Restart { node });
    }
    for (a, b) in Net::pairs(nodes) {
        world.at(Duration::ZERO, What::Heal { a, b });
    }
    for second in [1, 50, 100] {
        world.at(Duration::from_secs(second), What::Work);
    }
}

#[test]
fn every_process_runs_once_at_any_time_and_somewhere_in_the_end() {
    let seeds = rng::seeds(3_000);
    let all = seeds.end - seeds.start >= 1_000;
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

/// The runs met what they are there to meet.
fn assert_worth(tally: &Tally) {
    let met = [
        "moved",
        "cloned",
        "flows came late",
        "holder silent",
        "kept: Blocked",
        "kept: Cancelled",
        "kept: FreezeTooLong",
        "kept: PeerMoving",
        "kept: PeerRefused",
        "kept: Refused",
        "kept: Restarted",
        "kept: failed in copy",
        "kept: failed in freeze",
        "kept: lost in arm",
        "kept: lost in copy",
        "kept: lost in divert",
        "kept: lost in transfer",
        "kept: timed out in divert",
        "kept: timed out in transfer",
        "commit of process refused",
        "rollback of process refused",
        "recovered donor, frozen",
        "recovered donor, noted",
        "recovered acceptor, restored",
        "recovered acceptor, gone",
        "recovered peer",
    ];
    for what in met {
        let count = tally.counts.get(what).copied().unwrap_or(0);
        assert!(
            count >= 5,
            "`{what}` happened {count} times only: {tally:#?}"
        );
    }
}

/// Where nothing goes wrong each process goes from node to node and on, with its clients and its connections.
#[test]
fn in_a_calm_world_all_processes_go_round() {
    for seed in 0..200 {
        let mut world = World::calm(seed);
        world.rest();
        for _ in 0..3 {
            let nodes = world.hosts.len();
            let all = world.hosts.iter().enumerate().flat_map(|(node, host)| {
                let processes = host.processes.keys();
                processes.map(move |process| (node, *process))
            });
            for (node, process) in all.collect::<Vec<_>>() {
                world.work();
                world.move_process(node, process, (node + 1) % nodes, Options::default());
                world.rest();
            }
        }
        world.check_end(true);
        let kept = world
            .tally
            .counts
            .keys()
            .find(|what| what.starts_with("kept"));
        assert_eq!(kept, None, "seed {seed}");
        assert!(world.tally.counts["moved"] >= 6, "seed {seed}");
    }
}

/// A peer whose daemon is away does not keep a process from moving: this node forwards what it does not translate.
#[test]
fn connections_to_a_peer_without_a_daemon_are_forwarded() {
    let mut moved = 0;
    for seed in 0..100 {
        let mut world = World::calm(seed);
        world.rest();
        let home = |world: &World, number| {
            let who = host::Who::Original(number);
            let mut hosts = world.hosts.iter();
            hosts.position(|host| host.processes.values().any(|of| of.image.who == who))
        };
        let (from, peer) = (
            home(&world, 0).expect("alive"),
            home(&world, 1).expect("alive"),
        );
        let to = (0..world.hosts.len()).find(|node| ![from, peer].contains(node));
        if from == peer || peer == world.holder {
            continue;
        }
        world.crash(peer);
        let processes = world.hosts[from].processes.iter();
        let mut first = processes.filter(|(_, of)| of.image.who == host::Who::Original(0));
        let process = *first.next().expect("it is there").0;
        world.move_process(from, process, to.expect("a third"), Options::default());
        world.run(world.now + Duration::from_secs(5));
        assert_eq!(world.tally.counts.get("forwarded"), Some(&1), "seed {seed}");
        assert_eq!(world.tally.counts.get("moved"), Some(&1), "seed {seed}");
        world.restart(peer);
        world.rest();
        world.check_end(true);
        moved += 1;
    }
    assert!(moved > 10, "{moved}");
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..20 {
        let (once, again) = (run(seed, Fault::None), run(seed, Fault::None));
        assert_eq!(once.events, again.events, "seed {seed}");
        assert_eq!(once.counts, again.counts, "seed {seed}");
    }
}

#[test]
fn the_oracles_find_each_deliberate_fault() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for fault in fault::ALL {
        let found = (0..4_000).find(|seed| {
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
