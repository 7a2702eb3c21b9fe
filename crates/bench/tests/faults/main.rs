//! Daemons die and links break at every step of a handoff of 64 busy connections: each connection goes on, byte by byte,
//! and never has two owners. Needs root.

mod case;
mod wire;
mod world;

use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use case::{Fault, STEPS, point, restart, run};
use world::{ACCEPTOR, DONOR, HOLDER, World};

/// Two groups at once would keep each other waiting.
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

/// `HOLDFAST_FAULT` runs only the cases whose name it is part of.
fn wanted(name: &str) -> bool {
    std::env::var("HOLDFAST_FAULT").map_or(true, |part| name.contains(&part))
}

fn at_each_step(world: &World, name: &str, fault: Fault) -> Result<()> {
    for (step, point) in STEPS {
        let name = format!("{name} at {step}");
        if wanted(&name) {
            run(world, &name, point, fault)?;
        }
    }
    Ok(())
}

fn at_each(world: &World, node: &'static str, commands: &[&'static str]) -> Result<()> {
    for command in commands {
        let name = format!("{node} dies at {command}");
        if wanted(&name) {
            run(world, &name, point(node, command), Fault::Kill(node))?;
        }
    }
    Ok(())
}

#[test]
fn the_donors_daemon_dies() {
    in_world("donor", |world| {
        at_each_step(world, "donor", Fault::Kill(DONOR))?;
        at_each(
            world,
            DONOR,
            &["read before", "read after", "close before", "close after"],
        )
    });
}

#[test]
fn the_acceptors_daemon_dies() {
    in_world("acceptor", |world| {
        at_each_step(world, "acceptor", Fault::Kill(ACCEPTOR))?;
        at_each(world, ACCEPTOR, &["prepare before", "activate after"])
    });
}

#[test]
fn the_link_between_them_breaks() {
    in_world("link", |world| {
        at_each_step(world, "cut", Fault::Cut)?;
        let name = "cut at close";
        match wanted(name) {
            true => run(world, name, point(DONOR, "close before"), Fault::Cut),
            false => Ok(()),
        }
    });
}

#[test]
fn the_holders_daemon_dies() {
    in_world("holder", |world| {
        at_each(world, HOLDER, &["arbitrate before", "arbitrate after"])?;
        // The one that matters most: the acceptor is about to ask for the commit.
        let name = "holder at restore";
        match wanted(name) {
            true => run(
                world,
                name,
                point(ACCEPTOR, "restore after"),
                Fault::Kill(HOLDER),
            ),
            false => Ok(()),
        }
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
