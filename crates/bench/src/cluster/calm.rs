//! Keeping the machine's other work, and its two ways of disturbing packets, out of what is seen.

use std::io;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use holdfast_lab::Lab;
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

/// Makes every packet of a connection be received by the same CPU (receive packet steering). Otherwise a virtual link
/// reorders: what a sender's thread and its interrupts send is queued at the CPU each runs on.
///
/// # Errors
/// A host of the lab is gone.
pub fn keep_order(lab: &Lab) -> Result<()> {
    let cpus = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(32);
    let mask = u32::MAX >> (32 - cpus);
    let script = format!(
        "for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo {mask:x} > $queue; done"
    );
    let hosts = lab.hosts().iter().map(|host| host.name.as_str());
    for host in hosts.chain(["sw"]) {
        let status = lab.command(host)?.args(["sh", "-c", &script]).status()?;
        ensure!(
            status.success(),
            "receive packet steering on {host}: {status}"
        );
    }
    Ok(())
}
