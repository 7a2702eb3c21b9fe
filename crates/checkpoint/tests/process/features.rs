//! One small program per feature of a process. Each is moved while it runs, and back while it is stopped; the program
//! must find its state unchanged, and procfs must show no difference either.

use crate::job_control;
use crate::migration::{self, Host, Tree};
use crate::program::Program;
use std::path::Path;
use std::sync::Mutex;

/// Number of programs that move at a time: a program waits more than it works.
const PARALLEL_PROGRAMS: usize = 4;
/// Environment variable with parts of names: only programs with such a name are moved.
const ONLY_VARIABLE: &str = "HOLDFAST_TEST_FEATURES";
/// Smallest number of programs that must have moved: a kernel lacks few of the features.
const MOVED_MIN: usize = 80;

#[test]
fn every_feature_moves() {
    let only = std::env::var(ONLY_VARIABLE).unwrap_or_default();
    let names = Mutex::new(feature_names(&only));
    let (moved, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL_PROGRAMS {
            scope.spawn(|| {
                while let Some(name) = take_next(&names) {
                    let started = std::time::Instant::now();
                    let outcome = std::panic::catch_unwind(|| move_there_and_back(&name));
                    eprintln!("{name}: {:?}", started.elapsed());
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
    assert!(failed.is_empty(), "features that failed: {failed:?}");
    let moved = moved.into_inner().expect("unspoilt").len();
    assert!(moved >= MOVED_MIN || !only.is_empty(), "only {moved} moved");
}

/// Returns the names of all programs that match `only`.
fn feature_names(only: &str) -> Vec<String> {
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

fn take_next(names: &Mutex<Vec<String>>) -> Option<String> {
    names.lock().expect("unspoilt").pop()
}

/// Moves a program to another host. A program that calls exec just now does not move, and is asked again.
fn first_move(program: &Program, here: &Host) -> Result<Tree, String> {
    let mut attempts_left = 5;
    loop {
        match migration::migrate(program.tree(here), &Host::new()) {
            Err(error) if attempts_left > 0 && error.to_string().contains("is calling exec") => {
                attempts_left -= 1;
            }
            outcome => return outcome.map_err(|error| error.to_string()),
        }
    }
}

/// Moves a program there and back. Returns false if this machine lacks a feature that the program needs.
fn move_there_and_back(name: &str) -> bool {
    let program = Program::start_feature(name);
    if let Some(missing_feature) = program.skipped() {
        eprintln!("{name}: this machine has no {missing_feature}");
        return false;
    }
    let here = Host::local();
    let moved =
        first_move(&program, &here).unwrap_or_else(|error| panic!("{name} does not move: {error}"));
    program.assert_runs_on();
    let already_stopped = job_control::stop_tree(moved.root);
    let back = migration::migrate(moved, &here.with_realtime())
        .unwrap_or_else(|error| panic!("{name} does not move back: {error}"));
    job_control::continue_tree(back.root, &already_stopped);
    program.assert_runs_on();
    program.assert_good_verdict(back);
    true
}
