//! Moves between kernels with different vDSO code.

use crate::migration::{self, Host, Tree};
use crate::program::Program;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::error::Error;

/// Number of attempts for a move that is refused because of a thread's position in the vDSO.
const ATTEMPTS: usize = 200;

/// A thread that is interrupted in vDSO code again and again, and is moved inside its handlers, returns into the old
/// code and goes on.
#[test]
fn thread_returning_into_old_vdso_continues() {
    let program = Program::start("interrupted_clock");
    let (here, there) = (Host::local(), Host::new());
    let old_vdso_range = vdso_range_of(program.pid());
    let moved = migrate_with_retries(program.pid(), &here, &there);
    let maps = maps(moved.root);
    let line = maps.lines().find(|line| line.starts_with(&old_vdso_range));
    let line = line.expect("the old vDSO is still mapped");
    assert!(
        line.contains(" r-xp ") && !line.contains("[vdso]"),
        "{line}"
    );
    assert_ne!(vdso_range_of(moved.root), old_vdso_range);
    program.assert_runs_on();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    program.assert_good_verdict(back);
}

/// No thread is stopped inside the vDSO, since it could not continue in the middle of another kernel's code.
#[test]
fn no_thread_is_stopped_inside_the_vdso() {
    let program = Program::start("clock");
    let vdso_range_text = vdso_range_of(program.pid());
    let (start, end) = vdso_range_text.split_once('-').expect("a range");
    let number = |text| u64::from_str_radix(text, 16).expect("an address");
    let vdso_range = number(start)..number(end);
    let mut tracker = TreeTracker::start(program.pid()).expect("starts");
    for round in 0..30 {
        if round == 10 {
            tracker.next_round().expect("a round");
        }
        let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
        let stopped = stopped.expect("stops");
        let state = stopped.read_state().expect("state");
        let process = state.processes[0].as_ref().expect("a process");
        assert_eq!(process.threads.len(), 4);
        for thread in &process.threads {
            assert!(!vdso_range.contains(&thread.registers.rip), "{round}");
        }
        tracker = stopped.thaw().expect("thaws");
        program.assert_runs_on();
    }
    tracker.stop_tracking().expect("stops watching");
    let tree = program.tree(&Host::local());
    program.assert_good_verdict(tree);
}

/// Returns the address range of the vDSO in a process.
fn vdso_range_of(pid: i32) -> String {
    let maps = maps(pid);
    let line = maps.lines().find(|line| line.ends_with("[vdso]"));
    let range = line.and_then(|line| line.split_once(' '));
    range.expect("a vDSO").0.to_owned()
}

fn maps(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps")
}

/// Moves a tree, with further attempts while a thread is interrupted just where a jump must be patched: such a move is
/// refused and the program runs on.
fn migrate_with_retries(root: i32, from: &Host, to: &Host) -> Tree {
    for _ in 0..ATTEMPTS {
        match migration::migrate(Tree::original(root, from), to) {
            Err(Error::Refused(reason)) if reason.ends_with("try again") => eprintln!("{reason}"),
            other => return other.expect("moves"),
        }
    }
    panic!("every move was refused")
}
