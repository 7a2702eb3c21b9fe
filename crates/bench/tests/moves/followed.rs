//! Post-copy migrations with faults: the process goes on at one node with its memory intact, or has ended. No other
//! outcome is allowed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::control::{FollowedMemory, MigrationOutcome, SocketsWay};
use holdfast_bench::cluster::{LATE_MAX, was_late};
use holdfast_bench::moves::PostCopy;
use holdfast_bench::moves::zone::{LoadSpec, Loaded};
use holdfast_lab::Topology;
use nix::sys::signal::Signal;

use crate::faults::{ACCEPTOR, DONOR, Fault, Point, disturb, is_whole, nothing_is_written, point};
use crate::world::{Counter, World};

/// Number of connections, one of them the probe.
const CONNECTIONS: usize = 16;

/// Time in milliseconds for which a daemon is held up before it sends the remaining pages.
const HELD_MS: u32 = 1500;

/// Longest duration of a move on a machine that is not overloaded.
const LONGEST_MOVE: Duration = Duration::from_secs(10);

/// A state that a process may be in at the end of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process goes on, at any node.
    Goes,
    /// The process has ended.
    Ended,
}

/// Moves a server there and back; its connections and memory are verified all the time.
pub fn a_server() -> Result<()> {
    let mut loaded = Loaded::begin(&LoadSpec {
        name: format!("m-hot-{}", std::process::id()),
        topology: Topology::default(),
        connections: CONNECTIONS,
        memory_mib: 64,
        dirty_mib_per_s: 200,
        database: false,
        // No freeze is as short as 1 µs, so post-copy always happens.
        post_copy: Some(PostCopy {
            max_freeze_us: Some(1),
        }),
    })?;
    // No page remains for post-copy if the server got no processor time since the last round.
    let (wanted, mut followed) = (if is_whole() { 4 } else { 2 }, 0);
    for _ in 0..12 {
        let moved = loaded.next_move(SocketsWay::default())?;
        let (us, bytes) = (moved.status.freeze_us, moved.status.freeze_bytes);
        eprintln!("{us:?} us, {bytes} bytes, {:?}", moved.status.followed);
        if let Some(memory) = &moved.status.followed {
            let whole = memory.sent_pages > 0 && memory.problem.is_none();
            ensure!(whole, "{memory:?}");
            followed += 1;
            if followed == wanted {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    ensure!(followed == wanted, "only {followed} times memory followed");
    let seen = loaded.end()?;
    ensure!(seen.bytes_wrong == 0, "{} bytes wrong", seen.bytes_wrong);
    ensure!(seen.network.resets == 0, "{:?}", seen.network);
    Ok(())
}

/// Moves a program by post-copy there and back, and then by pre-copy alone.
pub fn there_and_back(world: &World) -> Result<()> {
    let program = start(world)?;
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)] {
        let memory = moves(world, &program, from, to)?;
        eprintln!("{memory:?}");
        ensure!(
            memory.problem.is_none() && memory.sent_pages > 0,
            "{memory:?}"
        );
    }
    world.migrate(&program, DONOR, ACCEPTOR)?;
    world.end(&program)
}

/// Operations that post-copy does not support are refused before anything is touched.
pub fn refused(world: &World) -> Result<()> {
    let program = start(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    for (clone, verify) in [(true, false), (false, true)] {
        let asked = world.ask(
            pid,
            DONOR,
            ACCEPTOR,
            SocketsWay::default(),
            [clone, verify, true],
        );
        let error = asked.err().context("it was not refused")?.to_string();
        ensure!(error.contains("post-copy"), "{error}");
    }
    // While its remaining pages arrive, the process cannot move on.
    hold(world)?;
    let (id, there) = came(world, pid)?;
    let again = world.begin(there, ACCEPTOR, DONOR)?;
    let status = world.ended(ACCEPTOR, again)?;
    let MigrationOutcome::Kept { reason } = status.outcome else {
        bail!("it moved on: {status:?}");
    };
    ensure!(reason.contains("post-copy"), "{reason}");
    ensure!(world.ended(DONOR, id)?.outcome == MigrationOutcome::Moved);
    world.goes_on(&program, ACCEPTOR)?;
    world.end(&program)
}

fn start(world: &World) -> Result<Counter> {
    world.start_program(DONOR, &[], "hot", &[])
}

fn moves(world: &World, program: &Counter, from: &str, to: &str) -> Result<FollowedMemory> {
    let pid = world.pid_on(from, program)?;
    let status = world.moved(from, to, || world.begin_post_copy(pid, from, to))?;
    world.goes_on(program, to)?;
    status.followed.context("no memory followed")
}

/// Makes the donor's daemon wait before it sends the remaining pages.
fn hold(world: &World) -> Result<()> {
    let file = world.cluster.run_file(DONOR, "fault")?;
    Ok(std::fs::write(
        file,
        format!("move-release before pause {HELD_MS}"),
    )?)
}

/// Moves a process by post-copy until it runs at the acceptor. Returns the number of the move and the PID at the
/// acceptor. A move that a node was late for is repeated.
fn came(world: &World, pid: i32) -> Result<(u64, i32)> {
    let donor = world.cluster.control_blocking(DONOR)?;
    for late in 0.. {
        let id = world.begin_post_copy(pid, DONOR, ACCEPTOR)?;
        let began = Instant::now();
        let mut there = None;
        let mut kept = None;
        world.wait("it does not run there", || {
            there = (world.residents(ACCEPTOR)?.first()).map(|resident| resident.pid);
            // The donor's daemon does not answer while it is held up.
            if there.is_none() && began.elapsed() > LONGEST_MOVE {
                let status = donor.run(async |client| client.migration(id).await)?;
                if let MigrationOutcome::Kept { reason } = status.outcome {
                    kept = Some(reason);
                }
            }
            Ok(there.is_some() || kept.is_some())
        })?;
        match (there, kept) {
            (Some(there), _) => return Ok((id, there)),
            (None, Some(reason)) if was_late(&reason) && late < LATE_MAX => {}
            (None, kept) => bail!("it does not run there: {kept:?}"),
        }
    }
    unreachable!()
}

/// Causes one fault at one step: the process ends in an allowed state, and nothing is left at any node.
pub fn disturbed(world: &World, at: Point, fault: Fault, may: &[End]) -> Result<()> {
    let began = Instant::now();
    let program = start(world)?;
    let result = disturb(world, &program, at, fault, World::begin_post_copy)
        .and_then(|()| settled(world, &program, may))
        .with_context(|| format!("{fault:?} at {at:?}"));
    eprintln!(
        "{fault:?} at {at:?}: {:?}, {:.1?}",
        result.as_ref().ok(),
        began.elapsed()
    );
    result.map(drop)
}

/// Asks a daemon to end during post-copy; the daemon is restarted. The original stays stopped meanwhile, and the copy
/// ends if the acceptor's daemon did.
pub fn terminated(world: &World, node: &str, end: End) -> Result<()> {
    let program = start(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    let before = world.cluster.daemon_starts(node);
    hold(world)?;
    came(world, pid)?;
    world.cluster.signal_daemon(node, Signal::SIGTERM)?;
    world.wait("it was not restarted", || {
        Ok(world.cluster.daemon_starts(node) > before)
    })?;
    world.cluster.wait_ready()?;
    let found = settled(world, &program, &[end]);
    found
        .map(drop)
        .with_context(|| format!("the daemon of {node} ended"))
}

/// Kills the restorer, the first process of the tree's PID namespace, during post-copy.
pub fn the_restorer_dies(world: &World) -> Result<()> {
    let program = start(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    hold(world)?;
    let (id, there) = came(world, pid)?;
    let script = "p=$(sed -n 's/^PPid:\\t//p' /proc/$0/status); \
                  grep -qx holdfast-reaper /proc/$p/comm && kill -9 $p";
    let mut kill = world.cluster.lab().command(ACCEPTOR)?;
    let killed = kill
        .args(["sh", "-c", script, &there.to_string()])
        .status()?;
    ensure!(killed.success(), "its restorer was not killed");
    ensure!(settled(world, &program, &[End::Ended])? == End::Ended);
    let status = world.ended(DONOR, id)?;
    let memory = status.followed.context("no memory was to follow")?;
    ensure!(memory.problem.is_some(), "{memory:?}");
    Ok(())
}

/// Kills the donor's daemon without a restart while the process waits for pages: the process ends, and the original
/// ends when the daemon is started again.
pub fn the_donor_is_lost(world: &World) -> Result<()> {
    let program = start(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    world.cluster.restart_daemon(DONOR, false);
    let file = world.cluster.run_file(DONOR, "fault")?;
    std::fs::write(&file, "move-release before die")?;
    world.begin_post_copy(pid, DONOR, ACCEPTOR)?;
    world.wait("its daemon does not die", || {
        Ok(world.cluster.daemon_pid(DONOR)?.is_none())
    })?;
    let gone = || Ok(world.residents(ACCEPTOR)?.is_empty() && world.runs(ACCEPTOR, "hot")? == 0);
    world.wait("it goes on without its memory", gone)?;
    ensure!(
        world.runs(DONOR, "hot")? == 1,
        "the original is gone already"
    );
    world.cluster.restart_daemon(DONOR, true);
    world.cluster.wait_ready()?;
    ensure!(settled(world, &program, &[End::Ended])? == End::Ended);
    Ok(())
}

/// Checks that the process is at one node and going on, or nowhere, and that no record is left. Returns the state.
fn settled(world: &World, program: &Counter, may: &[End]) -> Result<End> {
    world.wait("something is written down", || nothing_is_written(world))?;
    let mut places = Vec::new();
    // A killed process may exist for a moment longer.
    let most = usize::from(may.contains(&End::Goes));
    world.wait("it is at more places than it may be", || {
        places.clear();
        for node in world.cluster.nodes() {
            let count = world.runs(&node, "hot")?;
            places.extend(std::iter::repeat_n(node, count));
        }
        Ok(places.len() <= most)
    })?;
    // The check also reports wrong pages.
    program.check()?;
    let end = match places.first() {
        Some(node) => {
            world.goes_on(program, node)?;
            End::Goes
        }
        None => End::Ended,
    };
    ensure!(
        may.contains(&end),
        "{end:?}: {places:?}, {:?}",
        program.last()
    );
    ensure!(
        nothing_is_written(world)?,
        "something is written down again"
    );
    world.end(program)?;
    Ok(end)
}

/// Causes faults during post-copy, each with its allowed end states.
pub fn while_it_follows(world: &World) -> Result<()> {
    let donor = point(DONOR, "move-release before");
    disturbed(world, donor, Fault::Kill(DONOR), &[End::Goes])?;
    disturbed(world, donor, Fault::Cut(DONOR, ACCEPTOR), &[End::Goes])?;
    disturbed(
        world,
        point(ACCEPTOR, "move-go before"),
        Fault::Kill(ACCEPTOR),
        &[End::Goes],
    )?;
    disturbed(
        world,
        point(ACCEPTOR, "move-go after"),
        Fault::Kill(ACCEPTOR),
        &[End::Ended],
    )?;
    disturbed(world, donor, Fault::Kill(ACCEPTOR), &[End::Ended])?;
    disturbed(world, donor, Fault::KillBoth, &[End::Ended])?;
    terminated(world, DONOR, End::Goes)?;
    terminated(world, ACCEPTOR, End::Ended)
}
