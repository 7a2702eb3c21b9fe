//! Commands whose reader has closed its end of the pipe, and a full disk.

use std::fs::File;
use std::io::pipe;
use std::process::{Command, Output, Stdio};

/// Runs `holdfast` with its output into `stdout`.
fn run(words: &str, stdout: impl Into<Stdio>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(words.split(' '))
        .stdout(stdout)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(|child| child.wait_with_output())
        .expect("holdfast runs")
}

/// Runs `holdfast` with a pipe that nobody reads.
fn run_into_closed_pipe(words: &str) -> (Option<i32>, String) {
    let (reader, writer) = pipe().expect("a pipe");
    drop(reader);
    let output = run(words, writer);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), errors)
}

#[test]
fn closed_pipe_is_no_error() {
    for words in ["sim list", "completions bash"] {
        assert_eq!(
            run_into_closed_pipe(words),
            (Some(0), String::new()),
            "{words}"
        );
    }
}

#[test]
fn closed_pipe_hides_no_failure() {
    let (code, errors) =
        run_into_closed_pipe("sim seeds --count 20 --bug freeze-keeps-sending handoff");
    assert_eq!(code, Some(1), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn full_disk_is_an_error() {
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let output = run("sim list", full);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("cannot write the output"), "{errors}");
}
