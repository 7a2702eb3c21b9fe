//! Migrations of a program with locks on files that all nodes share: no other process gets the locks at any instant of
//! a move.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;

use crate::faults::{
    ACCEPTOR, DONOR, Fault, HOLDER, Point, begin_with_fault, no_move_records_left, point, sample,
};
use crate::world::{CountingProgram, MigrationGroup, compile_program};

/// Default number of moves; `HOLDFAST_MOVES` overrides it.
const MOVES: usize = 6;
/// Number of rounds that prove that a rival keeps trying.
const ROUNDS: u64 = 20;
/// Numbers of locks that a rival tries to get, and of locks that it waits for.
const TRIED_LOCKS: usize = 17;
const AWAITED_LOCKS: usize = 6;

/// Points at which a daemon dies while the locks pass from one node to the other.
const FAULTS: [(Point, Fault); 7] = [
    (point(DONOR, "move-freeze after"), Fault::Kill(DONOR)),
    (point(ACCEPTOR, "move-restore before"), Fault::Kill(DONOR)),
    (point(ACCEPTOR, "move-restore after"), Fault::Kill(DONOR)),
    (point(ACCEPTOR, "move-restore after"), Fault::Kill(ACCEPTOR)),
    (point(ACCEPTOR, "move-go before"), Fault::Kill(DONOR)),
    (point(ACCEPTOR, "move-go before"), Fault::Kill(ACCEPTOR)),
    (point(ACCEPTOR, "move-go before"), Fault::KillBoth),
];

/// Locks that a rival may get when a daemon dies after the commit: the original ends, and its share of the locks is
/// released all at once.
const LOCKS_FREED_BY_CRASH: [&str; 5] = [
    "open read 0 0",
    "open write 0 1",
    "ranges read 0 10",
    "ranges read 100 0",
    "ranges write 0 1",
];

/// Another process that competes for the locks.
struct LockContender {
    process: Child,
    file: PathBuf,
    /// Locks that the rival may get.
    allowed_locks: &'static [&'static str],
}

impl LockContender {
    fn start(
        world: &MigrationGroup,
        counter: &CountingProgram,
        mode: &str,
    ) -> Result<LockContender> {
        let counts = counter.end_file().with_extension("");
        let file = counts.with_extension(mode);
        let mut command = world.cluster.lab().command(HOLDER)?;
        command
            .arg(compile_program("rival")?)
            .arg(&counts)
            .arg(mode);
        let process = command.arg(&file).stdin(Stdio::null()).spawn()?;
        Ok(LockContender {
            process,
            file,
            allowed_locks: &[],
        })
    }

    /// Returns the locks that the rival has got so far.
    fn acquired_locks(&self) -> BTreeSet<String> {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn rounds(&self) -> u64 {
        let bytes = std::fs::read(self.file.with_extension("try.rounds")).unwrap_or_default();
        bytes.try_into().map_or(0, u64::from_ne_bytes)
    }

    /// Waits until the rival has tried some more.
    fn wait_for_rounds(&self, world: &MigrationGroup) -> Result<()> {
        let before = self.rounds();
        world.wait("the rival does not try to lock", || {
            Ok(self.rounds() > before + ROUNDS)
        })?;
        self.assert_no_lock_acquired()
    }

    fn assert_no_lock_acquired(&self) -> Result<()> {
        let mut got = self.acquired_locks();
        got.retain(|one| !self.allowed_locks.contains(&one.as_str()));
        ensure!(got.is_empty(), "another process got {got:?}");
        Ok(())
    }
}

impl Drop for LockContender {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_lock_holder(world: &MigrationGroup) -> Result<CountingProgram> {
    world.start_program(DONOR, &[], "locks", &["hold"])
}

/// Rivals that try or wait get the locks when the program has ended, and not before.
pub fn locks_stay_held(world: &MigrationGroup) -> Result<()> {
    let counter = start_lock_holder(world)?;
    let (rival, waiter) = (
        LockContender::start(world, &counter, "try")?,
        LockContender::start(world, &counter, "wait")?,
    );
    let waiting_processes = || count_waiters(&counter.end_file().with_extension(""));
    world.wait("no process waits for the locks", || {
        Ok(waiting_processes()? == AWAITED_LOCKS)
    })?;
    rival.wait_for_rounds(world)?;
    let moves = std::env::var("HOLDFAST_MOVES").ok();
    let moves = moves.and_then(|text| text.parse().ok()).unwrap_or(MOVES);
    for move_index in 0..moves {
        let (from, to) = [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)][move_index % 2];
        let status = world.migrate_counter(&counter, from, to)?;
        eprintln!("{:?} us, {:?}", status.freeze_us, status.steps_us);
        rival.wait_for_rounds(world)?;
        ensure!(
            waiting_processes()? == AWAITED_LOCKS,
            "a process stopped waiting for its lock"
        );
        waiter.assert_no_lock_acquired()?;
    }
    world.end(&counter)?;
    world.wait("the released locks are not acquired", || {
        Ok(
            (rival.acquired_locks().len(), waiter.acquired_locks().len())
                == (TRIED_LOCKS, AWAITED_LOCKS),
        )
    })
}

/// Counts the processes that wait for locks on files in the folder of `counts`.
fn count_waiters(counts: &Path) -> Result<usize> {
    use std::os::unix::fs::MetadataExt;
    let folder = counts.parent().context("a folder")?;
    let inodes: Result<BTreeSet<String>> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.ino().to_string()))
        .collect();
    let inodes = inodes?;
    let locks = std::fs::read_to_string("/proc/locks")?;
    let waits = locks.lines().filter(|line| line.contains("-> "));
    let lock_inode = |line: &str| line.split_whitespace().nth(6).map(str::to_owned);
    let is_in_folder = |path: String| {
        path.rsplit(':')
            .next()
            .is_some_and(|inode| inodes.contains(inode))
    };
    Ok(waits
        .filter_map(lock_inode)
        .filter(|at| is_in_folder(at.clone()))
        .count())
}

/// A waiting reader could get the lock for the moment in which it is held as a read lock, so the move is refused.
pub fn refuse_with_waiting_reader(world: &MigrationGroup) -> Result<()> {
    let counter = start_lock_holder(world)?;
    let rival = LockContender::start(world, &counter, "try")?;
    let reader = LockContender::start(world, &counter, "read")?;
    let counts = counter.end_file().with_extension("");
    world.wait("no process waits for the locks", || {
        Ok(count_waiters(&counts)? == 1)
    })?;
    let pid = world.pid_on(DONOR, &counter)?;
    let id = world.begin(pid, DONOR, ACCEPTOR)?;
    let status = world.wait_for_migration(DONOR, id)?;
    let MigrationOutcome::Kept { reason, .. } = &status.outcome else {
        anyhow::bail!("the process moved: {status:?}");
    };
    let expected_parts = [".whole)", "flock", "a reader waits"];
    let all_named = expected_parts
        .iter()
        .all(|part| reason.contains(part) || *part == "flock");
    ensure!(all_named && status.freeze_us.is_none(), "{status:?}");
    world.assert_goes_on(&counter, DONOR)?;
    rival.wait_for_rounds(world)?;
    reader.assert_no_lock_acquired()?;
    drop(reader);
    world.wait("a process still waits for a lock", || {
        Ok(count_waiters(&counts)? == 0)
    })?;
    world.migrate_counter(&counter, DONOR, ACCEPTOR)?;
    rival.wait_for_rounds(world)?;
    world.end(&counter)
}

/// A daemon dies while the locks pass between nodes: the surviving program holds them all, and no other process had a
/// write lock on a whole file.
pub fn locks_survive_crashes(world: &MigrationGroup) -> Result<()> {
    for (at, fault) in sample(&FAULTS) {
        let counter = start_lock_holder(world)?;
        let mut rival = LockContender::start(world, &counter, "try")?;
        rival.wait_for_rounds(world)?;
        rival.allowed_locks = &LOCKS_FREED_BY_CRASH;
        begin_with_fault(world, &counter, at, fault, MigrationGroup::begin)
            .and_then(|()| assert_locks_settled(world, &counter, &rival))
            .with_context(|| format!("{fault:?} at {at:?}"))?;
    }
    Ok(())
}

fn assert_locks_settled(
    world: &MigrationGroup,
    counter: &CountingProgram,
    rival: &LockContender,
) -> Result<()> {
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    let mut running_nodes = Vec::new();
    world.wait("the process runs at no node, or at several", || {
        running_nodes.clear();
        for node in [DONOR, ACCEPTOR] {
            let count = world.count_processes(node, "locks")?;
            running_nodes.extend(std::iter::repeat_n(node, count));
        }
        Ok(running_nodes.len() == 1)
    })?;
    let node = running_nodes[0];
    eprintln!("    the process is on {node}");
    world.assert_goes_on(counter, node)?;
    rival.wait_for_rounds(world)?;
    let next = if node == DONOR { ACCEPTOR } else { DONOR };
    world.migrate_counter(counter, node, next)?;
    rival.wait_for_rounds(world)?;
    world.end(counter)?;
    world.wait("the released locks are not acquired", || {
        Ok(rival.acquired_locks().len() == TRIED_LOCKS)
    })
}
