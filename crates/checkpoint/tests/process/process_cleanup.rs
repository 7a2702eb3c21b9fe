//! Ends all processes that a test has started, however the test ends.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Environment variables with the program's folder and the test run, set for every started process.
const FOLDER_VARIABLE: &str = "HOLDFAST_TEST_FOLDER";
const RUN_VARIABLE: &str = "HOLDFAST_TEST_RUN";
/// Name of a process that is not killed: it removes objects that outlive processes, and ends by itself
/// (`programs/blocked.c`).
const CLEANUP_PROCESS: &str = "keeper\n";

/// Marks a command with its folder and the test run.
pub fn mark_command(command: &mut Command, folder: &Path) {
    static WATCHDOG: OnceLock<(String, Child)> = OnceLock::new();
    let (run, _) = WATCHDOG.get_or_init(watchdog);
    command.env(FOLDER_VARIABLE, folder).env(RUN_VARIABLE, run);
}

/// Starts a shell that waits for the end of these tests, in whatever way, and kills the processes that are left.
fn watchdog() -> (String, Child) {
    let now = UNIX_EPOCH.elapsed().expect("a time");
    let run = format!("{}-{}", std::process::id(), now.as_nanos());
    let kill_script = "cat; for at in /proc/[0-9]*; do \
        grep -aqs \"$0\" $at/environ && kill -9 ${at#/proc/}; done";
    let shell = Command::new("setsid")
        .args(["sh", "-c", kill_script, &format!("{RUN_VARIABLE}={run}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    (run, shell)
}

/// Kills all processes that are marked with a folder.
pub fn kill_marked(folder: &Path) {
    let mark = format!("{FOLDER_VARIABLE}={}", folder.display());
    let started = Instant::now();
    loop {
        let remaining = marked_pids(mark.as_bytes());
        if remaining.is_empty() {
            return;
        }
        for pid in &remaining {
            // SAFETY: no pointers are passed; the process has the mark that only this test gives.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        if started.elapsed() > Duration::from_secs(30) {
            eprintln!("processes that do not end: {remaining:?}");
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn marked_pids(mark: &[u8]) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("readable").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_marked(*pid, mark)).collect()
}

fn is_marked(pid: i32, mark: &[u8]) -> bool {
    // The environment of an ended process cannot be read.
    let read = |name| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let environment = read("environ");
    environment
        .split(|byte| *byte == 0)
        .any(|word| word == mark)
        && read("comm") != CLEANUP_PROCESS.as_bytes()
}
