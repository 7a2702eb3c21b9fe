//! Pool elements, pool users and their sessions against failing registrars, elements and links, with oracles at every
//! step. A model that all registrars share stands for them.
//!
//! `HOLDFAST_SEED=n` runs that seed alone; `HOLDFAST_SEEDS=n` runs the first n seeds.

mod fault;
mod machines;
mod outputs;
mod registrar_model;
mod world;

use fault::Fault;
use holdfast_sim::pools::node_numbers::NodeRole;
use holdfast_sim::seeds;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use world::{World, WorldEvent};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Runs twenty seconds of crashes; then some nodes stay dead, and the others recover and come to rest.
fn run_seed(seed: u64, fault: Fault) -> World {
    let mut world = World::new(seed, 3, 5, 3);
    world.fault = fault;
    for _ in 0..world.random.between(3, 15) {
        let node = match world.random.between(0, 3) {
            0 => NodeRole::Registrar(world.random.below(3)),
            _ => NodeRole::Element(world.random.below(5)),
        };
        let at = Duration::from_millis(world.random.between(0, 20_000));
        world.schedule(at, WorldEvent::Crash { node });
        let restart_at = at + Duration::from_millis(world.random.between(10, 9_000));
        world.schedule(restart_at, WorldEvent::Restart { node });
    }
    for _ in 0..world.random.between(0, 30) {
        let at = Duration::from_millis(world.random.between(0, 25_000));
        let element = world.random.below(5);
        world.schedule(at, WorldEvent::Policy { element });
    }
    world.run(seconds(30));
    world.registrars_lose_messages = false;
    world.schedule(
        Duration::ZERO,
        WorldEvent::Crash {
            node: NodeRole::Registrar(2),
        },
    );
    world.schedule(
        Duration::ZERO,
        WorldEvent::Crash {
            node: NodeRole::Element(4),
        },
    );
    world.run(seconds(100));
    check_final_state(&mut world);
    world
}

/// Checks that every live node is in its proper state, and that no node sends to dead ones.
fn check_final_state(world: &mut World) {
    let (connects, outputs) = (
        count(world, "connect to a dead node"),
        count(world, "output"),
    );
    world.run(seconds(20));
    let dead = count(world, "connect to a dead node") - connects;
    assert_eq!(dead, 0, "still connecting to dead nodes");
    let outputs = count(world, "output") - outputs;
    // Keep-alives each second, cookies four times a second, registrations every few seconds.
    assert!(
        outputs < 20 * (4 + 9 * 4 + 10),
        "{outputs} outputs while idle"
    );
    for (index, element) in world.elements.iter().enumerate().take(4) {
        let id = element.machine.id();
        let entry = world.handlespace.entries.get(&id);
        let entry =
            entry.unwrap_or_else(|| panic!("element {index} is in no registrar's handlespace"));
        let transport = world.transport(NodeRole::Element(index));
        assert_eq!(entry.element.user_transport, transport);
        assert_eq!(entry.element.policy, element.policy, "element {index}");
        assert!(element.machine.is_registered());
        assert!(entry.owner < 2, "its owner is dead");
    }
    assert_eq!(world.handlespace.entries.len(), 4, "only live elements");
    for (index, user) in world.users.iter().enumerate() {
        assert_eq!(user.sessions.len(), 3, "user {index}");
        for session in user.sessions.keys() {
            let answered = user.last_answers.get(session).copied();
            let is_overdue = answered.is_none_or(|at| at + seconds(1) < world.now);
            assert!(
                !is_overdue,
                "{session:?} of user {index} had its last answer at {answered:?}"
            );
        }
    }
}

fn count(world: &World, event: &str) -> u64 {
    world.tally.get(event).copied().unwrap_or(0)
}

#[test]
fn live_elements_stay_registered_and_sessions_resume_with_latest_cookie() {
    let seeds = seeds::from_environment(0, 200);
    let all = seeds.len() >= 200;
    let mut tally = BTreeMap::<&str, u64>::new();
    for seed in seeds {
        let world = catch_unwind(AssertUnwindSafe(|| run_seed(seed, Fault::None)));
        let world =
            world.unwrap_or_else(|_| panic!("failed; run it again with HOLDFAST_SEED={seed}"));
        for (what, count) in world.tally {
            *tally.entry(what).or_default() += count;
        }
    }
    println!("{tally:#?}");
    let required_events = [
        "resumed",
        "taken over",
        "expired",
        "unanswered",
        "element: no registrar",
        "user: home lost",
    ];
    for event in required_events {
        let count = tally.get(event).copied().unwrap_or(0);
        assert!(!all || count >= 20, "`{event}` happened {count} times only");
    }
}

#[test]
fn same_seed_gives_same_run() {
    for seed in 0..5 {
        assert_eq!(
            run_seed(seed, Fault::None).tally,
            run_seed(seed, Fault::None).tally,
            "seed {seed}"
        );
    }
}

/// The next element has the cookie's state one and a half round trips after the loss is noticed, and the user continues
/// after two: the duration of an SCTP handshake.
#[test]
fn session_resumes_within_two_round_trips() {
    for seed in 0..50 {
        let mut world = World::new(seed, 1, 3, 1);
        world.registrars_lose_messages = false;
        world.delay_us = (10_000, 10_001);
        world.run(seconds(30));
        world.trace.clear();
        let session = world.users[0].sessions.values().next().copied().flatten();
        let link = session.expect("a session is up");
        let element = world.element_of(NodeRole::User(0), link);
        world.schedule(Duration::ZERO, WorldEvent::Crash { node: element });
        world.run(seconds(5));
        let time_of = |prefix: &str| {
            let found = world
                .trace
                .iter()
                .find(|(_, text)| text.starts_with(prefix));
            found
                .unwrap_or_else(|| panic!("seed {seed}: never {prefix}"))
                .0
        };
        let round_trip = Duration::from_millis(20);
        let resumed = time_of("resumed") - time_of("broken");
        assert!(resumed <= round_trip * 3 / 2, "seed {seed}: {resumed:?}");
        let up = time_of("up") - time_of("broken");
        assert!(up <= round_trip * 2, "seed {seed}: {up:?}");
    }
}

#[test]
fn oracles_detect_each_deliberate_fault() {
    for fault in fault::ALL_FAULTS {
        let found = (0..20).find(|seed| {
            let run = catch_unwind(AssertUnwindSafe(|| run_seed(*seed, fault)));
            run.is_err()
        });
        let seed = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: found by seed {seed}");
    }
}
