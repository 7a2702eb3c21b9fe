//! Reading the descriptors of a running tree.

mod outside;
mod saver;

pub use saver::{Saved, Saver, Subject};

use super::error::FilesError;
use super::image::{FileId, Image, ObjectId};
use super::survey::Key;
use outside::Outside;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;

/// How far saving goes.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest file without a name, or memory file, that is moved by value.
    pub content_bytes_max: u64,
    /// Directory entries that are looked at to find another name of a file.
    pub search_entries_max: usize,
    /// Device (`st_dev`) and inode of memory files and files without a name whose content moves elsewhere, because
    /// processes map them.
    pub elsewhere: BTreeSet<(u64, u64)>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            content_bytes_max: 256 << 20,
            search_entries_max: 100_000,
            elsewhere: BTreeSet::new(),
        }
    }
}

/// The descriptors of a tree as they were while it ran.
#[derive(Clone, Debug)]
pub struct Draft {
    /// What is sent to the acceptor before the freeze.
    pub image: Image,
    limits: Limits,
    known: Known,
}

/// What became of what the donor saw, so that a later image gives the same thing the same number.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Descriptors: table and number.
    files: HashMap<(u32, u32), (Key, FileId)>,
    /// Pipes and contents by mount and inode.
    objects: HashMap<(u32, u64), ObjectId>,
}

/// The descriptors of a stopped tree.
#[derive(Debug)]
pub struct Frozen {
    /// Everything; what the acceptor needs is its difference from the draft.
    pub image: Image,
    /// Copies of the tree's TCP and UDP sockets.
    pub sockets: BTreeMap<FileId, OwnedFd>,
}

impl Draft {
    /// Reads the descriptors of processes that may be running. `pids` are those of the caller's PID namespace; threads are
    /// left out.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let outside = Outside::look(pids);
        let saver = Saver::new(pids, limits, None, outside)?;
        let (image, known, _) = saver.run()?;
        Ok(Self {
            image,
            limits: limits.clone(),
            known,
        })
    }

    /// Reads the descriptors of the same tree while none of its threads runs. Nothing changes for the tree.
    ///
    /// # Errors
    /// As [`Self::save`]; some blockers come and go, so that another try may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<Frozen, FilesError> {
        let saver = Saver::new(pids, &self.limits, Some(self), Outside::default())?;
        let (image, _, sockets) = saver.run()?;
        Ok(Frozen { image, sockets })
    }
}
