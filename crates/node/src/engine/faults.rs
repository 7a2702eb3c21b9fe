//! For tests of what happens when a daemon dies, or is held up, at a given step of a handoff.
//!
//! Only where `HOLDFAST_TEST_FAULTS` is set: the file `fault` in the run directory then names a command, whether before
//! or after it, and what happens, once: `freeze after die`, `restore before pause 500` (milliseconds). `... with 8` at the
//! end waits for a command about at least so many flows.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_proto::handoff::Command;

/// Where in a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Nothing of it was done.
    Before,
    /// All of it was done, and nobody was told.
    After,
}

/// The fault to come, if this daemon is under test.
pub struct Faults {
    file: Option<PathBuf>,
}

impl Faults {
    /// Faults are taken from this directory, if the environment says so.
    pub fn new(run_dir: &Path) -> Self {
        let tested = std::env::var_os("HOLDFAST_TEST_FAULTS").is_some();
        Self {
            file: tested.then(|| run_dir.join("fault")),
        }
    }

    /// The daemon has come to this point with so many flows.
    pub fn at(&self, name: &str, moment: Moment, flows: usize) {
        let Some(file) = &self.file else { return };
        let Ok(text) = std::fs::read_to_string(file) else {
            return;
        };
        let mut words: Vec<&str> = text.split_whitespace().collect();
        if let [.., "with", least] = words[..] {
            if least.parse().is_ok_and(|least: usize| flows < least) {
                return;
            }
            words.truncate(words.len() - 2);
        }
        let here = if moment == Moment::Before {
            "before"
        } else {
            "after"
        };
        match words[..] {
            [command, when, "die"] if command == name && when == here => {
                let _ = std::fs::remove_file(file);
                tracing::warn!(name, ?moment, flows, "dying, for a test");
                let _ = rustix::process::kill_process(
                    rustix::process::getpid(),
                    rustix::process::Signal::KILL,
                );
            }
            [command, when, "pause", milliseconds] if command == name && when == here => {
                let _ = std::fs::remove_file(file);
                tracing::warn!(name, ?moment, flows, milliseconds, "pausing, for a test");
                std::thread::sleep(Duration::from_millis(milliseconds.parse().unwrap_or(0)));
            }
            _ => {}
        }
    }
}

/// The freeze that batches may be predicted to have, where a test says so: for batches larger than this machine would
/// make them.
pub fn freeze_max() -> Option<Duration> {
    let milliseconds = std::env::var("HOLDFAST_TEST_FREEZE_MS").ok()?;
    let freeze = Duration::from_millis(milliseconds.parse().ok()?);
    tracing::warn!(?freeze, "batches may freeze for so long, for a test");
    Some(freeze)
}

/// How many flows (or changes) a command is about.
pub fn count_of(command: &Command) -> usize {
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

/// The name a fault gives to a command.
pub fn name_of(command: &Command) -> &'static str {
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
