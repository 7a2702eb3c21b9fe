//! Migrations of a program with locks on files that all nodes share: no other process gets the locks at any instant of
//! a move.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;

use crate::faults::{
    ACCEPTOR, DONOR, Fault, HOLDER, Point, disturb, nothing_is_written, point, sample,
};
use crate::world::{Counter, World, compile};

/// Default number of moves; `HOLDFAST_MOVES` overrides it.
const MOVES: usize = 6;
/// Number of rounds that prove that a rival keeps trying.
const ROUNDS: u64 = 20;
/// Numbers of locks that a rival tries to get, and of locks that it waits for.
const TRIED: usize = 17;
const WAITED: usize = 6;

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
const LEFT: [&str; 5] = [
    "open read 0 0",
    "open write 0 1",
    "ranges read 0 10",
    "ranges read 100 0",
    "ranges write 0 1",
];

/// Another process that competes for the locks.
struct Rival {
    process: Child,
    file: PathBuf,
    /// Locks that the rival may get.
    allowed: &'static [&'static str],
}

impl Rival {
    fn start(world: &World, counter: &Counter, how: &str) -> Result<Rival> {
        let counts = counter.end_file().with_extension("");
        let file = counts.with_extension(how);
        let mut command = world.cluster.lab().command(HOLDER)?;
        command.arg(compile("rival")?).arg(&counts).arg(how);
        let process = command.arg(&file).stdin(Stdio::null()).spawn()?;
        Ok(Rival {
            process,
            file,
            allowed: &[],
        })
    }

    /// Returns the locks that the rival has got so far.
    fn got(&self) -> BTreeSet<String> {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn rounds(&self) -> u64 {
        let bytes = std::fs::read(self.file.with_extension("try.rounds")).unwrap_or_default();
        bytes.try_into().map_or(0, u64::from_ne_bytes)
    }

    /// Waits until the rival has tried some more.
    fn tries(&self, world: &World) -> Result<()> {
        let before = self.rounds();
        world.wait("a rival does not try", || {
            Ok(self.rounds() > before + ROUNDS)
        })?;
        self.has_nothing()
    }

    fn has_nothing(&self) -> Result<()> {
        let mut got = self.got();
        got.retain(|one| !self.allowed.contains(&one.as_str()));
        ensure!(got.is_empty(), "somebody else got {got:?}");
        Ok(())
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(world: &World) -> Result<Counter> {
    world.start_program(DONOR, &[], "locks", &["hold"])
}

/// Rivals that try or wait get the locks when the program has ended, and not before.
pub fn never_free(world: &World) -> Result<()> {
    let counter = start(world)?;
    let (rival, waiter) = (
        Rival::start(world, &counter, "try")?,
        Rival::start(world, &counter, "wait")?,
    );
    let waits = || waiters(&counter.end_file().with_extension(""));
    world.wait("nobody waits", || Ok(waits()? == WAITED))?;
    rival.tries(world)?;
    let moves = std::env::var("HOLDFAST_MOVES").ok();
    let moves = moves.and_then(|text| text.parse().ok()).unwrap_or(MOVES);
    for turn in 0..moves {
        let (from, to) = [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)][turn % 2];
        let status = world.migrate(&counter, from, to)?;
        eprintln!("{:?} us, {:?}", status.freeze_us, status.steps_us);
        rival.tries(world)?;
        ensure!(waits()? == WAITED, "somebody does not wait any more");
        waiter.has_nothing()?;
    }
    world.end(&counter)?;
    world.wait("nobody gets what is free", || {
        Ok((rival.got().len(), waiter.got().len()) == (TRIED, WAITED))
    })
}

/// Counts the processes that wait for locks on files in the folder of `counts`.
fn waiters(counts: &Path) -> Result<usize> {
    use std::os::unix::fs::MetadataExt;
    let folder = counts.parent().context("a folder")?;
    let inodes: Result<BTreeSet<String>> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.metadata()?.ino().to_string()))
        .collect();
    let inodes = inodes?;
    let locks = std::fs::read_to_string("/proc/locks")?;
    let waits = locks.lines().filter(|line| line.contains("-> "));
    let place = |line: &str| line.split_whitespace().nth(6).map(str::to_owned);
    let is_here = |place: String| {
        place
            .rsplit(':')
            .next()
            .is_some_and(|inode| inodes.contains(inode))
    };
    Ok(waits
        .filter_map(place)
        .filter(|at| is_here(at.clone()))
        .count())
}

/// A waiting reader could get the lock for the moment in which it is held as a read lock, so the move is refused.
pub fn refused(world: &World) -> Result<()> {
    let counter = start(world)?;
    let rival = Rival::start(world, &counter, "try")?;
    let reader = Rival::start(world, &counter, "read")?;
    let counts = counter.end_file().with_extension("");
    world.wait("nobody waits", || Ok(waiters(&counts)? == 1))?;
    let pid = world.pid_on(DONOR, &counter)?;
    let id = world.begin(pid, DONOR, ACCEPTOR)?;
    let status = world.ended(DONOR, id)?;
    let MigrationOutcome::Kept { reason } = &status.outcome else {
        anyhow::bail!("it moved: {status:?}");
    };
    let named = [".whole)", "flock", "a reader waits"];
    let named = named
        .iter()
        .all(|part| reason.contains(part) || *part == "flock");
    ensure!(named && status.freeze_us.is_none(), "{status:?}");
    world.goes_on(&counter, DONOR)?;
    rival.tries(world)?;
    reader.has_nothing()?;
    drop(reader);
    world.wait("somebody waits", || Ok(waiters(&counts)? == 0))?;
    world.migrate(&counter, DONOR, ACCEPTOR)?;
    rival.tries(world)?;
    world.end(&counter)
}

/// A daemon dies while the locks pass between nodes: the surviving program holds them all, and no other process had a
/// write lock on a whole file.
pub fn disturbed(world: &World) -> Result<()> {
    for (at, fault) in sample(&FAULTS) {
        let counter = start(world)?;
        let mut rival = Rival::start(world, &counter, "try")?;
        rival.tries(world)?;
        rival.allowed = &LEFT;
        disturb(world, &counter, at, fault, World::begin)
            .and_then(|()| settled(world, &counter, &rival))
            .with_context(|| format!("{fault:?} at {at:?}"))?;
    }
    Ok(())
}

fn settled(world: &World, counter: &Counter, rival: &Rival) -> Result<()> {
    world.wait("something is written down", || nothing_is_written(world))?;
    let mut places = Vec::new();
    world.wait("it is not at one place", || {
        places.clear();
        for node in [DONOR, ACCEPTOR] {
            let count = world.runs(node, "locks")?;
            places.extend(std::iter::repeat_n(node, count));
        }
        Ok(places.len() == 1)
    })?;
    let node = places[0];
    eprintln!("    it is on {node}");
    world.goes_on(counter, node)?;
    rival.tries(world)?;
    let next = if node == DONOR { ACCEPTOR } else { DONOR };
    world.migrate(counter, node, next)?;
    rival.tries(world)?;
    world.end(counter)?;
    world.wait(
        "nobody gets what is free",
        || Ok(rival.got().len() == TRIED),
    )
}
