//! One fault at one step of a handoff.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::wire::{speakers, violations};
use crate::world::{ACCEPTOR, DONOR, HOLDER, World, recorded};

/// How long a daemon waits at a step until it is disturbed: longer than it takes to disturb it.
const PAUSE_MS: u32 = 600;

/// How long a link stays cut: longer than a transfer may take, so that both sides give up.
const CUT: Duration = Duration::from_millis(1500);

/// A point in a daemon's work: see `HOLDFAST_TEST_FAULTS`.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub node: &'static str,
    pub command: &'static str,
}

/// What happens there.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The daemon of this node is killed.
    Kill(&'static str),
    /// Donor and acceptor no longer reach each other, for a while.
    Cut,
}

/// The six steps of DESIGN.md, each at the moment when it is under way.
pub const STEPS: [(&str, Point); 6] = [
    ("prepare", point(ACCEPTOR, "prepare after")),
    ("divert", point(DONOR, "freeze before")),
    ("freeze", point(DONOR, "freeze after")),
    ("transfer", point(ACCEPTOR, "restore before")),
    ("restore", point(ACCEPTOR, "restore after")),
    ("commit", point(ACCEPTOR, "activate before")),
];

pub const fn point(node: &'static str, command: &'static str) -> Point {
    Point { node, command }
}

/// A handoff of all connections, disturbed; everything must go on, and be well afterwards.
pub fn run(world: &World, name: &str, at: Point, fault: Fault) -> Result<()> {
    let since = std::time::Instant::now();
    let result = disturb(world, at, fault);
    eprintln!("{name} ({at:?}, {fault:?}): {:.1?}", since.elapsed());
    result.with_context(|| format!("{name}: {fault:?} at {at:?}"))
}

fn disturb(world: &World, at: Point, fault: Fault) -> Result<()> {
    world.gather(DONOR)?;
    let capture = world.capture("case")?;
    let starts = |node| world.cluster.daemon_starts(node);
    let killed = match fault {
        Fault::Kill(node) => Some((node, starts(node))),
        Fault::Cut => None,
    };
    let dies_there = matches!(fault, Fault::Kill(node) if node == at.node);
    let what = match dies_there {
        true => "die".to_owned(),
        false => format!("pause {PAUSE_MS}"),
    };
    world.set_fault(at.node, &format!("{} {what}", at.command))?;
    world.start_handoff(DONOR, ACCEPTOR)?;
    world.wait_fault(at.node)?;
    match fault {
        Fault::Kill(_) if dies_there => {}
        Fault::Kill(node) => world.cluster.kill_daemon(node)?,
        Fault::Cut => {
            world.cluster.lab().cut_between(DONOR, ACCEPTOR)?;
            std::thread::sleep(CUT);
            world.cluster.lab().heal_between(DONOR, ACCEPTOR)?;
        }
    }
    if let Some((node, before)) = killed {
        world.wait(|| {
            Ok((starts(node) == before).then(|| format!("the daemon of {node} was not restarted")))
        })?;
    }
    world.settle()?;
    check_wire(world, capture)?;
    prove_health(world)
}

/// Two nodes never spoke for one connection, and each went on where the holder says.
fn check_wire(world: &World, capture: holdfast_bench::capture::Capture<'_>) -> Result<()> {
    let owners = world.owners()?;
    let speakers = speakers(&world.cluster, world.service, &recorded(capture)?);
    ensure!(speakers.len() == owners.len(), "not every connection spoke");
    let wrong = violations(&speakers, &[DONOR, ACCEPTOR]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (client, of) in &speakers {
        if of.last() != owners[client].as_ref() {
            bail!("{client}: {of:?} spoke, {:?} owns it", owners[client]);
        }
    }
    Ok(())
}

/// Everything can still go round, and nothing was left behind.
fn prove_health(world: &World) -> Result<()> {
    world.gather(HOLDER).context("to the third node")?;
    world.gather(DONOR).context("back from the third node")?;
    world.settle()?;
    world.nothing_is_left()
}

/// Daemons are restarted while connections are established and nothing moves: one node goes on speaking.
pub fn restart(world: &World, node: &'static str) -> Result<()> {
    world.gather(DONOR)?;
    let capture = world.capture("restart")?;
    let before = world.cluster.daemon_starts(node);
    world.cluster.kill_daemon(node)?;
    world.wait(|| {
        let same = world.cluster.daemon_starts(node) == before;
        Ok(same.then(|| format!("the daemon of {node} was not restarted")))
    })?;
    world.settle()?;
    let speakers = speakers(&world.cluster, world.service, &recorded(capture)?);
    let wrong = violations(&speakers, &[DONOR]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    prove_health(world).with_context(|| format!("after a restart of the daemon of {node}"))
}
