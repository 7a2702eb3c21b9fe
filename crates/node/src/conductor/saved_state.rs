//! State of the conductor that outlives the daemon. The run directory, which a reboot empties, has the drain and the past of
//! processes; the state directory has the operator's wish whether the node balances loads.

use std::io;
use std::path::PathBuf;

use holdfast_daemon::private_files::{private_directory, replace_file};
use holdfast_wire::conductor_frames::{PastMove, ProcessKey};
use serde::{Deserialize, Serialize};

use super::process_rules::ProcessPin;
use crate::config::Config;

/// State in the run directory. Times are seconds of the host's monotonic clock, which no daemon resets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedState {
    /// The drain of this node, if one is wanted.
    #[serde(default)]
    pub drain: Option<SavedDrain>,
    /// Time at which the histories were written.
    #[serde(default)]
    pub written_at_s: u64,
    /// Past moves of processes.
    #[serde(default)]
    pub histories: Vec<(ProcessKey, Vec<PastMove>)>,
    /// Keys of processes that have moved here.
    #[serde(default)]
    pub arrived: Vec<ArrivedKey>,
    /// Pins that the operator has set.
    #[serde(default)]
    pub pins: Vec<ProcessPin>,
}

/// A drain of this node, as the conductor saves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedDrain {
    /// Time at which the drain ends, if it has a deadline.
    pub deadline_s: Option<u64>,
}

/// Key of a process that has moved here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArrivedKey {
    /// PID of the root of the tree.
    pub pid: i32,
    /// Start of the root in ticks since boot.
    pub started_ticks: u64,
    /// The key, which the process had at its former node.
    pub key: ProcessKey,
}

/// The operator's wish whether this node balances loads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct BalancingWish {
    on: bool,
}

/// Files in which the conductor's state outlives the daemon.
#[derive(Debug)]
pub(super) struct StateFiles {
    run_file: PathBuf,
    state_dir: PathBuf,
}

impl StateFiles {
    /// Returns the files of this node, which may not exist yet.
    pub fn new(config: &Config) -> StateFiles {
        StateFiles {
            run_file: config.node.run_dir.join("conductor.json"),
            state_dir: config.node.state_dir.clone(),
        }
    }

    /// Returns the saved state; the default if there is none, or it cannot be read.
    pub fn read(&self, now_s: u64) -> SavedState {
        let bytes = std::fs::read(&self.run_file).unwrap_or_default();
        let mut state: SavedState = serde_json::from_slice(&bytes).unwrap_or_default();
        let elapsed = now_s.saturating_sub(state.written_at_s);
        let elapsed = u32::try_from(elapsed).unwrap_or(u32::MAX);
        for past in state.histories.iter_mut().flat_map(|(_, past)| past) {
            past.age_s = past.age_s.saturating_add(elapsed);
        }
        state
    }

    /// Writes the conductor's state to its file in the run directory.
    ///
    /// # Errors
    /// The run directory cannot be written.
    pub fn write(&self, state: &SavedState) -> io::Result<()> {
        let bytes = serde_json::to_vec(state).map_err(io::Error::other)?;
        replace_file(&self.run_file, &bytes)
    }

    /// Returns true if the operator wants this node to balance loads.
    pub fn is_balancing(&self) -> bool {
        let bytes = std::fs::read(self.wish_file()).unwrap_or_default();
        let wish: BalancingWish = serde_json::from_slice(&bytes).unwrap_or_default();
        wish.on
    }

    /// Writes the operator's wish whether this node balances loads.
    ///
    /// # Errors
    /// The state directory cannot be written.
    pub fn set_balancing(&self, on: bool) -> io::Result<()> {
        private_directory(&self.state_dir)?;
        let bytes = serde_json::to_vec(&BalancingWish { on }).map_err(io::Error::other)?;
        replace_file(&self.wish_file(), &bytes)
    }

    fn wish_file(&self) -> PathBuf {
        self.state_dir.join("balancing.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::NodeId;

    fn files(directory: &std::path::Path) -> StateFiles {
        StateFiles {
            run_file: directory.join("conductor.json"),
            state_dir: directory.join("state"),
        }
    }

    #[test]
    fn state_is_read_with_its_present_age() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path());
        assert_eq!(files.read(5), SavedState::default());
        let past = PastMove {
            from: NodeId(2),
            age_s: 7,
        };
        let state = SavedState {
            drain: Some(SavedDrain {
                deadline_s: Some(900),
            }),
            written_at_s: 100,
            histories: vec![(ProcessKey(1), vec![past])],
            arrived: vec![ArrivedKey {
                pid: 42,
                started_ticks: 9,
                key: ProcessKey(1),
            }],
            pins: vec![ProcessPin {
                pid: 42,
                started_ticks: 9,
                is_pinned: true,
            }],
        };
        files.write(&state).unwrap();
        let read = files.read(130);
        assert_eq!(read.histories[0].1[0].age_s, 37);
        assert_eq!(
            (read.drain, read.arrived, read.pins),
            (state.drain, state.arrived, state.pins)
        );
        std::fs::write(&files.run_file, b"{\"drain\": 3}").unwrap();
        assert_eq!(files.read(5), SavedState::default());
    }

    #[test]
    fn balancing_is_off_until_the_operator_wants_it() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path());
        assert!(!files.is_balancing());
        files.set_balancing(true).unwrap();
        assert!(files.is_balancing());
        files.set_balancing(false).unwrap();
        assert!(!files.is_balancing());
    }
}
