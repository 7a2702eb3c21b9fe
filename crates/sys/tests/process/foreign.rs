//! Moves between kernels with different vDSO code.

use crate::moving::{self, Host, Tree};
use crate::program::Program;
use holdfast_sys::process::donor::Tracker;
use holdfast_sys::process::error::Error;

/// Number of attempts for a move that is refused because of a thread's position in the vDSO.
const TRIES: usize = 200;

/// A thread that is interrupted in vDSO code again and again, and is moved inside its handlers, returns into the old
/// code and goes on.
#[test]
fn who_returns_into_another_kernels_code_goes_on() {
    let program = Program::start("interrupted_clock");
    let (here, there) = (Host::own(), Host::new());
    let known = place_of_code(program.pid());
    let moved = move_at_last(program.pid(), &here, &there);
    let maps = maps(moved.root);
    let line = maps.lines().find(|line| line.starts_with(&known));
    let line = line.expect("what it knows is still there");
    assert!(
        line.contains(" r-xp ") && !line.contains("[vdso]"),
        "{line}"
    );
    assert_ne!(place_of_code(moved.root), known);
    program.goes_on();
    let back = moving::migrate(moved, &here).expect("moves back");
    program.goes_on();
    program.ends_well(back);
}

/// No thread is stopped inside the vDSO, since it could not continue in the middle of another kernel's code.
#[test]
fn nobody_is_stopped_in_the_kernels_code() {
    let program = Program::start("clock");
    let place = place_of_code(program.pid());
    let (start, end) = place.split_once('-').expect("a range");
    let number = |text| u64::from_str_radix(text, 16).expect("an address");
    let code = number(start)..number(end);
    let mut tracker = Tracker::start(program.pid()).expect("starts");
    for round in 0..30 {
        if round == 10 {
            tracker.round().expect("a round");
        }
        let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
        let stopped = stopped.expect("stops");
        let state = stopped.state().expect("state");
        let process = state.processes[0].as_ref().expect("a process");
        assert_eq!(process.threads.len(), 4);
        for thread in &process.threads {
            assert!(!code.contains(&thread.registers.rip), "{round}");
        }
        tracker = stopped.thaw().expect("thaws");
        program.goes_on();
    }
    tracker.stop().expect("stops watching");
    let tree = program.tree(&Host::own());
    program.ends_well(tree);
}

/// Returns the address range of the vDSO in a process.
fn place_of_code(pid: i32) -> String {
    let maps = maps(pid);
    let line = maps.lines().find(|line| line.ends_with("[vdso]"));
    let place = line.and_then(|line| line.split_once(' '));
    place.expect("the kernel's code").0.to_owned()
}

fn maps(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps")
}

/// Moves a tree, with further attempts while a thread is interrupted just where a jump must be patched: such a move is
/// refused and the program runs on.
fn move_at_last(root: i32, from: &Host, to: &Host) -> Tree {
    for _ in 0..TRIES {
        match moving::migrate(Tree::original(root, from), to) {
            Err(Error::Refused(why)) if why.ends_with("try again") => eprintln!("{why}"),
            other => return other.expect("moves"),
        }
    }
    panic!("it never moves")
}
