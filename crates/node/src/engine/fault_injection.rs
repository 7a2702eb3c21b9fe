//! Fault injection, for tests of a daemon that dies or pauses at a given step of a handoff, and other settings of tests.
//!
//! Builds without the feature `test-faults`, as released ones, have none of this. Active only if the environment variable
//! `HOLDFAST_TEST_FAULTS` is set. The file `fault` in the run directory names a command, `before` or
//! `after`, and an action, which happens once: `freeze after die`, `restore before pause 500` (milliseconds). A final
//! `with 8` limits the fault to commands about at least 8 flows.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_proto::handoff::Command;

/// Time of a fault relative to its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectionPoint {
    /// The fault precedes every part of the command.
    Before,
    /// After the whole command, but before its completion is reported.
    After,
}

/// The pending fault of a daemon under test.
pub struct FaultInjector {
    file: Option<PathBuf>,
}

impl FaultInjector {
    /// Reads faults from this directory if the environment variable is set.
    pub fn new(run_dir: &Path) -> Self {
        let is_enabled = test_setting("HOLDFAST_TEST_FAULTS").is_some();
        Self {
            file: is_enabled.then(|| run_dir.join("fault")),
        }
    }

    /// Triggers the fault if the file names this point and at most this number of flows.
    pub fn inject_if_due(&self, name: &str, point: InjectionPoint, flows: usize) {
        let Some(file) = &self.file else { return };
        let Ok(text) = std::fs::read_to_string(file) else {
            return;
        };
        let mut words: Vec<&str> = text.split_whitespace().collect();
        if let [.., "with", min_flows] = words[..] {
            if min_flows.parse().is_ok_and(|least: usize| flows < least) {
                return;
            }
            words.truncate(words.len() - 2);
        }
        let time_name = if point == InjectionPoint::Before {
            "before"
        } else {
            "after"
        };
        match words[..] {
            [command, when, "die"] if command == name && when == time_name => {
                let _ = std::fs::remove_file(file);
                tracing::warn!(name, ?point, flows, "dying, for a test");
                let _ = rustix::process::kill_process(
                    rustix::process::getpid(),
                    rustix::process::Signal::KILL,
                );
            }
            [command, when, "pause", milliseconds] if command == name && when == time_name => {
                let _ = std::fs::remove_file(file);
                tracing::warn!(name, ?point, flows, milliseconds, "pausing, for a test");
                std::thread::sleep(Duration::from_millis(milliseconds.parse().unwrap_or(0)));
            }
            _ => {}
        }
    }
}

/// Fails if the environment variable `HOLDFAST_TEST_FAIL_START` names this step of a start.
///
/// # Errors
/// The failure that a test wants.
pub fn fail_start_if_due(step: &str) -> std::io::Result<()> {
    match test_setting("HOLDFAST_TEST_FAIL_START") {
        Some(wanted) if wanted == step => {
            let text = format!("a test makes the start fail at `{step}`");
            Err(std::io::Error::other(text))
        }
        _ => Ok(()),
    }
}

/// Returns the predicted freeze limit that a test sets, which allows larger batches than this machine would otherwise
/// form.
pub fn test_freeze_max() -> Option<Duration> {
    let milliseconds = test_setting("HOLDFAST_TEST_FREEZE_MS")?;
    let freeze = Duration::from_millis(milliseconds.parse().ok()?);
    tracing::warn!(?freeze, "a test overrides the freeze limit of batches");
    Some(freeze)
}

/// Returns the number of ticks by which a test shifts the TCP timestamp clocks of connections that leave this node, for
/// handoffs between hosts with different clocks.
pub fn test_clock_shift() -> Option<u32> {
    let ticks = test_setting("HOLDFAST_TEST_CLOCK_SHIFT")?.parse().ok()?;
    tracing::warn!(
        ticks,
        "a test shifts the TCP timestamp clocks of connections that leave this node"
    );
    Some(ticks)
}

/// Returns true if a test gives the daemon the views of the group by control requests.
pub fn test_views() -> bool {
    test_setting("HOLDFAST_TEST_VIEWS").is_some()
}

/// Returns an environment variable of a test; `None` in a build without the feature `test-faults`.
fn test_setting(name: &str) -> Option<String> {
    if cfg!(feature = "test-faults") {
        std::env::var(name).ok()
    } else {
        None
    }
}

/// Returns the number of flows (or changes) in a command.
pub fn flow_count(command: &Command) -> usize {
    match command {
        Command::ReadStatic { flows, .. }
        | Command::Drain { flows, .. }
        | Command::Discard { flows, .. }
        | Command::Lookup { flows, .. } => flows.len(),
        Command::Freeze { flows, .. }
        | Command::Resume { flows, .. }
        | Command::Close { flows, .. }
        | Command::Activate { flows, .. } => flows.len(),
        Command::PrepareSockets { flows, .. } => flows.len(),
        Command::Restore { flows, .. } => flows.len(),
        Command::Arbitrate { changes, .. } => changes.len(),
    }
}

/// Returns a command's name in the fault file.
pub fn command_name(command: &Command) -> &'static str {
    match command {
        Command::ReadStatic { .. } => "read",
        Command::Drain { .. } => "drain",
        Command::Freeze { .. } => "freeze",
        Command::Resume { .. } => "resume",
        Command::Close { .. } => "close",
        Command::PrepareSockets { .. } => "prepare",
        Command::Restore { .. } => "restore",
        Command::Activate { .. } => "activate",
        Command::Discard { .. } => "discard",
        Command::Arbitrate { .. } => "arbitrate",
        Command::Lookup { .. } => "lookup",
    }
}
