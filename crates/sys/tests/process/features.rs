//! One small program per feature of a process. Each is moved while it runs, and back while it is stopped; the program
//! must find its state unchanged, and procfs must show no difference either.

use crate::moving::{self, Host};
use crate::program::Program;
use crate::same;
use std::path::Path;
use std::sync::Mutex;

/// Number of programs that move at a time: a program waits more than it works.
const AT_A_TIME: usize = 4;
/// Environment variable with parts of names: only programs with such a name are moved.
const ONLY: &str = "HOLDFAST_TEST_FEATURES";
/// Smallest number of programs that must have moved: a kernel lacks few of the features.
const FEWEST: usize = 80;

#[test]
fn every_feature_moves() {
    let only = std::env::var(ONLY).unwrap_or_default();
    let names = Mutex::new(features(&only));
    let (moved, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(name) = next(&names) {
                    let began = std::time::Instant::now();
                    let outcome = std::panic::catch_unwind(|| there_and_back(&name));
                    eprintln!("{name}: {:?}", began.elapsed());
                    match outcome {
                        Ok(true) => moved.lock().expect("unspoilt").push(name),
                        Ok(false) => {}
                        Err(_) => failed.lock().expect("unspoilt").push(name),
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("unspoilt");
    assert!(failed.is_empty(), "these came out wrong: {failed:?}");
    let moved = moved.into_inner().expect("unspoilt").len();
    assert!(moved >= FEWEST || !only.is_empty(), "only {moved} moved");
}

/// Returns the names of all programs that match `only`.
fn features(only: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/process/features");
    let entries = std::fs::read_dir(folder).expect("readable").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names
        .filter_map(|name| name.strip_suffix(".c").map(str::to_owned))
        .filter(|name| only.split(',').any(|part| name.contains(part)))
        .collect();
    names.sort_unstable();
    names
}

fn next(names: &Mutex<Vec<String>>) -> Option<String> {
    names.lock().expect("unspoilt").pop()
}

/// Moves a program there and back. Returns false if this machine lacks a feature that the program needs.
fn there_and_back(name: &str) -> bool {
    let program = Program::start_feature(name);
    if let Some(why) = program.skipped() {
        eprintln!("{name}: this machine has no {why}");
        return false;
    }
    let here = Host::own();
    let moved = moving::migrate(program.tree(&here), &Host::new())
        .unwrap_or_else(|error| panic!("{name} does not move: {error}"));
    program.goes_on();
    let stood = same::stop(moved.root);
    let back = moving::migrate(moved, &here.in_a_hurry())
        .unwrap_or_else(|error| panic!("{name} does not move back: {error}"));
    same::go_on(back.root, &stood);
    program.goes_on();
    program.ends_well(back);
    true
}
