//! Copies of programs: the original goes on undisturbed, and the copy runs independently of it.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, PlacementRequest};
use holdfast_bench::cluster::Family;

use crate::clients::{CLIENTS, all_go_on, connected, pid, serving};
use crate::faults::{ACCEPTOR, DONOR, Fault, HOLDER, Point, disturb, nothing_is_written};
use crate::numbered::Datagrams;
use crate::world::{COUNTS, Count, Counter, World};

/// Number of the server's sockets that are not connections: a listener and a datagram socket.
const LISTENING: usize = 2;

/// A copy counts on from the original's count and can move; the original counts on without a gap.
pub fn beside(world: &World) -> Result<()> {
    let counter = world.start(DONOR)?;
    copy(world, &counter, ACCEPTOR)?;
    both_go_on(world, &counter, ACCEPTOR)?;
    let pid = world.pid_on(ACCEPTOR, &counter)?;
    world.move_to(pid, ACCEPTOR, HOLDER)?;
    both_go_on(world, &counter, HOLDER)?;
    world.end(&counter)
}

fn copy(world: &World, counter: &Counter, to: &str) -> Result<()> {
    let pid = world.pid_on(DONOR, counter)?;
    let id = world.begin_copy(pid, DONOR, to)?;
    let status = world.ended(DONOR, id)?;
    eprintln!("copied in {:?} us", status.freeze_us);
    ensure!(
        status.outcome == MigrationOutcome::Cloned && status.clone && status.freeze_us.is_some(),
        "{status:?}"
    );
    Ok(())
}

/// Waits until the original and its copy on this node have counted on.
fn both_go_on(world: &World, counter: &Counter, at: &str) -> Result<()> {
    let before = counter.counts()?.len();
    for node in [DONOR, at] {
        world.wait("it does not go on", || {
            let counts = counter.counts()?;
            let new = counts.iter().skip(before);
            Ok(new.filter(|count| count.host == node).count() >= COUNTS)
        })?;
    }
    check(counter)
}

/// Checks that the original counted without a gap, and each copy from some count of the original on, all under one PID.
fn check(counter: &Counter) -> Result<()> {
    let counts = counter.counts()?;
    let (mut original, mut copies): (Vec<Count>, Vec<Count>) =
        counts.into_iter().partition(|count| count.host == DONOR);
    // If the program was copied between reading the host name and writing the count, the copy writes its first count
    // under the original's host.
    let strange = (1..)
        .zip(&original)
        .position(|(expected, count)| count.number != expected);
    if let Some(strange) = strange {
        copies.insert(0, original.remove(strange));
    }
    in_order(&original, 1)?;
    let Some(first) = copies.first() else {
        return Ok(());
    };
    ensure!(
        first.number > 1
            && original
                .iter()
                .any(|count| count.number + 1 == first.number),
        "the copy began with {first:?}"
    );
    ensure!(first.pid == original[0].pid, "{first:?} has another PID");
    in_order(&copies, first.number)
}

fn in_order(counts: &[Count], from: u64) -> Result<()> {
    for (expected, count) in (from..).zip(counts) {
        ensure!(
            count.number == expected && count.pid == counts[0].pid,
            "count {expected} is {count:?}"
        );
    }
    Ok(())
}

/// Causes one fault at one step of a copy: the original goes on where it is, there is one copy or none, and nothing
/// else is left.
pub fn disturbed(world: &World, at: Point, fault: Fault) -> Result<()> {
    let began = std::time::Instant::now();
    let counter = world.start(DONOR)?;
    let result = disturb(world, &counter, at, fault, World::begin_copy)
        .and_then(|()| settled(world, &counter))
        .with_context(|| format!("{fault:?} at {at:?}"));
    eprintln!("{fault:?} at {at:?}: {:.1?}", began.elapsed());
    result
}

fn settled(world: &World, counter: &Counter) -> Result<()> {
    world.wait("something is written down", || nothing_is_written(world))?;
    // A process that was killed may exist for a moment longer.
    world.wait("it is elsewhere, or twice", || {
        let copies = (world.runs_on(ACCEPTOR)?, world.residents(ACCEPTOR)?.len());
        let others = (world.runs_on(DONOR)?, world.runs_on(HOLDER)?);
        Ok(others == (1, 0) && copies.0 <= 1 && copies.0 == copies.1)
    })?;
    let copied = world.runs_on(ACCEPTOR)? == 1;
    eprintln!("    there is a copy: {copied}");
    match copied {
        true => both_go_on(world, counter, ACCEPTOR)?,
        false => world.goes_on(counter, DONOR)?,
    }
    // The original can still be copied.
    let pid = world.pid_on(DONOR, counter)?;
    let id = world.begin_copy(pid, DONOR, HOLDER)?;
    let status = world.ended(DONOR, id)?;
    ensure!(status.outcome == MigrationOutcome::Cloned, "{status:?}");
    world.end(counter)
}

/// Connections and datagrams stay with the original. In the copy the connections are closed, and new clients reach it.
pub fn clients(name: &str) -> Result<()> {
    let (world, folder) = serving(name)?;
    let connections = connected(&world, CLIENTS)?;
    let datagrams = Datagrams::start(&world.cluster, Family::V4, CLIENTS);
    datagrams.all_answered_again();
    all_go_on(&world, &connections)?;
    let original = pid(&folder)?;
    let id = world.begin_copy(original, DONOR, ACCEPTOR)?;
    let status = world.ended(DONOR, id)?;
    ensure!(status.outcome == MigrationOutcome::Cloned, "{status:?}");
    let [resident] = &world.residents(ACCEPTOR)?[..] else {
        anyhow::bail!("there is no copy");
    };
    world.wait("the copy keeps connections", || {
        Ok(sockets(&world, ACCEPTOR, resident.pid)? == LISTENING)
    })?;
    all_go_on(&world, &connections)?;
    datagrams.all_answered_again();
    ensure!(sockets(&world, DONOR, original)? == LISTENING + CLIENTS);

    let weights = [(HOLDER, 0), (DONOR, 0), (ACCEPTOR, 1)];
    let weights = weights.map(|(node, weight)| (node.to_owned(), weight));
    let request = PlacementRequest {
        weights: weights.into(),
    };
    let contact = world.cluster.control_blocking(HOLDER)?;
    contact.run(async |client| client.place(&request).await)?;
    let newcomers = connected(&world, CLIENTS)?;
    all_go_on(&world, &newcomers)?;
    ensure!(sockets(&world, ACCEPTOR, resident.pid)? == LISTENING + CLIENTS);
    all_go_on(&world, &connections)?;
    datagrams.all_answered_again();
    for load in [connections, newcomers] {
        load.stop()?;
    }
    let counts = datagrams.end(name);
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

/// Counts the sockets of a process, by its PID on that node.
fn sockets(world: &World, node: &str, pid: i32) -> Result<usize> {
    let mut list = world.cluster.lab().command(node)?;
    let output = list
        .args(["ls", "-l", &format!("/proc/{pid}/fd")])
        .output()?;
    ensure!(output.status.success(), "process {pid} is not on {node}");
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.matches("socket:").count())
}
