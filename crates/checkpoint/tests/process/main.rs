//! Programs that check themselves, moved while they run, there and back, between namespaces that the tests make.
#![cfg(target_arch = "x86_64")]

mod blockers;
mod comparison;
mod compromised_donor;
mod fault_injection;
mod features;
mod foreign_vdso;
mod half_closed;
mod job_control;
mod measure;
mod migration;
mod pids;
mod postcopy;
mod process_cleanup;
mod program;
mod restless_trees;
mod servers;
mod stop_priority;
mod vanished_pages;

use holdfast_checkpoint::donor::TreeTracker;
use holdfast_sys::priority::RealtimeGuard;
use migration::Host;
use program::Program;
use std::time::Duration;

/// Moves a program twice and asks for its verdict.
fn move_source_there_and_back(source: &str) {
    move_there_and_back(Program::start(source));
}

fn move_there_and_back(program: Program) {
    let here = Host::local();
    let there = Host::new();
    let moved = migration::migrate(program.tree(&here), &there).expect("moves");
    program.assert_runs_on();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    program.assert_good_verdict(back);
}

/// Moves a program once and ends it at the acceptor.
fn end_at_acceptor(program: Program) {
    let moved = migration::migrate(program.tree(&Host::local()), &Host::new()).expect("moves");
    program.assert_runs_on();
    program.assert_good_verdict(moved);
}

#[test]
fn memory_moves() {
    move_source_there_and_back("memory");
}

#[test]
fn threads_move() {
    move_source_there_and_back("threads");
}

#[test]
fn signals_move() {
    move_source_there_and_back("signals");
}

/// Trap handlers move too, although the kernel resets the handler of a thread that traps while the signal is blocked.
#[test]
fn traps_move() {
    for mode in ["caught", "ignored", "waiting"] {
        move_there_and_back(Program::start_with("traps", &[mode]));
    }
}

#[test]
fn timers_move() {
    move_source_there_and_back("timers");
}

#[test]
fn identity_moves() {
    move_source_there_and_back("identity");
}

#[test]
fn seccomp_moves() {
    move_source_there_and_back("seccomp");
}

/// The program's session and process group are a shell's.
#[test]
fn program_in_a_shells_session_moves() {
    let shell = ["setsid", "sh", "-c", "\"$0\" \"$@\" & wait"];
    for source in ["threads", "tree"] {
        move_there_and_back(Program::start_under(&shell, source, &[]));
    }
}

/// In a container the first process leads the session of a program that it started, or the session leader is invisible.
#[test]
fn program_of_a_container_moves() {
    run_test_in_container(
        &["unshare"],
        &["setsid"],
        "container_program_moves_inside_pid_namespace",
    );
    run_test_in_container(
        &["setsid", "unshare"],
        &[],
        "container_program_moves_inside_pid_namespace",
    );
}

#[test]
#[ignore = "started by another test"]
fn container_program_moves_inside_pid_namespace() {
    for shell in ["\"$0\" \"$@\" & wait", "set -m; \"$0\" \"$@\" & wait"] {
        let program = Program::start_under(&["sh", "-c", shell], "threads", &[]);
        move_there_and_back(program);
    }
}

/// Runs a test of this program in a PID namespace.
fn run_test_in_container(unshare: &[&str], first: &[&str], test: &str) {
    let test_binary = std::env::current_exe().expect("a path");
    let output = std::process::Command::new(unshare[0])
        .args(&unshare[1..])
        .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
        .args(first)
        .arg(test_binary)
        .args(["--exact", test, "--ignored"])
        .output()
        .expect("starts");
    let output_text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && output_text.contains("1 passed"),
        "{output_text}"
    );
}

#[test]
fn files_move() {
    move_source_there_and_back("files");
}

#[test]
fn pipes_move() {
    move_source_there_and_back("pipes");
}

#[test]
fn events_move() {
    move_source_there_and_back("events");
}

#[test]
fn unix_sockets_move() {
    move_source_there_and_back("unix_sockets");
}

#[test]
fn terminal_moves() {
    move_source_there_and_back("terminal");
}

#[test]
fn shared_tables_move() {
    move_source_there_and_back("tables");
}

/// Moves to a host without the shared memory names, and back to a host where they still exist.
#[test]
fn posix_memory_moves() {
    let program = Program::start("posix_memory");
    let here = Host::local();
    let there = Host::new().with_own_shm();
    let moved = migration::migrate(program.tree(&here), &there).expect("moves");
    program.assert_runs_on();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    program.assert_good_verdict(back);
    move_source_there_and_back("posix_memory");
}

#[test]
fn memory_files_move() {
    move_source_there_and_back("memory_files");
}

#[test]
fn process_tree_moves() {
    move_source_there_and_back("tree");
}

/// Moves more threads than are handled at the same time, with threads that are born while their process is being
/// stopped.
#[test]
fn many_processes_and_threads_move() {
    move_there_and_back(Program::start_with("large_trees", &["3", "40"]));
}

/// A tracker that lends threads priority for its calls takes the priority back.
#[test]
fn boosted_threads_regain_their_priority() {
    /// Result for a thread that does not exist.
    const ENDED: i32 = -1;
    let policy = |tid: i32| {
        // SAFETY: no memory is involved.
        unsafe { libc::sched_getscheduler(tid) }
    };
    let program = Program::start("threads");
    let tree = program.tree(&Host::local());
    let mut tracker = TreeTracker::start(tree.root).expect("starts");
    let threads = holdfast_checkpoint::procfs::threads(tree.root).expect("threads");
    assert!(threads.len() > 1);
    // Some threads may end meanwhile.
    let threads: Vec<(i32, i32)> = (threads.into_iter().map(|tid| (tid, policy(tid))))
        .filter(|(_, policy)| *policy != ENDED)
        .collect();
    let guard = RealtimeGuard::begin().expect("root may");
    for _ in 0..5 {
        let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
        let stopped = stopped.expect("stops");
        stopped.read_state().expect("state");
        let now = |tid: i32| Some(policy(tid)).filter(|policy| *policy != ENDED);
        let kept = (threads.iter()).filter_map(|(tid, before)| Some((now(*tid)?, *before)));
        let kept: Vec<_> = kept.collect();
        assert!(kept.len() > 1, "{threads:?}");
        assert!(kept.iter().all(|(now, before)| now == before), "{kept:?}");
        tracker = stopped.thaw().expect("thaws");
    }
    drop(guard);
    let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
    stopped.expect("stops").roll_back().expect("rolls back");
    program.assert_runs_on();
    program.assert_good_verdict(tree);
}

/// An inspection must not touch a pipe during a splice(2): any operation on it would wait until that call returns.
#[test]
fn spliced_pipes_move() {
    let program = Program::start("splices");
    let pid = program.pid();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = sender.send(holdfast_checkpoint::inspect::inspect(pid));
    });
    let Ok(report) = receiver.recv_timeout(Duration::from_secs(60)) else {
        let _ = std::process::Command::new("kill")
            .args(["-KILL", &pid.to_string()])
            .status();
        panic!("exceeded time: the inspection waits for a pipe");
    };
    assert_eq!(report.expect("inspected").blockers, []);
    move_there_and_back(program);
}

#[test]
fn partial_system_calls_continue() {
    move_there_and_back(Program::start_with("unfinished_calls", &["moves"]));
}

/// Calls that are partly done continue in a program that stays, however often the program is stopped.
#[test]
fn partial_system_calls_continue_after_each_stop() {
    let program = Program::start("unfinished_calls");
    let tree = program.tree(&Host::local());
    for _ in 0..10 {
        let tracker = TreeTracker::start(tree.root).expect("starts");
        let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
        let stopped = stopped.expect("stops");
        stopped.read_state().expect("state");
        stopped.roll_back().expect("rolls back");
        program.assert_runs_on();
    }
    program.assert_good_verdict(tree);
}

/// A program is stopped and thawed again and again without an effect.
#[test]
fn thawed_program_notices_nothing() {
    let sources =
        ["system_calls", "threads", "signals", "tree", "seccomp"].map(|source| (source, &[][..]));
    let traps = [["caught"], ["ignored"], ["waiting"]];
    let traps = traps.iter().map(|mode| ("traps", &mode[..]));
    for (source, arguments) in sources.into_iter().chain(traps) {
        let program = Program::start_with(source, arguments);
        let tree = program.tree(&Host::local());
        let mut tracker = TreeTracker::start(tree.root).expect("starts");
        for _ in 0..30 {
            let stopped = tracker
                .freeze()
                .map_err(|unfrozen| unfrozen.error)
                .expect("stops");
            stopped.read_state().expect("state");
            tracker = stopped.thaw().expect("thaws");
            std::thread::sleep(Duration::from_millis(2));
        }
        let stopped = tracker
            .freeze()
            .map_err(|unfrozen| unfrozen.error)
            .expect("stops");
        stopped.roll_back().expect("rolls back");
        program.assert_runs_on();
        assert!(
            !tree.has_traces(),
            "{source}: traces of the freeze are left"
        );
        program.assert_good_verdict(tree);
    }
}
