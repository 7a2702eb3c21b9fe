//! Records of moves, for a later daemon: a file for each move and role below the run directory (in memory, on a usual
//! host), with one entry a line.
//!
//! A stopped process outlives its daemon ([`RecordEntry::HeldProcesses`]), and so does a complete process at
//! its acceptor. The record and the holder's answer decide the fate of both.

use std::io::Write;
use std::path::{Path, PathBuf};

use holdfast_checkpoint::donor::{LockHandover, ProcessRef};
use holdfast_daemon::private_files::{self, private_directory};
use holdfast_proto::migration::{ProcessId, RecoveredMove, RecoveredMoveRole};
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::failure::{Failure, OperatorFault, SystemError, Text};
use holdfast_wire::move_frames::{DonorFlowEpoch, PeerConnections};
use holdfast_wire::{MoveId, NodeId};
use serde::{Deserialize, Serialize};

/// An entry of a record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum RecordEntry {
    /// This node is the donor of a process.
    Donor {
        process: u64,
        name: String,
        to: NodeId,
        clone: bool,
        hops: u32,
    },
    /// From this entry on the process's flows may be diverted.
    MayDivert {
        flows: Vec<DonorFlowEpoch>,
        peers: Vec<PeerConnections>,
    },
    /// From this entry on the process may be stopped.
    MayFreeze,
    /// Processes with remaining pages to send, by index in the tree.
    PostcopyPids(Vec<Option<i32>>),
    /// The process is held; its state may have been sent.
    HeldProcesses(Vec<ProcessRef>),
    /// Locks that the process may lack, because they are being handed over to the acceptor.
    GivenLocks(Vec<LockHandover>),
    /// This node is the acceptor of a process.
    Acceptor {
        name: String,
        hops: u32,
        /// Control group made for the process.
        #[serde(default)]
        group: Option<String>,
    },
    /// The restorer of the process.
    Restorer(ProcessRef),
    /// State that the process's connections need before they resume.
    UnfinishedConnections(Vec<(TcpStaticState, TcpDynamicState)>),
    /// Packets of these flows are held for the process.
    ArmedFlows(Vec<DonorFlowEpoch>),
    /// The process is complete; the commit may have been requested.
    Restored {
        /// `None` if equal to the armed flows: writing them takes time, during which the process is stopped.
        flows: Option<Vec<DonorFlowEpoch>>,
        peers: Vec<PeerConnections>,
    },
    /// The holder has committed the process.
    Committed,
    /// The process runs.
    Running,
}

/// Role of this node in a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveRole {
    Donor,
    Acceptor,
}

/// Directory of all records.
pub(super) struct MoveRecords {
    directory: PathBuf,
}

/// Record of one move; several threads may write to it.
#[derive(Debug, Clone)]
pub(super) struct MoveRecord {
    path: PathBuf,
}

impl MoveRecords {
    /// Opens or creates the directory, which only this user can read.
    pub(super) fn open(run_dir: &Path) -> std::io::Result<MoveRecords> {
        let directory = run_dir.join("moves");
        private_directory(&directory)?;
        Ok(MoveRecords { directory })
    }

    /// Returns the record of a move and role, whether it exists or not.
    pub(super) fn record_of(&self, id: MoveId, role: MoveRole) -> MoveRecord {
        let role = match role {
            MoveRole::Donor => "gives",
            MoveRole::Acceptor => "takes",
        };
        MoveRecord {
            path: self.directory.join(format!("{id}.{role}")),
        }
    }

    /// Returns the socket at which a restorer waits for a later daemon.
    pub(super) fn adoption_socket(&self, id: MoveId) -> PathBuf {
        self.directory.join(format!("{id}.sock"))
    }

    /// Returns the file that lists the processes moved here.
    pub(super) fn residents_file(&self) -> PathBuf {
        self.directory.join("residents.json")
    }

    /// Returns the moves in an earlier daemon's records.
    pub(super) fn recovered_moves(&self) -> Vec<RecoveredMove> {
        let files = std::fs::read_dir(&self.directory).into_iter().flatten();
        let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
        let mut moves: Vec<RecoveredMove> =
            names.filter_map(|name| self.recover_move(&name)).collect();
        moves.sort_by_key(|recovered| recovered.id);
        moves
    }

    fn recover_move(&self, name: &str) -> Option<RecoveredMove> {
        let (id, role) = name.rsplit_once('.')?;
        let id: MoveId = id.parse().ok()?;
        let role = match role {
            "gives" => MoveRole::Donor,
            "takes" => MoveRole::Acceptor,
            _ => return None,
        };
        let record = self.record_of(id, role);
        let recovered = to_recovered_move(id, &record.read());
        if recovered.is_none() {
            // The first line is incomplete, so the move had not begun.
            record.remove();
        }
        recovered
    }
}

/// Summarizes a record for the machine.
fn to_recovered_move(id: MoveId, entries: &[RecordEntry]) -> Option<RecoveredMove> {
    let noted = entries.iter().rev().find_map(|entry| match entry {
        RecordEntry::MayDivert { flows, peers } => Some((flows.clone(), peers.clone())),
        _ => None,
    });
    let restored = entries.iter().rev().find_map(|entry| match entry {
        RecordEntry::Restored { flows, peers } => {
            let flows = flows.clone().unwrap_or_else(|| armed_flows(entries));
            Some((flows, peers.clone()))
        }
        _ => None,
    });
    let has_entry = |is_wanted: fn(&RecordEntry) -> bool| entries.iter().any(is_wanted);
    match entries.first()? {
        RecordEntry::Donor {
            process,
            to,
            clone,
            hops,
            ..
        } => Some(RecoveredMove {
            id,
            hops: *hops,
            role: RecoveredMoveRole::Donor {
                process: ProcessId(*process),
                to: *to,
                clone: *clone,
                saved_flows: noted,
                maybe_stopped: has_entry(|entry| matches!(entry, RecordEntry::MayFreeze)),
            },
        }),
        RecordEntry::Acceptor { hops, .. } => Some(RecoveredMove {
            id,
            hops: *hops,
            role: RecoveredMoveRole::Acceptor {
                restored,
                committed: has_entry(|entry| matches!(entry, RecordEntry::Committed)),
                resumed: has_entry(|entry| matches!(entry, RecordEntry::Running)),
            },
        }),
        _ => None,
    }
}

/// Returns all flows whose packets are held.
fn armed_flows(entries: &[RecordEntry]) -> Vec<DonorFlowEpoch> {
    let parts = entries.iter().filter_map(|entry| match entry {
        RecordEntry::ArmedFlows(flows) => Some(flows),
        _ => None,
    });
    parts.flatten().copied().collect()
}

impl MoveRecord {
    /// Appends an entry to the move's record on the disk.
    pub(super) fn write(&self, entry: &RecordEntry) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(entry)
            .map_err(|error| self.write_failure(SystemError::Text(Text::of(error))))?;
        line.push(b'\n');
        private_files::private_options()
            .create(true)
            .append(true)
            .open(&self.path)
            .and_then(|mut file| file.write_all(&line))
            .map_err(|error| self.write_failure((&error).into()))
    }

    /// Replaces all entries of the move's record at once.
    pub(super) fn replace(&self, entries: &[RecordEntry]) -> Result<(), Failure> {
        let replacement = MoveRecord {
            path: self.path.with_extension("next"),
        };
        replacement.remove();
        for entry in entries {
            replacement.write(entry)?;
        }
        std::fs::rename(&replacement.path, &self.path)
            .map_err(|error| self.write_failure((&error).into()))
    }

    /// Returns all complete entries of the move's record.
    pub(super) fn read(&self) -> Vec<RecordEntry> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        text.lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Removes the file of the move's record.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }

    fn write_failure(&self, error: SystemError) -> Failure {
        let path = Text::of(self.path.display());
        OperatorFault::RecordNotWritten { path, error }.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected_roles(flows: Vec<DonorFlowEpoch>) -> [RecoveredMoveRole; 3] {
        [
            RecoveredMoveRole::Donor {
                process: ProcessId(4242),
                to: NodeId(2),
                clone: false,
                saved_flows: Some((flows.clone(), Vec::new())),
                maybe_stopped: true,
            },
            RecoveredMoveRole::Acceptor {
                restored: None,
                committed: false,
                resumed: false,
            },
            RecoveredMoveRole::Acceptor {
                restored: Some((flows, Vec::new())),
                committed: false,
                resumed: false,
            },
        ]
    }

    fn acceptor_entry() -> RecordEntry {
        RecordEntry::Acceptor {
            name: "game".to_owned(),
            hops: 0,
            group: None,
        }
    }

    #[test]
    fn written_records_are_recovered() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = MoveRecords::open(directory.path()).expect("records");
        let id = |seq| MoveId {
            donor: NodeId(1),
            boot: 2,
            seq,
        };
        let donor_record = records.record_of(id(1), MoveRole::Donor);
        let flow = "udp:10.0.0.1:7-10.0.1.2:4242".parse().expect("a flow");
        let flows = vec![DonorFlowEpoch { flow, epoch: 5 }];
        let donor_entry = RecordEntry::Donor {
            process: 4242,
            name: "game".into(),
            to: NodeId(2),
            clone: false,
            hops: 3,
        };
        let may_divert = RecordEntry::MayDivert {
            flows: flows.clone(),
            peers: Vec::new(),
        };
        for entry in [donor_entry, may_divert, RecordEntry::MayFreeze] {
            donor_record.write(&entry).expect("written");
        }
        let acceptor_record = records.record_of(id(2), MoveRole::Acceptor);
        acceptor_record.write(&acceptor_entry()).expect("written");
        let restored_record = records.record_of(id(4), MoveRole::Acceptor);
        let restored = RecordEntry::Restored {
            flows: None,
            peers: Vec::new(),
        };
        for entry in [
            acceptor_entry(),
            RecordEntry::ArmedFlows(flows.clone()),
            restored,
        ] {
            restored_record.write(&entry).expect("written");
        }
        // A daemon that died while writing its first line had begun nothing.
        let truncated_record = records.record_of(id(3), MoveRole::Acceptor);
        std::fs::write(&truncated_record.path, "{\"Takes\":{\"na").expect("written");

        let found = MoveRecords::open(directory.path())
            .expect("records")
            .recovered_moves();
        let expected = expected_roles(flows);
        let roles: Vec<&RecoveredMoveRole> =
            found.iter().map(|recovered| &recovered.role).collect();
        assert_eq!(roles, expected.iter().collect::<Vec<_>>());
        assert_eq!(found[0].hops, 3);
        assert!(!truncated_record.path.exists());
        donor_record.remove();
        acceptor_record.remove();
        restored_record.remove();
        assert_eq!(records.recovered_moves(), []);
    }
}
