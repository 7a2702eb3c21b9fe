//! Faults at single steps of a move: the program goes on at exactly one node, and nothing else is left at any node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::world::{CountingProgram, MigrationGroup};

pub const DONOR: &str = "n2";
pub const ACCEPTOR: &str = "n3";
pub const HOLDER: &str = "n1";

/// Time in milliseconds for which a daemon waits at a step, longer than causing the fault takes.
pub const PAUSE_MS: u32 = 600;

/// Time for which a link stays cut: longer than a transfer may take, so that both sides give up.
pub const CUT: Duration = Duration::from_millis(1500);

/// A fault to cause.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The daemon of this node is killed.
    Kill(&'static str),
    /// The daemons of donor and acceptor are killed.
    KillBoth,
    /// The link between two nodes is cut for [`CUT`].
    Cut(&'static str, &'static str),
}

/// A point in a daemon's work, such as `move-freeze after` (see `HOLDFAST_TEST_FAULTS`).
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub node: &'static str,
    pub command: &'static str,
}

pub const fn point(node: &'static str, command: &'static str) -> Point {
    Point { node, command }
}

/// The steps of a move, each at a moment when the move is under way.
pub const STEPS: [Point; 7] = [
    point(DONOR, "move-round after"),
    point(ACCEPTOR, "move-build after"),
    point(DONOR, "move-freeze before"),
    point(DONOR, "move-freeze after"),
    point(ACCEPTOR, "move-restore before"),
    point(ACCEPTOR, "move-restore after"),
    point(ACCEPTOR, "move-go before"),
];

/// Returns true if long tests run in full (`HOLDFAST_WHOLE`).
pub fn runs_in_full() -> bool {
    std::env::var_os("HOLDFAST_WHOLE").is_some()
}

/// Returns every second case, or all cases if long tests run in full.
pub fn sample<T: Copy>(cases: &[T]) -> Vec<T> {
    sample_from(0, cases)
}

/// Returns every second case, from number `first` on, or all cases if long tests run in full.
pub fn sample_from<T: Copy>(first: usize, cases: &[T]) -> Vec<T> {
    match runs_in_full() {
        true => cases.to_vec(),
        false => cases.iter().copied().skip(first).step_by(2).collect(),
    }
}

/// Moves a program from the donor with one fault, and checks the outcome.
pub fn migrate_with_fault(world: &MigrationGroup, at: Point, fault: Fault) -> Result<()> {
    let began = std::time::Instant::now();
    let counter = world.start(DONOR)?;
    let result = begin_with_fault(world, &counter, at, fault, MigrationGroup::begin)
        .and_then(|()| assert_settled(world, &counter))
        .with_context(|| format!("{fault:?} at {at:?}"));
    eprintln!("{fault:?} at {at:?}: {:.1?}", began.elapsed());
    result
}

/// Starts an operation (`begin`) from the donor to the acceptor, and causes the fault. All daemons run again
/// afterwards.
pub fn begin_with_fault(
    world: &MigrationGroup,
    counter: &CountingProgram,
    at: Point,
    fault: Fault,
    begin: fn(&MigrationGroup, i32, &str, &str) -> Result<u64>,
) -> Result<()> {
    let victims: &[&'static str] = match &fault {
        Fault::Kill(node) => std::slice::from_ref(node),
        Fault::KillBoth => &[DONOR, ACCEPTOR],
        Fault::Cut(..) => &[],
    };
    let starts = |node: &&'static str| world.cluster.daemon_starts(node);
    let before: Vec<u32> = victims.iter().map(starts).collect();
    let action = match victims.contains(&at.node) {
        true => "die".to_owned(),
        false => format!("pause {PAUSE_MS}"),
    };
    let file = world.cluster.run_path(at.node, "fault")?;
    std::fs::write(&file, format!("{} {action}", at.command))?;
    let pid = world.pid_on(DONOR, counter)?;
    begin(world, pid, DONOR, ACCEPTOR)?;
    world.wait("the move did not reach the fault point", || {
        Ok(!file.exists())
    })?;
    for node in victims.iter().filter(|node| **node != at.node) {
        world.cluster.kill_daemon(node)?;
    }
    if let Fault::Cut(a, b) = fault {
        world.cluster.lab().cut_between(a, b)?;
        std::thread::sleep(CUT);
        world.cluster.lab().heal_between(a, b)?;
    }
    for (node, before) in victims.iter().zip(before) {
        world.wait("a killed daemon was not restarted", || {
            Ok(starts(node) > before)
        })?;
    }
    world.cluster.wait_ready()
}

/// Checks that the program runs at one node and nowhere else, that no record of the move is left, and that it can move
/// again.
fn assert_settled(world: &MigrationGroup, counter: &CountingProgram) -> Result<()> {
    let running_nodes = || -> Result<Vec<String>> {
        let mut nodes = Vec::new();
        for node in world.cluster.nodes() {
            let count = world.count_running(&node)?;
            nodes.extend(std::iter::repeat_n(node, count));
        }
        Ok(nodes)
    };
    // While a record exists the move may still proceed, and the program may still leave the node where it is.
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    let mut last = Vec::new();
    world
        .wait("the process runs at no node, or at several", || {
            last = running_nodes()?;
            Ok(last.len() == 1)
        })
        .with_context(|| format!("{:?}", running_nodes()))?;
    let node = last.remove(0);
    world.assert_goes_on(counter, &node)?;
    ensure!(
        running_nodes()? == [node.clone()],
        "the process runs at {:?} too",
        running_nodes()?
    );
    ensure!(
        no_move_records_left(world)?,
        "a new record of the move appeared in a run directory"
    );
    eprintln!("    the process is on {node}");
    let next = if node == DONOR { ACCEPTOR } else { DONOR };
    world.migrate_counter(counter, &node, next)?;
    world.end(counter)
}

pub fn no_move_records_left(world: &MigrationGroup) -> Result<bool> {
    for node in world.cluster.nodes() {
        let directory = world.cluster.run_path(&node, "moves")?;
        for file in std::fs::read_dir(directory)? {
            if file?.file_name() != "residents.json" {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Kills the program at this point of its move: in the end it runs nowhere, or only at the acceptor.
pub fn kill_process_at(world: &MigrationGroup, at: Point) -> Result<()> {
    let counter = world.start(DONOR)?;
    let file = world.cluster.run_path(at.node, "fault")?;
    std::fs::write(&file, format!("{} pause {PAUSE_MS}", at.command))?;
    let pid = world.pid_on(DONOR, &counter)?;
    let id = world.begin(pid, DONOR, ACCEPTOR)?;
    world.wait("the move did not reach the fault point", || {
        Ok(!file.exists())
    })?;
    let mut kill = world.cluster.lab().command(DONOR)?;
    kill.args(["kill", "-9", &pid.to_string()]).status()?;
    let status = world.wait_for_migration(DONOR, id)?;
    eprintln!("killed at {at:?}: {:?}", status.outcome);
    world.wait("the original is left at the donor", || {
        Ok(world.count_running(DONOR)? == 0)
    })?;
    counter.assert_in_order()?;
    if world.count_running(ACCEPTOR)? > 0 {
        world.assert_goes_on(&counter, ACCEPTOR)?;
    }
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    world.end(&counter)
}
