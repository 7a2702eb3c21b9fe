//! Faults at single steps of a handoff.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_testbed::capture::RunningCapture;
use holdfast_testbed::connection_load::HANG_TIMEOUT;

use crate::capture_order::{order_violations, senders_by_client};
use crate::world::{ACCEPTOR, CONNECTIONS, DONOR, FaultGroup, HOLDER, finish_capture};

/// Time in milliseconds for which a daemon waits at a step, longer than causing the fault takes.
const PAUSE_MS: u32 = 600;

/// Smallest batch of connections that triggers a fault. (The first connection may move alone, before the others are
/// ready.)
const BATCH_MIN: usize = 8;

/// Time for which a link stays cut: longer than a transfer may take, so that both sides give up.
const CUT_DURATION: Duration = Duration::from_millis(1500);

/// Number of connections that are opened before a daemon is stopped and closed while it is down; twice as many are
/// opened while it is down.
const CONNECTIONS_BEFORE_RESTART: usize = 8;

/// A point in a daemon's work: see `HOLDFAST_TEST_FAULTS`.
#[derive(Clone, Copy, Debug)]
pub struct FaultPoint {
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
    /// The link between two nodes is cut for [`CUT_DURATION`].
    Cut(&'static str, &'static str),
}

/// A handoff of all connections, from one node to another.
#[derive(Clone, Copy, Debug)]
pub struct HandoffDirection {
    pub donor: &'static str,
    pub acceptor: &'static str,
}

/// A handoff between two nodes other than the holder.
pub const DONOR_TO_ACCEPTOR: HandoffDirection = HandoffDirection {
    donor: DONOR,
    acceptor: ACCEPTOR,
};

/// The six steps of a handoff, each at a moment when the step is under way.
pub const STEPS: [(&str, FaultPoint); 6] = [
    ("prepare", point(ACCEPTOR, "prepare after")),
    ("divert", point(DONOR, "freeze before")),
    ("freeze", point(DONOR, "freeze after")),
    ("transfer", point(ACCEPTOR, "restore before")),
    ("restore", point(ACCEPTOR, "restore after")),
    ("commit", point(ACCEPTOR, "activate before")),
];

pub const fn point(node: &'static str, command: &'static str) -> FaultPoint {
    FaultPoint { node, command }
}

/// Hands off all connections with one fault; every connection must go on, and the group must be healthy afterwards.
pub fn run_case(
    world: &FaultGroup,
    name: &str,
    direction: HandoffDirection,
    fault_point: FaultPoint,
    fault: Fault,
) -> Result<()> {
    let since = Instant::now();
    let result = hand_off_with_fault(world, direction, fault_point, fault);
    eprintln!(
        "{name} ({fault_point:?}, {fault:?}): {:.1?}",
        since.elapsed()
    );
    result.with_context(|| format!("{name}: {fault:?} at {fault_point:?}"))
}

fn hand_off_with_fault(
    world: &FaultGroup,
    direction: HandoffDirection,
    fault_point: FaultPoint,
    fault: Fault,
) -> Result<()> {
    world.move_all_to(direction.donor)?;
    let capture = world.capture("case")?;
    let victims: &[&'static str] = match &fault {
        Fault::Kill(node) | Fault::KillTwice(node) => std::slice::from_ref(node),
        Fault::KillBoth => &[direction.donor, direction.acceptor],
        Fault::Cut(..) => &[],
    };
    let starts: Vec<u32> = victims
        .iter()
        .map(|node| world.daemon_starts(node))
        .collect();
    let action = match victims.contains(&fault_point.node) {
        true => "die".to_owned(),
        false => format!("pause {PAUSE_MS}"),
    };
    world.set_fault(
        fault_point.node,
        &format!("{} {action} with {BATCH_MIN}", fault_point.command),
    )?;
    if let Fault::KillTwice(node) = fault {
        world.cluster.set_daemon_restart(node, false);
    }
    world.start_handoff(direction.donor, direction.acceptor)?;
    world.wait_for_fault(fault_point.node)?;
    if let Fault::KillTwice(node) = fault {
        // The successor reaches the same point when it completes the unfinished work.
        world.set_fault(node, &format!("{} die", fault_point.command))?;
        world.cluster.set_daemon_restart(node, true);
        world.wait_for_fault(node)?;
    }
    for node in victims.iter().filter(|node| **node != fault_point.node) {
        world.cluster.kill_daemon(node)?;
    }
    if let Fault::Cut(a, b) = fault {
        world.cluster.lab().cut_between(a, b)?;
        std::thread::sleep(CUT_DURATION);
        world.cluster.lab().heal_between(a, b)?;
    }
    for (node, before) in victims.iter().zip(starts) {
        let starts_min = before + 1 + u32::from(matches!(fault, Fault::KillTwice(_)));
        world.wait_until_no_problem(|| {
            let is_down = world.daemon_starts(node) < starts_min;
            Ok(is_down.then(|| format!("the daemon of {node} was not restarted")))
        })?;
    }
    // A violation on the wire tells more than the failure to settle, so both are reported.
    let settle_result = world.wait_until_healthy();
    let capture_result = check_capture(world, direction, capture);
    match (settle_result, capture_result) {
        (Err(unsettled), Err(seen)) => return Err(unsettled.context(format!("{seen:#}"))),
        (settled, seen) => settled.and(seen)?,
    }
    assert_healthy(world)
}

/// Checks that never two nodes spoke for one connection, and that the last speaker is the owner in the holder's table.
fn check_capture(
    world: &FaultGroup,
    direction: HandoffDirection,
    capture: RunningCapture<'_>,
) -> Result<()> {
    let owners = world.owners()?;
    let speakers = senders_by_client(&world.cluster, world.service, &finish_capture(capture)?);
    ensure!(
        speakers.len() == owners.len(),
        "no packets captured for some connections"
    );
    let wrong = order_violations(&speakers, &[direction.donor, direction.acceptor]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (client, nodes) in &speakers {
        if nodes.last() != owners[client].as_ref() {
            bail!(
                "{client}: {nodes:?} sent, {:?} owns the flow",
                owners[client]
            );
        }
    }
    let known_owners = owners.values().flatten();
    let moved = known_owners
        .filter(|owner| *owner == direction.acceptor)
        .count();
    eprintln!("    {moved} of {} moved", speakers.len());
    Ok(())
}

/// Checks that all connections can move to every node, and that nothing is left behind.
fn assert_healthy(world: &FaultGroup) -> Result<()> {
    for node in [HOLDER, ACCEPTOR, DONOR] {
        world
            .move_all_to(node)
            .with_context(|| format!("to {node}"))?;
    }
    world.wait_until_healthy()?;
    world.wait_until_clean()
}

/// A daemon is down while connections are established and nothing moves: only one node speaks for each connection. The
/// holder learns of connections that began or ended meanwhile when the daemon is back.
pub fn restart_daemon(world: &FaultGroup, node: &'static str) -> Result<()> {
    world.move_all_to(DONOR)?;
    let capture = world.capture("restart")?;
    let mut early_connections = world.connect(CONNECTIONS_BEFORE_RESTART)?;
    world.wait_for_known_count(CONNECTIONS + CONNECTIONS_BEFORE_RESTART)?;
    world.cluster.set_daemon_restart(node, false);
    world.cluster.kill_daemon(node)?;
    world.wait_until_no_problem(|| {
        let is_up = world.cluster.daemon_pid(node)?.is_some();
        Ok(is_up.then(|| format!("the daemon of {node} does not end")))
    })?;
    let mut late_connections = world.connect(2 * CONNECTIONS_BEFORE_RESTART)?;
    early_connections
        .iter_mut()
        .chain(&mut late_connections)
        .try_for_each(exchange_message)?;
    drop(early_connections);
    world.wait_until_closed()?;
    world.cluster.set_daemon_restart(node, true);
    world.cluster.wait_ready()?;
    world
        .wait_for_known_count(CONNECTIONS + 2 * CONNECTIONS_BEFORE_RESTART)
        .context("connections opened and closed during the restart")?;
    late_connections.iter_mut().try_for_each(exchange_message)?;
    world.move_exactly_to(ACCEPTOR, CONNECTIONS + 2 * CONNECTIONS_BEFORE_RESTART)?;
    world.move_exactly_to(DONOR, CONNECTIONS + 2 * CONNECTIONS_BEFORE_RESTART)?;
    late_connections.iter_mut().try_for_each(exchange_message)?;
    drop(late_connections);
    world.wait_until_healthy()?;
    let speakers = senders_by_client(&world.cluster, world.service, &finish_capture(capture)?);
    let wrong = order_violations(&speakers, &[DONOR, ACCEPTOR, DONOR]);
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_healthy(world).with_context(|| format!("after a restart of the daemon of {node}"))
}

/// Sends one message and reads its echo.
fn exchange_message(stream: &mut TcpStream) -> Result<()> {
    let mut answer = [0; 5];
    stream.set_read_timeout(Some(HANG_TIMEOUT))?;
    stream.write_all(b"hello")?;
    stream.read_exact(&mut answer).context("no echo")?;
    ensure!(&answer == b"hello", "wrong echo: {answer:?}");
    Ok(())
}
