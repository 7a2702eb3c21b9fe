//! Programs that check themselves, moved while they run, there and back, between namespaces that the tests make.
#![cfg(target_arch = "x86_64")]

mod blockers;
mod faults;
mod features;
mod moving;
mod program;
mod same;

use holdfast_sys::process::donor::Tracker;
use moving::Host;
use program::Program;
use std::time::Duration;

/// Moves a program twice and asks it whether all is well.
fn there_and_back(source: &str) {
    let program = Program::start(source);
    let here = Host::own();
    let there = Host::new();
    let moved = moving::migrate(program.tree(&here), &there).expect("moves");
    program.goes_on();
    let back = moving::migrate(moved, &here).expect("moves back");
    program.goes_on();
    program.ends_well(back);
}

/// Moves a program once and ends it there.
fn ends_elsewhere(program: Program) {
    let moved = moving::migrate(program.tree(&Host::own()), &Host::new()).expect("moves");
    program.goes_on();
    program.ends_well(moved);
}

#[test]
fn memory_moves() {
    there_and_back("memory");
}

#[test]
fn threads_move() {
    there_and_back("threads");
}

#[test]
fn signals_move() {
    there_and_back("signals");
}

#[test]
fn timers_move() {
    there_and_back("timers");
}

#[test]
fn identity_moves() {
    there_and_back("identity");
}

#[test]
fn seccomp_moves() {
    there_and_back("seccomp");
}

#[test]
fn a_tree_moves() {
    there_and_back("tree");
}

/// Stopped and let go again and again, a program notices nothing.
#[test]
fn a_thawed_program_notices_nothing() {
    for source in ["calls", "threads", "signals", "tree", "seccomp"] {
        let program = Program::start(source);
        let tree = program.tree(&Host::own());
        let mut tracker = Tracker::start(tree.root).expect("starts");
        for _ in 0..30 {
            let stopped = tracker
                .freeze()
                .map_err(|unfrozen| unfrozen.error)
                .expect("stops");
            stopped.state().expect("state");
            tracker = stopped.thaw().expect("thaws");
            std::thread::sleep(Duration::from_millis(2));
        }
        let stopped = tracker
            .freeze()
            .map_err(|unfrozen| unfrozen.error)
            .expect("stops");
        stopped.roll_back().expect("rolls back");
        program.goes_on();
        assert!(!tree.has_traces(), "{source} has something of ours");
        program.ends_well(tree);
    }
}
