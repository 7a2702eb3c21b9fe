//! Trees that change without a pause.

use crate::program::close_inherited_descriptors;
use holdfast_checkpoint::donor::TreeTracker;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// Shells that start one process after the other: some begin or end at any instant.
const FORKS: &str = "for shell in $(seq 24); do while :; do (:); done & done; wait";
/// Shells that replace themselves all the time.
const EXECS: &str = r#"
    again='exec sh -c "$0" "$0"'
    for shell in $(seq 12); do sh -c "$again" "$again" & done
    wait"#;
const FREEZES: usize = 3;

/// The shells, in a process group of their own. Ended when dropped.
struct RestlessShells(Child);

impl RestlessShells {
    fn start(script: &str) -> RestlessShells {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        close_inherited_descriptors(&mut command);
        RestlessShells(command.spawn().expect("a shell"))
    }

    fn freeze_and_thaw(&self) {
        let mut tracker = TreeTracker::start(self.0.id() as i32).expect("tracked");
        for _ in 0..FREEZES {
            let stopped = tracker.freeze().map_err(|failure| failure.error);
            tracker = stopped.expect("frozen").thaw().expect("thawed");
        }
        tracker.stop_tracking().expect("no longer tracked");
    }
}

impl Drop for RestlessShells {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// A freeze does not wait for an instant at which no process begins or ends.
#[test]
fn tree_that_forks_without_pause_is_frozen() {
    RestlessShells::start(FORKS).freeze_and_thaw();
}

/// A process that has replaced itself is attached to again while others stay stopped.
#[test]
fn tree_that_calls_exec_without_pause_is_frozen() {
    RestlessShells::start(EXECS).freeze_and_thaw();
}
