//! Programs that check themselves, moved while they run, there and back, between namespaces that the tests make.
#![cfg(target_arch = "x86_64")]

mod moving;
mod program;

use moving::Host;
use program::Program;

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

#[test]
fn memory_moves() {
    there_and_back("memory");
}
