//! Post-copy migrations with faults: the process goes on at one node with its memory intact, or has ended. No other
//! outcome is allowed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::control::{MigrationOutcome, PostCopyMemory, SocketStrategy};
use holdfast_lab::Topology;
use holdfast_testbed::cluster::{STALLS_MAX, is_node_stall};
use holdfast_testbed::process_moves::PostCopyCondition;
use holdfast_testbed::process_moves::migrating_zone::{MigratingZone, MigratingZoneSpec};
use nix::sys::signal::Signal;

use crate::faults::{
    ACCEPTOR, DONOR, Fault, Point, begin_with_fault, no_move_records_left, point, runs_in_full,
    sample,
};
use crate::world::{CountingProgram, MigrationGroup};

/// Number of connections, one of them the probe.
const CONNECTIONS: usize = 16;

/// Time in milliseconds for which a daemon is held up before it sends the remaining pages.
const PAGE_DELAY_MS: u32 = 1500;

/// Most moves in a row without a page for post-copy.
const COMPLETE_MOVES_MAX: usize = 4;

/// Longest duration of a move on a machine that is not overloaded.
const MOVE_TIME_MAX: Duration = Duration::from_secs(10);

/// A state that a process may be in at the end of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndState {
    /// The process goes on, at any node.
    Running,
    /// The process has ended.
    Ended,
}

/// Moves a server there and back; its connections and memory are verified all the time.
pub fn migrate_loaded_server() -> Result<()> {
    let mut loaded = MigratingZone::start(&MigratingZoneSpec {
        name: format!("m-hot-{}", std::process::id()),
        topology: Topology::default(),
        connections: CONNECTIONS,
        memory_mib: 64,
        dirty_mib_per_s: 200,
        database: false,
        // No freeze is as short as 1 µs, so post-copy always happens.
        post_copy: Some(PostCopyCondition {
            max_freeze_us: Some(1),
        }),
    })?;
    // No page remains for post-copy if the server got no processor time since the last round.
    let (required_moves, mut postcopy_moves) = (if runs_in_full() { 4 } else { 2 }, 0);
    for _ in 0..12 {
        let moved = loaded.move_server(SocketStrategy::default())?;
        let (us, bytes) = (moved.status.freeze_us, moved.status.freeze_bytes);
        eprintln!("{us:?} us, {bytes} bytes, {:?}", moved.status.post_copy);
        if let Some(memory) = &moved.status.post_copy {
            let memory_complete = memory.sent_pages > 0 && memory.problem.is_none();
            ensure!(memory_complete, "{memory:?}");
            postcopy_moves += 1;
            if postcopy_moves == required_moves {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    ensure!(
        postcopy_moves == required_moves,
        "only {postcopy_moves} moves by post-copy"
    );
    let results = loaded.end()?;
    ensure!(
        results.bytes_wrong == 0,
        "{} bytes wrong",
        results.bytes_wrong
    );
    ensure!(results.network.resets == 0, "{:?}", results.network);
    Ok(())
}

/// Moves a program by post-copy there and back, and then by pre-copy alone.
pub fn postcopy_there_and_back(world: &MigrationGroup) -> Result<()> {
    let program = start_writer(world)?;
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)] {
        let memory = postcopy_to(world, &program, from, to)?;
        eprintln!("{memory:?}");
        ensure!(
            memory.problem.is_none() && memory.sent_pages > 0,
            "{memory:?}"
        );
    }
    world.migrate_counter(&program, DONOR, ACCEPTOR)?;
    world.end(&program)
}

/// Operations that post-copy does not support are refused before anything is touched.
pub fn refuse_unsupported(world: &MigrationGroup) -> Result<()> {
    let program = start_writer(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    for (clone, verify) in [(true, false), (false, true)] {
        let request_result = world.request_migration(
            pid,
            DONOR,
            ACCEPTOR,
            SocketStrategy::default(),
            [clone, verify, true],
        );
        let error = request_result
            .err()
            .context("the request was not refused")?
            .to_string();
        ensure!(error.contains("post-copy"), "{error}");
    }
    // While its remaining pages arrive, the process cannot move on.
    delay_remaining_pages(world)?;
    let (id, acceptor_pid) = postcopy_until_running(world, pid)?;
    let again = world.begin(acceptor_pid, ACCEPTOR, DONOR)?;
    let status = world.wait_for_migration(ACCEPTOR, again)?;
    let MigrationOutcome::Kept { reason, .. } = status.outcome else {
        bail!("the process moved on: {status:?}");
    };
    ensure!(reason.contains("post-copy"), "{reason}");
    ensure!(world.wait_for_migration(DONOR, id)?.outcome == MigrationOutcome::Moved);
    world.assert_goes_on(&program, ACCEPTOR)?;
    world.end(&program)
}

fn start_writer(world: &MigrationGroup) -> Result<CountingProgram> {
    world.start_program(DONOR, &[], "hot", &[])
}

fn postcopy_to(
    world: &MigrationGroup,
    program: &CountingProgram,
    from: &str,
    to: &str,
) -> Result<PostCopyMemory> {
    let pid = world.pid_on(from, program)?;
    let status = world.migrate_with_retry(from, to, || world.begin_post_copy(pid, from, to))?;
    world.assert_goes_on(program, to)?;
    status
        .post_copy
        .context("the move was not a post-copy move")
}

/// Makes the donor's daemon wait before it sends the remaining pages.
fn delay_remaining_pages(world: &MigrationGroup) -> Result<()> {
    let file = world.cluster.run_path(DONOR, "fault")?;
    Ok(std::fs::write(
        file,
        format!("move-release before pause {PAGE_DELAY_MS}"),
    )?)
}

/// Moves a process by post-copy until it runs at the acceptor. Returns the number of the move and the PID at the
/// acceptor. A move that a node was late for is repeated.
fn postcopy_until_running(world: &MigrationGroup, pid: i32) -> Result<(u64, i32)> {
    let donor = world.cluster.blocking_control_client(DONOR)?;
    for retry in 0.. {
        let id = world.begin_post_copy(pid, DONOR, ACCEPTOR)?;
        let began = Instant::now();
        let mut acceptor_pid = None;
        let mut kept = None;
        world.wait("the process does not run at the acceptor", || {
            acceptor_pid = (world.residents(ACCEPTOR)?.first()).map(|resident| resident.pid);
            // The donor's daemon does not answer while it is held up.
            if acceptor_pid.is_none() && began.elapsed() > MOVE_TIME_MAX {
                let status = donor.run(async |client| client.migration(id).await)?;
                if let MigrationOutcome::Kept { reason, .. } = status.outcome {
                    kept = Some(reason);
                }
            }
            Ok(acceptor_pid.is_some() || kept.is_some())
        })?;
        match (acceptor_pid, kept) {
            (Some(there), _) => return Ok((id, there)),
            (None, Some(reason)) if is_node_stall(&reason) && retry < STALLS_MAX => {}
            (None, kept) => bail!("the process does not run at the acceptor: {kept:?}"),
        }
    }
    unreachable!()
}

/// Causes one fault at one step: the process ends in an allowed state, and nothing is left at any node.
pub fn postcopy_with_fault(
    world: &MigrationGroup,
    at: Point,
    fault: Fault,
    allowed: &[EndState],
) -> Result<()> {
    repeat_until_allowed(allowed, || {
        let began = Instant::now();
        let program = start_writer(world)?;
        let result = begin_with_fault(world, &program, at, fault, MigrationGroup::begin_post_copy)
            .and_then(|()| assert_end_state(world, &program, allowed))
            .with_context(|| format!("{fault:?} at {at:?}"));
        eprintln!(
            "{fault:?} at {at:?}: {:?}, {:.1?}",
            result.as_ref().ok(),
            began.elapsed()
        );
        result
    })
}

/// Runs a case again while its process ends in a state that shows no more than that no page was left for post-copy.
fn repeat_until_allowed(allowed: &[EndState], case: impl Fn() -> Result<EndState>) -> Result<()> {
    for _ in 0..COMPLETE_MOVES_MAX {
        if allowed.contains(&case()?) {
            return Ok(());
        }
    }
    bail!("no page was left for post-copy in {COMPLETE_MOVES_MAX} moves");
}

/// Asks a daemon to end during post-copy; the daemon is restarted. The original stays stopped meanwhile, and the copy
/// ends if the acceptor's daemon did.
pub fn postcopy_with_terminated_daemon(
    world: &MigrationGroup,
    node: &str,
    end: EndState,
) -> Result<()> {
    repeat_until_allowed(&[end], || {
        let program = start_writer(world)?;
        let pid = world.pid_on(DONOR, &program)?;
        let before = world.cluster.daemon_starts(node);
        delay_remaining_pages(world)?;
        postcopy_until_running(world, pid)?;
        world.cluster.signal_daemon(node, Signal::SIGTERM)?;
        world.wait("the daemon was not restarted", || {
            Ok(world.cluster.daemon_starts(node) > before)
        })?;
        world.cluster.wait_ready()?;
        assert_end_state(world, &program, &[end])
            .with_context(|| format!("the daemon of {node} ended"))
    })
}

/// Kills the restorer, the first process of the tree's PID namespace, during post-copy.
pub fn process_ends_when_restorer_dies(world: &MigrationGroup) -> Result<()> {
    let program = start_writer(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    delay_remaining_pages(world)?;
    let (id, acceptor_pid) = postcopy_until_running(world, pid)?;
    let script = "p=$(sed -n 's/^PPid:\\t//p' /proc/$0/status); \
                  grep -qx holdfast-reaper /proc/$p/comm && kill -9 $p";
    let mut kill = world.cluster.lab().command(ACCEPTOR)?;
    let killed = kill
        .args(["sh", "-c", script, &acceptor_pid.to_string()])
        .status()?;
    ensure!(killed.success(), "the restorer was not killed");
    ensure!(assert_end_state(world, &program, &[EndState::Ended])? == EndState::Ended);
    let status = world.wait_for_migration(DONOR, id)?;
    let memory = status
        .post_copy
        .context("the move was not a post-copy move")?;
    ensure!(memory.problem.is_some(), "{memory:?}");
    Ok(())
}

/// Kills the donor's daemon without a restart while the process waits for pages: the process ends, and the original
/// ends when the daemon is started again.
pub fn process_ends_when_donor_is_lost(world: &MigrationGroup) -> Result<()> {
    let program = start_writer(world)?;
    let pid = world.pid_on(DONOR, &program)?;
    world.cluster.set_daemon_restart(DONOR, false);
    let file = world.cluster.run_path(DONOR, "fault")?;
    std::fs::write(&file, "move-release before die")?;
    world.begin_post_copy(pid, DONOR, ACCEPTOR)?;
    world.wait("the daemon of the donor does not die", || {
        Ok(world.cluster.daemon_pid(DONOR)?.is_none())
    })?;
    let has_ended = || {
        Ok(world.residents(ACCEPTOR)?.is_empty() && world.count_processes(ACCEPTOR, "hot")? == 0)
    };
    world.wait("the process runs on without its remaining pages", has_ended)?;
    ensure!(
        world.count_processes(DONOR, "hot")? == 1,
        "the original ended too early"
    );
    world.cluster.set_daemon_restart(DONOR, true);
    world.cluster.wait_ready()?;
    ensure!(assert_end_state(world, &program, &[EndState::Ended])? == EndState::Ended);
    Ok(())
}

/// Returns true if the donor's last move had no page left for post-copy, because the program got no processor time since
/// the last round of copying. A daemon that has been started since the move knows nothing of it.
fn was_moved_completely(world: &MigrationGroup) -> Result<bool> {
    let donor = world.cluster.blocking_control_client(DONOR)?;
    let migrations = donor
        .run(async |client| client.migrations().await)?
        .migrations;
    Ok(migrations
        .iter()
        .max_by_key(|one| one.id)
        .is_some_and(|last| last.outcome == MigrationOutcome::Moved && last.post_copy.is_none()))
}

/// Checks that the process is at one node and going on, or nowhere, and that no record is left. Returns the state. A
/// process that has all its pages goes on, whatever is allowed.
fn assert_end_state(
    world: &MigrationGroup,
    program: &CountingProgram,
    allowed: &[EndState],
) -> Result<EndState> {
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    let allowed = match was_moved_completely(world)? {
        true => &[EndState::Running],
        false => allowed,
    };
    let mut running_nodes = Vec::new();
    // A killed process may exist for a moment longer.
    let running_max = usize::from(allowed.contains(&EndState::Running));
    world.wait("the process runs at too many nodes", || {
        running_nodes.clear();
        for node in world.cluster.nodes() {
            let count = world.count_processes(&node, "hot")?;
            running_nodes.extend(std::iter::repeat_n(node, count));
        }
        Ok(running_nodes.len() <= running_max)
    })?;
    // The check also reports wrong pages.
    program.assert_in_order()?;
    let end = match running_nodes.first() {
        Some(node) => {
            world.assert_goes_on(program, node)?;
            EndState::Running
        }
        None => EndState::Ended,
    };
    ensure!(
        allowed.contains(&end),
        "{end:?}: {running_nodes:?}, {:?}",
        program.last_count()
    );
    ensure!(
        no_move_records_left(world)?,
        "a new record of the move appeared in a run directory"
    );
    world.end(program)?;
    Ok(end)
}

/// Causes faults during post-copy, each with its allowed end states.
pub fn faults_during_postcopy(world: &MigrationGroup) -> Result<()> {
    const RUNNING: EndState = EndState::Running;
    const ENDED: EndState = EndState::Ended;
    let donor = point(DONOR, "move-release before");
    let faults = [
        (donor, Fault::Kill(DONOR), RUNNING),
        (donor, Fault::Cut(DONOR, ACCEPTOR), RUNNING),
        (
            point(ACCEPTOR, "move-go after"),
            Fault::Kill(ACCEPTOR),
            ENDED,
        ),
        (
            point(ACCEPTOR, "move-go before"),
            Fault::Kill(ACCEPTOR),
            RUNNING,
        ),
        (donor, Fault::KillBoth, ENDED),
        (donor, Fault::Kill(ACCEPTOR), ENDED),
    ];
    for (at, fault, allowed) in sample(&faults) {
        postcopy_with_fault(world, at, fault, &[allowed])?;
    }
    for (node, end) in sample(&[(ACCEPTOR, ENDED), (DONOR, RUNNING)]) {
        postcopy_with_terminated_daemon(world, node, end)?;
    }
    Ok(())
}
