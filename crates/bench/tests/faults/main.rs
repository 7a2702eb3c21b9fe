//! Faults at every step of a handoff of 64 busy connections: daemons die and links break. Each connection goes on, byte
//! by byte, and never has two owners. Needs root.

mod case;
mod wire;
mod world;

use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use case::{Fault, PLAIN, Point, STEPS, Way, point, restart, run};
use world::{ACCEPTOR, DONOR, HOLDER, World};

/// Serializes the tests: two groups at once would slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Brings a group up and runs cases in it.
fn in_world(name: &str, cases: impl FnOnce(&World) -> Result<()>) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::up(name).unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = cases(&world) {
        panic!("{error:#}");
    }
}

/// Returns true if the name contains `HOLDFAST_FAULT`, or if this variable is not set.
fn wanted(name: &str) -> bool {
    std::env::var("HOLDFAST_FAULT").map_or(true, |part| name.contains(&part))
}

fn one(world: &World, name: &str, way: Way, at: Point, fault: Fault) -> Result<()> {
    match wanted(name) {
        true => run(world, name, way, at, fault),
        false => Ok(()),
    }
}

fn at_each_step(world: &World, name: &str, fault: Fault) -> Result<()> {
    STEPS
        .iter()
        .try_for_each(|(step, at)| one(world, &format!("{name} at {step}"), PLAIN, *at, fault))
}

/// Kills a daemon at each of these points, before or after a step that the daemon itself performs.
fn dies(world: &World, way: Way, node: &'static str, commands: &[&'static str]) -> Result<()> {
    commands.iter().try_for_each(|command| {
        let name = format!("{node} dies at {command}");
        one(world, &name, way, point(node, command), Fault::Kill(node))
    })
}

#[test]
fn the_donors_daemon_dies() {
    in_world("donor", |world| {
        at_each_step(world, "donor", Fault::Kill(DONOR))?;
        let commands = ["read before", "read after", "close before", "close after"];
        dies(world, PLAIN, DONOR, &commands)
    });
}

#[test]
fn the_acceptors_daemon_dies() {
    in_world("acceptor", |world| {
        at_each_step(world, "acceptor", Fault::Kill(ACCEPTOR))?;
        dies(
            world,
            PLAIN,
            ACCEPTOR,
            &["prepare before", "activate after"],
        )?;
        let at = point(ACCEPTOR, "activate before");
        one(
            world,
            "acceptor twice",
            PLAIN,
            at,
            Fault::KillTwice(ACCEPTOR),
        )
    });
}

#[test]
fn the_link_between_them_breaks() {
    in_world("link", |world| {
        let cut = Fault::Cut(DONOR, ACCEPTOR);
        at_each_step(world, "cut", cut)?;
        let at = point(DONOR, "close before");
        one(world, "cut at close", PLAIN, at, cut)
    });
}

#[test]
fn the_link_to_the_holder_breaks() {
    in_world("far", |world| {
        let (from_donor, from_acceptor) = (Fault::Cut(DONOR, HOLDER), Fault::Cut(ACCEPTOR, HOLDER));
        let arbitrate = point(HOLDER, "arbitrate before");
        one(
            world,
            "cut at divert, not asked",
            PLAIN,
            arbitrate,
            from_donor,
        )?;
        let arbitrate = point(HOLDER, "arbitrate after");
        one(
            world,
            "cut at divert, not told",
            PLAIN,
            arbitrate,
            from_donor,
        )?;
        let frozen = point(DONOR, "freeze after");
        one(world, "donor alone and frozen", PLAIN, frozen, from_donor)?;
        let restored = point(ACCEPTOR, "restore after");
        one(
            world,
            "acceptor alone at commit",
            PLAIN,
            restored,
            from_acceptor,
        )
    });
}

#[test]
fn the_holders_daemon_dies() {
    in_world("holder", |world| {
        dies(
            world,
            PLAIN,
            HOLDER,
            &["arbitrate before", "arbitrate after"],
        )?;
        // The most critical point: the acceptor is about to request the commit.
        let restored = point(ACCEPTOR, "restore after");
        one(
            world,
            "holder at restore",
            PLAIN,
            restored,
            Fault::Kill(HOLDER),
        )?;
        let from = Way {
            donor: HOLDER,
            acceptor: ACCEPTOR,
        };
        dies(world, from, HOLDER, &["freeze before", "freeze after"])?;
        let to = Way {
            donor: DONOR,
            acceptor: HOLDER,
        };
        dies(world, to, HOLDER, &["restore after", "activate before"])
    });
}

#[test]
fn both_daemons_die() {
    in_world("both", |world| {
        for (step, at) in [STEPS[1], STEPS[2], STEPS[4], STEPS[5]] {
            let name = format!("both at {step}");
            one(world, &name, PLAIN, at, Fault::KillBoth)?;
        }
        Ok(())
    });
}

#[test]
fn daemons_restart_while_connections_are_established() {
    in_world("restart", |world| {
        for node in [HOLDER, DONOR, ACCEPTOR] {
            restart(world, node)?;
        }
        Ok(())
    });
}
