//! Reading the descriptors of a running tree.

mod inet;
mod outside;
mod saver;

pub use saver::{Saved, Saver, Subject};

use super::error::FilesError;
use super::image::{FileId, Image, ObjectId};
use super::survey::Key;
use crate::process::sockets::SocketStatic;
use saver::Stage;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

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
    /// What the tree's TCP and UDP sockets were born with.
    pub sockets: BTreeMap<FileId, Arc<SocketStatic>>,
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
    /// What those of them were born with of which the draft has nothing, or nothing that still holds.
    pub fixed: BTreeMap<FileId, Arc<SocketStatic>>,
}

impl Draft {
    /// Reads the descriptors of processes that may be running. `pids` are those of the caller's PID namespace; threads are
    /// left out. The calling thread must be in their network namespace.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let saver = Saver::new(pids, limits, None, Stage::Running)?;
        Self::of(saver, limits.clone())
    }

    /// Reads the descriptors of the same tree again while it runs: what was there has the same numbers.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn again(&self, pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let saver = Saver::new(pids, limits, Some(self), Stage::Running)?;
        let mut draft = Self::of(saver, limits.clone())?;
        // Sizes that the kernel tunes are no reason to make a socket anew.
        for (id, fixed) in &mut draft.sockets {
            if let Some(before) = self.sockets.get(id).filter(|before| before.is_like(fixed)) {
                fixed.clone_from(before);
            }
        }
        Ok(draft)
    }

    fn of(saver: Saver<'_>, limits: Limits) -> Result<Self, FilesError> {
        let (image, known, inet) = saver.run()?;
        Ok(Self {
            image,
            sockets: inet.fixed,
            limits,
            known,
        })
    }

    /// Reads the descriptors of the same tree while none of its threads runs. Nothing changes for the tree.
    ///
    /// # Errors
    /// As [`Self::save`]; some blockers come and go, so that another try may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<Frozen, FilesError> {
        let saver = Saver::new(pids, &self.limits, Some(self), Stage::Frozen)?;
        let (image, _, inet) = saver.run()?;
        Ok(Frozen {
            image,
            sockets: inet.held,
            fixed: inet.fixed,
        })
    }
}
