//! Records of moves, for a later daemon: a file for each move and role below the run directory (in memory, on a usual
//! host), with one entry a line.
//!
//! A stopped process outlives its daemon ([`holdfast_sys::process::donor::Held`]), and so does a complete process at
//! its acceptor. The record and the holder's answer decide the fate of both.

use std::io::Write;
use std::path::{Path, PathBuf};

use holdfast_proto::migration::{ProcessId, RecoveredMove, RecoveredRole};
use holdfast_sys::process::donor::{GivenLock, Held};
use holdfast_sys::tcp_repair::{TcpDynamic, TcpStatic};
use holdfast_wire::migration::{FlowAt, PeerConnections};
use holdfast_wire::{MoveId, NodeId};
use serde::{Deserialize, Serialize};

use crate::private_files::{self, private_directory};

/// An entry of a record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Entry {
    /// This node is the donor of a process.
    Gives {
        process: u64,
        name: String,
        to: NodeId,
        clone: bool,
        hops: u32,
    },
    /// From this entry on the process's flows may be diverted.
    Noted {
        flows: Vec<FlowAt>,
        peers: Vec<PeerConnections>,
    },
    /// From this entry on the process may be stopped.
    Freezes,
    /// Processes with remaining pages to send, by index in the tree.
    Follows(Vec<Option<i32>>),
    /// The process is held; its state may have been sent.
    Held(Vec<Held>),
    /// Locks that the process may lack, because they are being handed over to the acceptor.
    Locks(Vec<GivenLock>),
    /// This node is the acceptor of a process.
    Takes {
        name: String,
        hops: u32,
        /// Control group made for the process.
        #[serde(default)]
        group: Option<String>,
    },
    /// The restorer of the process.
    Restorer(Held),
    /// State that the process's connections need before they resume.
    Unfinished(Vec<(TcpStatic, TcpDynamic)>),
    /// Packets of these flows are held for the process.
    Armed(Vec<FlowAt>),
    /// The process is complete; the commit may have been requested.
    Restored {
        /// `None` if equal to the armed flows: writing them takes time, during which the process is stopped.
        flows: Option<Vec<FlowAt>>,
        peers: Vec<PeerConnections>,
    },
    /// The process runs.
    Runs,
}

/// Role of this node in a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Gives,
    Takes,
}

/// Directory of all records.
pub(super) struct Records {
    directory: PathBuf,
}

/// Record of one move; several threads may write to it.
#[derive(Debug, Clone)]
pub(super) struct Record {
    path: PathBuf,
}

impl Records {
    /// Opens or creates the directory, which only this user can read.
    pub(super) fn open(run_dir: &Path) -> std::io::Result<Records> {
        let directory = run_dir.join("moves");
        private_directory(&directory)?;
        Ok(Records { directory })
    }

    /// Returns the record of a move and role, whether it exists or not.
    pub(super) fn of(&self, id: MoveId, role: Role) -> Record {
        let role = match role {
            Role::Gives => "gives",
            Role::Takes => "takes",
        };
        Record {
            path: self.directory.join(format!("{id}.{role}")),
        }
    }

    /// Returns the socket at which a restorer waits for a later daemon.
    pub(super) fn way_back(&self, id: MoveId) -> PathBuf {
        self.directory.join(format!("{id}.sock"))
    }

    /// Returns the file that lists the processes moved here.
    pub(super) fn residents(&self) -> PathBuf {
        self.directory.join("residents.json")
    }

    /// Returns the moves in an earlier daemon's records.
    pub(super) fn found(&self) -> Vec<RecoveredMove> {
        let files = std::fs::read_dir(&self.directory).into_iter().flatten();
        let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
        let mut found: Vec<RecoveredMove> = names.filter_map(|name| self.recover(&name)).collect();
        found.sort_by_key(|of| of.id);
        found
    }

    fn recover(&self, name: &str) -> Option<RecoveredMove> {
        let (id, role) = name.rsplit_once('.')?;
        let id: MoveId = id.parse().ok()?;
        let role = match role {
            "gives" => Role::Gives,
            "takes" => Role::Takes,
            _ => return None,
        };
        let record = self.of(id, role);
        let recovered = recovered(id, &record.read());
        if recovered.is_none() {
            // The first line is incomplete, so the move had not begun.
            record.remove();
        }
        recovered
    }
}

/// Summarizes a record for the machine.
fn recovered(id: MoveId, entries: &[Entry]) -> Option<RecoveredMove> {
    let noted = entries.iter().rev().find_map(|entry| match entry {
        Entry::Noted { flows, peers } => Some((flows.clone(), peers.clone())),
        _ => None,
    });
    let restored = entries.iter().rev().find_map(|entry| match entry {
        Entry::Restored { flows, peers } => {
            let flows = flows.clone().unwrap_or_else(|| armed(entries));
            Some((flows, peers.clone()))
        }
        _ => None,
    });
    let has = |wanted: fn(&Entry) -> bool| entries.iter().any(wanted);
    match entries.first()? {
        Entry::Gives {
            process,
            to,
            clone,
            hops,
            ..
        } => Some(RecoveredMove {
            id,
            hops: *hops,
            role: RecoveredRole::Donor {
                process: ProcessId(*process),
                to: *to,
                clone: *clone,
                noted,
                frozen: has(|entry| matches!(entry, Entry::Freezes)),
            },
        }),
        Entry::Takes { hops, .. } => Some(RecoveredMove {
            id,
            hops: *hops,
            role: RecoveredRole::Acceptor {
                restored,
                gone: has(|entry| matches!(entry, Entry::Runs)),
            },
        }),
        _ => None,
    }
}

/// Returns all flows whose packets are held.
fn armed(entries: &[Entry]) -> Vec<FlowAt> {
    let parts = entries.iter().filter_map(|entry| match entry {
        Entry::Armed(flows) => Some(flows),
        _ => None,
    });
    parts.flatten().copied().collect()
}

impl Record {
    /// Appends an entry.
    pub(super) fn write(&self, entry: &Entry) -> Result<(), String> {
        let mut line = serde_json::to_vec(entry).map_err(|error| self.failed(&error))?;
        line.push(b'\n');
        private_files::options()
            .create(true)
            .append(true)
            .open(&self.path)
            .and_then(|mut file| file.write_all(&line))
            .map_err(|error| self.failed(&error))
    }

    /// Replaces all entries.
    pub(super) fn replace(&self, entries: &[Entry]) -> Result<(), String> {
        let next = Record {
            path: self.path.with_extension("next"),
        };
        next.remove();
        for entry in entries {
            next.write(entry)?;
        }
        std::fs::rename(&next.path, &self.path).map_err(|error| self.failed(&error))
    }

    /// Returns all complete entries.
    pub(super) fn read(&self) -> Vec<Entry> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        text.lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Removes the record.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> String {
        format!(
            "{}: {error}; free space in the run directory",
            self.path.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected_roles(flows: Vec<FlowAt>) -> [RecoveredRole; 3] {
        [
            RecoveredRole::Donor {
                process: ProcessId(4242),
                to: NodeId(2),
                clone: false,
                noted: Some((flows.clone(), Vec::new())),
                frozen: true,
            },
            RecoveredRole::Acceptor {
                restored: None,
                gone: false,
            },
            RecoveredRole::Acceptor {
                restored: Some((flows, Vec::new())),
                gone: false,
            },
        ]
    }

    fn takes_game() -> Entry {
        Entry::Takes {
            name: "game".to_owned(),
            hops: 0,
            group: None,
        }
    }

    #[test]
    fn what_is_written_down_is_found_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = Records::open(directory.path()).expect("records");
        let id = |seq| MoveId {
            donor: NodeId(1),
            boot: 2,
            seq,
        };
        let gives = records.of(id(1), Role::Gives);
        let flow = "udp:10.0.0.1:7-10.0.1.2:4242".parse().expect("a flow");
        let flows = vec![FlowAt { flow, epoch: 5 }];
        let began = Entry::Gives {
            process: 4242,
            name: "game".into(),
            to: NodeId(2),
            clone: false,
            hops: 3,
        };
        let noted = Entry::Noted {
            flows: flows.clone(),
            peers: Vec::new(),
        };
        for entry in [began, noted, Entry::Freezes] {
            gives.write(&entry).expect("written");
        }
        let takes = records.of(id(2), Role::Takes);
        takes.write(&takes_game()).expect("written");
        let whole = records.of(id(4), Role::Takes);
        let restored = Entry::Restored {
            flows: None,
            peers: Vec::new(),
        };
        for entry in [takes_game(), Entry::Armed(flows.clone()), restored] {
            whole.write(&entry).expect("written");
        }
        // A daemon that died while writing its first line had begun nothing.
        let cut_off = records.of(id(3), Role::Takes);
        std::fs::write(&cut_off.path, "{\"Takes\":{\"na").expect("written");

        let found = Records::open(directory.path()).expect("records").found();
        let expected = expected_roles(flows);
        let roles: Vec<&RecoveredRole> = found.iter().map(|of| &of.role).collect();
        assert_eq!(roles, expected.iter().collect::<Vec<_>>());
        assert_eq!(found[0].hops, 3);
        assert!(!cut_off.path.exists());
        gives.remove();
        takes.remove();
        whole.remove();
        assert_eq!(records.found(), []);
    }
}
