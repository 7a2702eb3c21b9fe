//! Copies of programs: the original goes on undisturbed, and the copy runs independently of it.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, PlacementRequest};
use holdfast_testbed::cluster::IpFamily;

use crate::client_traffic::{CLIENTS, assert_all_go_on, connect_clients, read_pid, start_group};
use crate::faults::{
    ACCEPTOR, DONOR, Fault, HOLDER, Point, begin_with_fault, no_move_records_left,
};
use crate::numbered_datagrams::DatagramLoad;
use crate::world::{Count, CountingProgram, MigrationGroup, NEW_COUNTS_MIN};

/// Number of the server's sockets that are not connections: a listener and a datagram socket.
const NON_CONNECTION_SOCKETS: usize = 2;

/// A copy counts on from the original's count and can move; the original counts on without a gap.
pub fn clone_runs_independently(world: &MigrationGroup) -> Result<()> {
    let counter = world.start(DONOR)?;
    clone_to(world, &counter, ACCEPTOR)?;
    assert_both_go_on(world, &counter, ACCEPTOR)?;
    let pid = world.pid_on(ACCEPTOR, &counter)?;
    world.move_to(pid, ACCEPTOR, HOLDER)?;
    assert_both_go_on(world, &counter, HOLDER)?;
    world.end(&counter)
}

fn clone_to(world: &MigrationGroup, counter: &CountingProgram, to: &str) -> Result<()> {
    let pid = world.pid_on(DONOR, counter)?;
    let id = world.begin_copy(pid, DONOR, to)?;
    let status = world.wait_for_migration(DONOR, id)?;
    eprintln!("copied in {:?} us", status.freeze_us);
    ensure!(
        status.outcome == MigrationOutcome::Cloned && status.clone && status.freeze_us.is_some(),
        "{status:?}"
    );
    Ok(())
}

/// Waits until the original and its copy on this node have counted on.
fn assert_both_go_on(world: &MigrationGroup, counter: &CountingProgram, at: &str) -> Result<()> {
    let before = counter.counts()?.len();
    for node in [DONOR, at] {
        world.wait("the original or its copy does not continue", || {
            let counts = counter.counts()?;
            let new = counts.iter().skip(before);
            Ok(new.filter(|count| count.host == node).count() >= NEW_COUNTS_MIN)
        })?;
    }
    assert_counts_valid(counter)
}

/// Checks that the original counted without a gap, and each copy from some count of the original on, all under one PID.
fn assert_counts_valid(counter: &CountingProgram) -> Result<()> {
    let counts = counter.counts()?;
    let (mut original, mut copies): (Vec<Count>, Vec<Count>) =
        counts.into_iter().partition(|count| count.host == DONOR);
    // If the program was copied between reading the host name and writing the count, the copy writes its first count
    // under the original's host.
    let first_gap = (1..)
        .zip(&original)
        .position(|(expected, count)| count.number != expected);
    if let Some(strange) = first_gap {
        copies.insert(0, original.remove(strange));
    }
    assert_in_order(&original, 1)?;
    let Some(first) = copies.first() else {
        return Ok(());
    };
    ensure!(
        first.number > 1
            && original
                .iter()
                .any(|count| count.number + 1 == first.number),
        "the copy does not continue from a count of the original: {first:?}"
    );
    ensure!(
        first.pid == original[0].pid,
        "the copy has another PID than the original: {first:?}"
    );
    assert_in_order(&copies, first.number)
}

fn assert_in_order(counts: &[Count], from: u64) -> Result<()> {
    for (expected, count) in (from..).zip(counts) {
        ensure!(
            count.number == expected && count.pid == counts[0].pid,
            "expected count {expected}, got {count:?}"
        );
    }
    Ok(())
}

/// Causes one fault at one step of a copy: the original goes on where it is, there is one copy or none, and nothing
/// else is left.
pub fn clone_with_fault(world: &MigrationGroup, at: Point, fault: Fault) -> Result<()> {
    let began = std::time::Instant::now();
    let counter = world.start(DONOR)?;
    let result = begin_with_fault(world, &counter, at, fault, MigrationGroup::begin_copy)
        .and_then(|()| assert_clone_settled(world, &counter))
        .with_context(|| format!("{fault:?} at {at:?}"));
    eprintln!("{fault:?} at {at:?}: {:.1?}", began.elapsed());
    result
}

fn assert_clone_settled(world: &MigrationGroup, counter: &CountingProgram) -> Result<()> {
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    // A process that was killed may exist for a moment longer.
    world.wait("the program runs at a wrong node, or twice at one", || {
        let copies = (
            world.count_running(ACCEPTOR)?,
            world.residents(ACCEPTOR)?.len(),
        );
        let others = (world.count_running(DONOR)?, world.count_running(HOLDER)?);
        Ok(others == (1, 0) && copies.0 <= 1 && copies.0 == copies.1)
    })?;
    let has_clone = world.count_running(ACCEPTOR)? == 1;
    eprintln!("    copy at the acceptor: {has_clone}");
    match has_clone {
        true => assert_both_go_on(world, counter, ACCEPTOR)?,
        false => world.assert_goes_on(counter, DONOR)?,
    }
    // The original can still be copied.
    let pid = world.pid_on(DONOR, counter)?;
    let id = world.begin_copy(pid, DONOR, HOLDER)?;
    let status = world.wait_for_migration(DONOR, id)?;
    ensure!(status.outcome == MigrationOutcome::Cloned, "{status:?}");
    world.end(counter)
}

/// Connections and datagrams stay with the original. In the copy the connections are closed, and new clients reach it.
pub fn clients_stay_with_original(name: &str) -> Result<()> {
    let (world, folder) = start_group(name)?;
    let connections = connect_clients(&world, CLIENTS)?;
    let datagrams = DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS);
    datagrams.wait_until_all_answered();
    assert_all_go_on(&world, &connections)?;
    let original = read_pid(&folder)?;
    let id = world.begin_copy(original, DONOR, ACCEPTOR)?;
    let status = world.wait_for_migration(DONOR, id)?;
    ensure!(status.outcome == MigrationOutcome::Cloned, "{status:?}");
    let [resident] = &world.residents(ACCEPTOR)?[..] else {
        anyhow::bail!("no copy at the acceptor");
    };
    world.wait("the copy has open connections", || {
        Ok(count_sockets(&world, ACCEPTOR, resident.pid)? == NON_CONNECTION_SOCKETS)
    })?;
    assert_all_go_on(&world, &connections)?;
    datagrams.wait_until_all_answered();
    ensure!(count_sockets(&world, DONOR, original)? == NON_CONNECTION_SOCKETS + CLIENTS);

    let weights = [(HOLDER, 0), (DONOR, 0), (ACCEPTOR, 1)];
    let weights = weights.map(|(node, weight)| (node.to_owned(), weight));
    let request = PlacementRequest {
        weights: weights.into(),
    };
    let contact = world.cluster.blocking_control_client(HOLDER)?;
    contact.run(async |client| client.set_placement(&request).await)?;
    let newcomers = connect_clients(&world, CLIENTS)?;
    assert_all_go_on(&world, &newcomers)?;
    ensure!(count_sockets(&world, ACCEPTOR, resident.pid)? == NON_CONNECTION_SOCKETS + CLIENTS);
    assert_all_go_on(&world, &connections)?;
    datagrams.wait_until_all_answered();
    for load in [connections, newcomers] {
        load.stop()?;
    }
    let counts = datagrams.finish(name);
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

/// Counts the sockets of a process, by its PID on that node.
fn count_sockets(world: &MigrationGroup, node: &str, pid: i32) -> Result<usize> {
    let mut list = world.cluster.lab().command(node)?;
    let output = list
        .args(["ls", "-l", &format!("/proc/{pid}/fd")])
        .output()?;
    ensure!(output.status.success(), "process {pid} is not on {node}");
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.matches("socket:").count())
}
