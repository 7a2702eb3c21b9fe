//! Faults at every step of a handoff of 64 busy connections: daemons die and links break. Each connection goes on, byte
//! by byte, and never has two owners. Needs root.

mod capture_order;
mod case;
mod world;

use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use case::{
    DONOR_TO_ACCEPTOR, Fault, FaultPoint, HandoffDirection, STEPS, point, restart_daemon, run_case,
};
use world::{ACCEPTOR, DONOR, FaultGroup, HOLDER};

/// Serializes the tests: two groups at once would slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Brings a group up and runs cases in it.
fn run_in_group(name: &str, cases: impl FnOnce(&FaultGroup) -> Result<()>) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let world = FaultGroup::up(name).unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = cases(&world) {
        panic!("{error:#}");
    }
}

/// Returns true if the name contains `HOLDFAST_FAULT`, or if this variable is not set.
fn is_selected(name: &str) -> bool {
    std::env::var("HOLDFAST_FAULT").map_or(true, |part| name.contains(&part))
}

fn run_if_selected(
    world: &FaultGroup,
    name: &str,
    direction: HandoffDirection,
    at: FaultPoint,
    fault: Fault,
) -> Result<()> {
    match is_selected(name) {
        true => run_case(world, name, direction, at, fault),
        false => Ok(()),
    }
}

fn fail_at_each_step(world: &FaultGroup, name: &str, fault: Fault) -> Result<()> {
    STEPS.iter().try_for_each(|(step, at)| {
        run_if_selected(
            world,
            &format!("{name} at {step}"),
            DONOR_TO_ACCEPTOR,
            *at,
            fault,
        )
    })
}

/// Kills a daemon at each of these points, before or after a step that the daemon itself performs.
fn kill_at_each_point(
    world: &FaultGroup,
    direction: HandoffDirection,
    node: &'static str,
    commands: &[&'static str],
) -> Result<()> {
    commands.iter().try_for_each(|command| {
        let name = format!("{node} dies at {command}");
        run_if_selected(
            world,
            &name,
            direction,
            point(node, command),
            Fault::Kill(node),
        )
    })
}

#[test]
fn connections_survive_donor_daemon_crash() {
    run_in_group("donor", |world| {
        fail_at_each_step(world, "donor", Fault::Kill(DONOR))?;
        let commands = ["read before", "read after", "close before", "close after"];
        kill_at_each_point(world, DONOR_TO_ACCEPTOR, DONOR, &commands)
    });
}

#[test]
fn connections_survive_acceptor_daemon_crash() {
    run_in_group("acceptor", |world| {
        fail_at_each_step(world, "acceptor", Fault::Kill(ACCEPTOR))?;
        kill_at_each_point(
            world,
            DONOR_TO_ACCEPTOR,
            ACCEPTOR,
            &["prepare before", "activate after"],
        )?;
        let at = point(ACCEPTOR, "activate before");
        run_if_selected(
            world,
            "acceptor twice",
            DONOR_TO_ACCEPTOR,
            at,
            Fault::KillTwice(ACCEPTOR),
        )
    });
}

#[test]
fn connections_survive_donor_acceptor_link_cut() {
    run_in_group("link", |world| {
        let cut = Fault::Cut(DONOR, ACCEPTOR);
        fail_at_each_step(world, "cut", cut)?;
        let at = point(DONOR, "close before");
        run_if_selected(world, "cut at close", DONOR_TO_ACCEPTOR, at, cut)
    });
}

#[test]
fn connections_survive_holder_link_cut() {
    run_in_group("far", |world| {
        let (cut_from_donor, cut_from_acceptor) =
            (Fault::Cut(DONOR, HOLDER), Fault::Cut(ACCEPTOR, HOLDER));
        let arbitrate = point(HOLDER, "arbitrate before");
        run_if_selected(
            world,
            "cut at divert, request lost",
            DONOR_TO_ACCEPTOR,
            arbitrate,
            cut_from_donor,
        )?;
        let arbitrate = point(HOLDER, "arbitrate after");
        run_if_selected(
            world,
            "cut at divert, response lost",
            DONOR_TO_ACCEPTOR,
            arbitrate,
            cut_from_donor,
        )?;
        let frozen = point(DONOR, "freeze after");
        run_if_selected(
            world,
            "donor alone and frozen",
            DONOR_TO_ACCEPTOR,
            frozen,
            cut_from_donor,
        )?;
        let restored = point(ACCEPTOR, "restore after");
        run_if_selected(
            world,
            "acceptor alone at commit",
            DONOR_TO_ACCEPTOR,
            restored,
            cut_from_acceptor,
        )
    });
}

#[test]
fn connections_survive_holder_daemon_crash() {
    run_in_group("holder", |world| {
        kill_at_each_point(
            world,
            DONOR_TO_ACCEPTOR,
            HOLDER,
            &["arbitrate before", "arbitrate after"],
        )?;
        // The most critical point: the acceptor is about to request the commit.
        let restored = point(ACCEPTOR, "restore after");
        run_if_selected(
            world,
            "holder at restore",
            DONOR_TO_ACCEPTOR,
            restored,
            Fault::Kill(HOLDER),
        )?;
        let from_holder = HandoffDirection {
            donor: HOLDER,
            acceptor: ACCEPTOR,
        };
        kill_at_each_point(
            world,
            from_holder,
            HOLDER,
            &["freeze before", "freeze after"],
        )?;
        let to_holder = HandoffDirection {
            donor: DONOR,
            acceptor: HOLDER,
        };
        kill_at_each_point(
            world,
            to_holder,
            HOLDER,
            &["restore after", "activate before"],
        )
    });
}

#[test]
fn connections_survive_donor_and_acceptor_crash() {
    run_in_group("both", |world| {
        for (step, at) in [STEPS[1], STEPS[2], STEPS[4], STEPS[5]] {
            let name = format!("both at {step}");
            run_if_selected(world, &name, DONOR_TO_ACCEPTOR, at, Fault::KillBoth)?;
        }
        Ok(())
    });
}

#[test]
fn connections_established_during_restart_survive() {
    run_in_group("restart", |world| {
        for node in [HOLDER, DONOR, ACCEPTOR] {
            restart_daemon(world, node)?;
        }
        Ok(())
    });
}
