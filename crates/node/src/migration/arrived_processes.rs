//! Processes that were moved to this node and still run.

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_api::control::ResidentProcess;
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::ProcessRef;
use holdfast_checkpoint::procfs;
use holdfast_sys::cgroup::ControlGroups;
use serde::{Deserialize, Serialize};

/// Facts about a process known before it is restored.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProcessInfo {
    pub(super) name: String,
    /// Number of its earlier moves.
    pub(super) hops: u32,
    /// Control group made for the process.
    pub(super) group: Option<String>,
}

/// A process that was moved to this node and still runs.
#[derive(Debug, Serialize, Deserialize)]
struct ArrivedProcess {
    /// Init process of its PID namespace, which lives as long as the last process of the tree.
    restorer: ProcessRef,
    name: String,
    donor: String,
    move_count: u32,
    /// Control group made for the process.
    #[serde(default)]
    group: Option<String>,
    /// The restorer, while it is a child of this daemon.
    #[serde(skip)]
    child: Option<Restorer>,
}

impl ArrivedProcess {
    fn has_ended(&self) -> bool {
        match &self.child {
            Some(child) => child.has_ended(),
            None => !self.restorer.exists(),
        }
    }

    /// Returns the PID of the tree's root on this node.
    fn pid(&self) -> Option<i32> {
        procfs::children(self.restorer.pid).ok()?.first().copied()
    }
}

/// Processes that were moved to this node and still run; also written to a file for the next daemon.
pub(super) struct ArrivedProcesses {
    file: PathBuf,
    cgroups: ControlGroups,
    /// Control groups made for processes that are ending.
    ending_groups: Vec<String>,
    processes: Vec<ArrivedProcess>,
}

impl ArrivedProcesses {
    /// Loads the processes in an earlier daemon's file that still run.
    pub(super) fn open(file: PathBuf, groups: ControlGroups) -> ArrivedProcesses {
        let text = std::fs::read(&file).unwrap_or_default();
        let list = serde_json::from_slice(&text).unwrap_or_default();
        let mut arrived_processes = ArrivedProcesses {
            file,
            cgroups: groups,
            ending_groups: Vec::new(),
            processes: list,
        };
        arrived_processes.remove_ended();
        arrived_processes
    }

    /// Adds a process that has arrived.
    pub(super) fn add(
        &mut self,
        restorer: ProcessRef,
        child: Option<Restorer>,
        (info, donor): (ProcessInfo, String),
    ) {
        if child.is_none()
            && self
                .processes
                .iter()
                .any(|process| process.restorer == restorer)
        {
            return;
        }
        self.processes
            .retain(|process| process.restorer != restorer);
        self.processes.push(ArrivedProcess {
            restorer,
            name: info.name,
            donor,
            move_count: info.hops + 1,
            group: info.group,
            child,
        });
        self.write_file();
    }

    /// Removes the processes that have ended.
    pub(super) fn remove_ended(&mut self) {
        let ended: Vec<ArrivedProcess> = self
            .processes
            .extract_if(.., |process| process.has_ended())
            .collect();
        self.ending_groups
            .extend(ended.iter().filter_map(|process| process.group.clone()));
        self.ending_groups
            .retain(|group| !self.cgroups.remove(group));
        if !ended.is_empty() {
            self.write_file();
        }
    }

    /// Removes a group made for a process that was given up, once its processes have ended.
    pub(super) fn remove_group_later(&mut self, group: String) {
        self.ending_groups.push(group);
        self.remove_ended();
    }

    /// Returns the PIDs of the restorers, the parents of the processes.
    pub(super) fn restorers(&self) -> BTreeSet<i32> {
        self.processes
            .iter()
            .map(|process| process.restorer.pid)
            .collect()
    }

    /// Returns the number of moves of a process.
    pub(super) fn move_count(&self, pid: i32) -> u32 {
        let found = self
            .processes
            .iter()
            .find(|process| process.pid() == Some(pid));
        found.map_or(0, |process| process.move_count)
    }

    /// Returns the processes for the operator.
    pub(super) fn list(&self) -> Vec<ResidentProcess> {
        let processes = self.processes.iter();
        processes
            .filter_map(|process| {
                Some(ResidentProcess {
                    pid: process.pid()?,
                    name: process.name.clone(),
                    from: process.donor.clone(),
                    moves: process.move_count,
                })
            })
            .collect()
    }

    fn write_file(&self) {
        let new_file = self.file.with_extension("next");
        let written = serde_json::to_vec(&self.processes)
            .map_err(std::io::Error::other)
            .and_then(|text| std::fs::write(&new_file, text))
            .and_then(|()| std::fs::rename(&new_file, &self.file));
        if let Err(error) = written {
            let file = self.file.display();
            tracing::warn!(%file, %error, "cannot save the list of arrived processes, which a restart will lose");
        }
    }
}
