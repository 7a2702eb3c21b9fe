//! Residents: processes that were moved to this node.

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_api::control::ResidentProcess;
use holdfast_sys::cgroup::Groups;
use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::donor::Held;
use holdfast_sys::process::procfs;
use serde::{Deserialize, Serialize};

/// Facts about a process known before it is restored.
#[derive(Debug, Clone, Default)]
pub(crate) struct Came {
    pub(super) name: String,
    /// Number of its earlier moves.
    pub(super) hops: u32,
    /// Control group made for the process.
    pub(super) group: Option<String>,
}

/// A resident that still runs.
#[derive(Debug, Serialize, Deserialize)]
struct Resident {
    /// Init process of its PID namespace, which lives as long as the last process of the tree.
    restorer: Held,
    name: String,
    from: String,
    moves: u32,
    /// Control group made for the process.
    #[serde(default)]
    group: Option<String>,
    /// The restorer, while it is a child of this daemon.
    #[serde(skip)]
    child: Option<Restorer>,
}

impl Resident {
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

/// All residents, also written to a file for the next daemon.
pub(super) struct Residents {
    file: PathBuf,
    groups: Groups,
    /// Control groups made for processes that are ending.
    left: Vec<String>,
    list: Vec<Resident>,
}

impl Residents {
    /// Loads an earlier daemon's residents that still run.
    pub(super) fn open(file: PathBuf, groups: Groups) -> Residents {
        let text = std::fs::read(&file).unwrap_or_default();
        let list = serde_json::from_slice(&text).unwrap_or_default();
        let mut residents = Residents {
            file,
            groups,
            left: Vec::new(),
            list,
        };
        residents.look();
        residents
    }

    /// Adds a resident.
    pub(super) fn came(
        &mut self,
        restorer: Held,
        child: Option<Restorer>,
        (came, from): (Came, String),
    ) {
        if child.is_none() && self.list.iter().any(|of| of.restorer == restorer) {
            return;
        }
        self.list.retain(|resident| resident.restorer != restorer);
        self.list.push(Resident {
            restorer,
            name: came.name,
            from,
            moves: came.hops + 1,
            group: came.group,
            child,
        });
        self.write();
    }

    /// Removes the residents that have ended.
    pub(super) fn look(&mut self) {
        let ended: Vec<Resident> = self.list.extract_if(.., |of| of.has_ended()).collect();
        self.left
            .extend(ended.iter().filter_map(|of| of.group.clone()));
        self.left.retain(|group| !self.groups.remove(group));
        if !ended.is_empty() {
            self.write();
        }
    }

    /// Removes a group made for a process that was given up, once its processes have ended.
    pub(super) fn leave(&mut self, group: String) {
        self.left.push(group);
        self.look();
    }

    /// Returns the PIDs of the restorers, the residents' parents.
    pub(super) fn restorers(&self) -> BTreeSet<i32> {
        self.list.iter().map(|of| of.restorer.pid).collect()
    }

    /// Returns the number of moves of a process.
    pub(super) fn moves_of(&self, pid: i32) -> u32 {
        let found = self.list.iter().find(|of| of.pid() == Some(pid));
        found.map_or(0, |resident| resident.moves)
    }

    /// Returns the residents for the operator.
    pub(super) fn list(&self) -> Vec<ResidentProcess> {
        let lives = self.list.iter();
        lives
            .filter_map(|resident| {
                Some(ResidentProcess {
                    pid: resident.pid()?,
                    name: resident.name.clone(),
                    from: resident.from.clone(),
                    moves: resident.moves,
                })
            })
            .collect()
    }

    fn write(&self) {
        let next = self.file.with_extension("next");
        let written = serde_json::to_vec(&self.list)
            .map_err(std::io::Error::other)
            .and_then(|text| std::fs::write(&next, text))
            .and_then(|()| std::fs::rename(&next, &self.file));
        if let Err(error) = written {
            let file = self.file.display();
            tracing::warn!(%file, %error, "processes that came here are not known after a restart");
        }
    }
}
