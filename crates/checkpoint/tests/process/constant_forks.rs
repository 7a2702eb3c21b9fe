//! Trees whose processes come and go without a pause.

use crate::program::close_inherited_descriptors;
use holdfast_checkpoint::donor::TreeTracker;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// Shells that start one process after the other: some begin or end at any instant.
const FORKS: &str = "for shell in $(seq 24); do while :; do (:); done & done; wait";
const FREEZES: usize = 3;

/// The shells, in a process group of their own. Ended when dropped.
struct ForkingShells(Child);

impl Drop for ForkingShells {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// A freeze does not wait for an instant without a new process.
#[test]
fn tree_that_forks_without_pause_is_frozen() {
    let mut command = Command::new("sh");
    command.args(["-c", FORKS]).process_group(0);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    close_inherited_descriptors(&mut command);
    let shells = ForkingShells(command.spawn().expect("a shell"));
    let mut tracker = TreeTracker::start(shells.0.id() as i32).expect("tracked");
    for _ in 0..FREEZES {
        let stopped = tracker.freeze().map_err(|failure| failure.error);
        tracker = stopped.expect("frozen").thaw().expect("thawed");
    }
    tracker.stop_tracking().expect("no longer tracked");
}
