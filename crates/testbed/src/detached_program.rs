//! Programs in hosts of a lab that outlive the command that starts them, as services of a host do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use holdfast_lab::Lab;

/// Shell script that starts a program in a session of its own, with only its output open, so that the program outlives
/// the shell.
const START_SCRIPT: &str = "exec 3>&- 4>&-; (echo $BASHPID >$0/pid; for fd in /proc/self/fd/*; do n=${fd##*/}; \
                     [ $n -gt 2 ] && eval \"exec $n>&-\"; done; exec setsid env \"$@\") \
                     </dev/null >$0/log 2>&1 &";

/// Time limit for the start of a program; the machine may be very busy.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two checks for the PID of a program.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Starts a program in a host, and returns its PID there. `words` are arguments of `env`. `folder` is the program's
/// working directory and must have no program yet; the files `pid` and `log` in it have the PID and the output.
///
/// # Errors
/// There is no such host, or the shell does not start.
pub fn start_detached(lab: &Lab, host: &str, folder: &Path, words: &[String]) -> Result<i32> {
    let mut command = lab.command(host)?;
    command
        .args(["bash", "-c", START_SCRIPT])
        .arg(folder)
        .args(words);
    command.current_dir(folder).stdin(Stdio::null());
    let status = command.status()?;
    ensure!(status.success(), "cannot start the program: {status}");
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let text = fs::read_to_string(folder.join("pid")).unwrap_or_default();
        if let Ok(pid) = text.trim().parse() {
            return Ok(pid);
        }
        ensure!(
            Instant::now() < deadline,
            "exceeded time: the program does not start"
        );
        sleep(POLL_INTERVAL);
    }
}

/// Returns the path of the output of a program that was started in this folder.
#[must_use]
pub fn output_path(folder: &Path) -> PathBuf {
    folder.join("log")
}
