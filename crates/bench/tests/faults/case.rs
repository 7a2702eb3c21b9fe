//! Faults at single steps of a handoff.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_bench::capture::Capture;
use holdfast_bench::load::HUNG;

use crate::wire::{speakers, violations};
use crate::world::{ACCEPTOR, CONNECTIONS, DONOR, HOLDER, World, recorded};

/// Time in milliseconds for which a daemon waits at a step, longer than causing the fault takes.
const PAUSE_MS: u32 = 600;

/// Smallest batch of connections that triggers a fault. (The first connection may move alone, before the others are
/// ready.)
const TOGETHER: usize = 8;

/// Time for which a link stays cut: longer than a transfer may take, so that both sides give up.
const CUT: Duration = Duration::from_millis(1500);

/// Number of connections that are opened before a daemon is stopped and closed while it is down; twice as many are
/// opened while it is down.
const COMERS: usize = 8;

/// A point in a daemon's work: see `HOLDFAST_TEST_FAULTS`.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub node: &'static str,
    pub command: &'static str,
}

/// A fault to cause at a point.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The daemon of this node is killed.
    Kill(&'static str),
    /// The daemon is killed, and its successor is killed at the same point.
    KillTwice(&'static str),
    /// The daemons of donor and acceptor are killed.
    KillBoth,
    /// The link between two nodes is cut for [`CUT`].
    Cut(&'static str, &'static str),
}

/// A handoff of all connections, from one node to another.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub donor: &'static str,
    pub acceptor: &'static str,
}

/// A handoff between two nodes other than the holder.
pub const PLAIN: Way = Way {
    donor: DONOR,
    acceptor: ACCEPTOR,
};

/// The six steps of DESIGN.md, each at a moment when the step is under way.
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

/// Hands off all connections with one fault; every connection must go on, and the group must be healthy afterwards.
pub fn run(world: &World, name: &str, way: Way, at: Point, fault: Fault) -> Result<()> {
    let since = Instant::now();
    let result = disturb(world, way, at, fault);
    eprintln!("{name} ({at:?}, {fault:?}): {:.1?}", since.elapsed());
    result.with_context(|| format!("{name}: {fault:?} at {at:?}"))
}

fn disturb(world: &World, way: Way, at: Point, fault: Fault) -> Result<()> {
    world.gather(way.donor)?;
    let capture = world.capture("case")?;
    let victims: &[&'static str] = match &fault {
        Fault::Kill(node) | Fault::KillTwice(node) => std::slice::from_ref(node),
        Fault::KillBoth => &[way.donor, way.acceptor],
        Fault::Cut(..) => &[],
    };
    let starts: Vec<u32> = victims.iter().map(|node| world.starts(node)).collect();
    let what = match victims.contains(&at.node) {
        true => "die".to_owned(),
        false => format!("pause {PAUSE_MS}"),
    };
    world.set_fault(at.node, &format!("{} {what} with {TOGETHER}", at.command))?;
    if let Fault::KillTwice(node) = fault {
        world.cluster.restart_daemon(node, false);
    }
    world.start_handoff(way.donor, way.acceptor)?;
    world.wait_fault(at.node)?;
    if let Fault::KillTwice(node) = fault {
        // The successor reaches the same point when it completes the unfinished work.
        world.set_fault(node, &format!("{} die", at.command))?;
        world.cluster.restart_daemon(node, true);
        world.wait_fault(node)?;
    }
    for node in victims.iter().filter(|node| **node != at.node) {
        world.cluster.kill_daemon(node)?;
    }
    if let Fault::Cut(a, b) = fault {
        world.cluster.lab().cut_between(a, b)?;
        std::thread::sleep(CUT);
        world.cluster.lab().heal_between(a, b)?;
    }
    for (node, before) in victims.iter().zip(starts) {
        let least = before + 1 + u32::from(matches!(fault, Fault::KillTwice(_)));
        world.wait(|| {
            let down = world.starts(node) < least;
            Ok(down.then(|| format!("the daemon of {node} was not restarted")))
        })?;
    }
    // A violation on the wire tells more than the failure to settle, so both are reported.
    let settled = world.settle();
    let seen = check_wire(world, way, capture);
    match (settled, seen) {
        (Err(unsettled), Err(seen)) => return Err(unsettled.context(format!("{seen:#}"))),
        (settled, seen) => settled.and(seen)?,
    }
    prove_health(world)
}

/// Checks that never two nodes spoke for one connection, and that the last speaker is the owner in the holder's table.
fn check_wire(world: &World, way: Way, capture: Capture<'_>) -> Result<()> {
    let owners = world.owners()?;
    let speakers = speakers(&world.cluster, world.service, &recorded(capture)?);
    ensure!(speakers.len() == owners.len(), "not every connection spoke");
    let wrong = violations(&speakers, &[way.donor, way.acceptor]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (client, of) in &speakers {
        if of.last() != owners[client].as_ref() {
            bail!("{client}: {of:?} spoke, {:?} owns it", owners[client]);
        }
    }
    let there = owners.values().flatten();
    let moved = there.filter(|owner| *owner == way.acceptor).count();
    eprintln!("    {moved} of {} moved", speakers.len());
    Ok(())
}

/// Checks that all connections can move to every node, and that nothing is left behind.
fn prove_health(world: &World) -> Result<()> {
    for node in [HOLDER, ACCEPTOR, DONOR] {
        world.gather(node).with_context(|| format!("to {node}"))?;
    }
    world.settle()?;
    world.nothing_is_left()
}

/// A daemon is down while connections are established and nothing moves: only one node speaks for each connection. The
/// holder learns of connections that began or ended meanwhile when the daemon is back.
pub fn restart(world: &World, node: &'static str) -> Result<()> {
    world.gather(DONOR)?;
    let capture = world.capture("restart")?;
    let mut early = world.connect(COMERS)?;
    world.wait_known(CONNECTIONS + COMERS)?;
    world.cluster.restart_daemon(node, false);
    world.cluster.kill_daemon(node)?;
    world.wait(|| {
        let up = world.cluster.daemon_pid(node)?.is_some();
        Ok(up.then(|| format!("the daemon of {node} does not end")))
    })?;
    let mut late = world.connect(2 * COMERS)?;
    early.iter_mut().chain(&mut late).try_for_each(echo)?;
    drop(early);
    world.wait_ended()?;
    world.cluster.restart_daemon(node, true);
    world.cluster.wait_ready()?;
    world
        .wait_known(CONNECTIONS + 2 * COMERS)
        .context("connections begun and ended meanwhile")?;
    late.iter_mut().try_for_each(echo)?;
    world.gather_all(ACCEPTOR, CONNECTIONS + 2 * COMERS)?;
    world.gather_all(DONOR, CONNECTIONS + 2 * COMERS)?;
    late.iter_mut().try_for_each(echo)?;
    drop(late);
    world.settle()?;
    let speakers = speakers(&world.cluster, world.service, &recorded(capture)?);
    let wrong = violations(&speakers, &[DONOR, ACCEPTOR, DONOR]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    prove_health(world).with_context(|| format!("after a restart of the daemon of {node}"))
}

/// Sends one message and reads its echo.
fn echo(stream: &mut TcpStream) -> Result<()> {
    let mut answer = [0; 5];
    stream.set_read_timeout(Some(HUNG))?;
    stream.write_all(b"hello")?;
    stream.read_exact(&mut answer).context("no echo")?;
    ensure!(&answer == b"hello", "{answer:?} is not what was sent");
    Ok(())
}
