//! Priority for measured programs, so that the machine's other work does not disturb the results.

use std::io;
use std::process::{Command, Stdio};

use nix::unistd::gettid;

/// Command prefix for real-time scheduling.
const REALTIME_PREFIX: [&str; 3] = ["chrt", "--rr", "1"];
/// Command prefix for systems that do not allow real-time scheduling.
const NICE_PREFIX: [&str; 3] = ["nice", "-n", "-10"];

/// Returns a prefix for a program's command that gives the program priority over the machine's other work. A
/// client that waits for a processor acknowledges late, and its peer sends again after 4 ms.
pub fn priority_prefix(realtime: bool) -> [&'static str; 3] {
    let allowed = realtime
        && run_quietly(
            Command::new(REALTIME_PREFIX[0])
                .args(&REALTIME_PREFIX[1..])
                .arg("true"),
        )
        .is_ok();
    if allowed {
        REALTIME_PREFIX
    } else {
        NICE_PREFIX
    }
}

/// Gives the calling thread real-time priority, if allowed.
pub fn raise_thread_priority() {
    let thread = gettid().to_string();
    // Without the permission, the thread keeps its priority.
    let _ = run_quietly(Command::new("chrt").args(["--rr", "--pid", "1", &thread]));
}

fn run_quietly(command: &mut Command) -> io::Result<()> {
    let status = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}
