//! Keeping the machine's other work out of what is seen.

use std::io;
use std::process::{Command, Stdio};

use nix::unistd::gettid;

/// Runs at once whenever it can.
const REALTIME: [&str; 3] = ["chrt", "--rr", "1"];
/// Where real-time scheduling is not allowed.
const NICE: [&str; 3] = ["nice", "-n", "-10"];

/// What to put before a program's command, so that it is not kept waiting by what else the machine does. A client that
/// waits for its turn acknowledges late, and 4 ms later its peer sends again.
pub fn prefix(realtime: bool) -> [&'static str; 3] {
    let allowed =
        realtime && quiet(Command::new(REALTIME[0]).args(&REALTIME[1..]).arg("true")).is_ok();
    if allowed { REALTIME } else { NICE }
}

/// The same for the calling thread, as far as it is allowed.
pub fn hurry_thread() {
    let thread = gettid().to_string();
    // Where it is not allowed, the thread is as good as it was.
    let _ = quiet(Command::new("chrt").args(["--rr", "--pid", "1", &thread]));
}

fn quiet(command: &mut Command) -> io::Result<()> {
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
