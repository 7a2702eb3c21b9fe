//! Reading the descriptors of a running tree.

mod copier;
mod outside;
mod saver;

pub use copier::Copier;
pub use saver::{Saved, Saver, Subject};

use saver::Outcome;

use super::error::FilesError;
use super::image::{FileId, Image, ObjectId};
use super::listed::{self, Listing};
use super::survey::{Key, Survey, survey};
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
    /// Where its TCP and UDP sockets can be copied from ([`Copier::copy`]).
    pub sockets: BTreeMap<FileId, Address>,
    limits: Limits,
    known: Known,
}

/// A process, as the caller sees it, and a descriptor of its.
pub type Address = (i32, u32);

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
    /// Copies of the tree's TCP and UDP sockets; with [`Draft::save_frozen_listed`] only of those that the draft has not, or
    /// has otherwise.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Where all TCP and UDP sockets can be copied from; those in flight are in `sockets` alone.
    pub places: BTreeMap<FileId, Address>,
}

impl Draft {
    /// Reads the descriptors of processes that may be running. `pids` are those of the caller's PID namespace; threads are
    /// left out.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let outside = Outside::look(pids);
        let saver = Saver::new(pids, survey(pids)?, limits, None, outside);
        let Outcome {
            image,
            known,
            places,
            ..
        } = saver.run()?;
        Ok(Self {
            image,
            sockets: places,
            limits: limits.clone(),
            known,
        })
    }

    /// Reads the descriptors of the same tree while none of its threads runs. Nothing changes for the tree.
    ///
    /// # Errors
    /// As [`Self::save`]; some blockers come and go, so that another try may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<Frozen, FilesError> {
        self.finish(pids, survey(pids)?)
    }

    /// [`Self::save_frozen`] from what was listed of all `pids` since they stand still: sockets that the draft has cost no
    /// system call.
    ///
    /// # Errors
    /// As there.
    pub fn save_frozen_listed(
        &self,
        pids: &[i32],
        listings: Vec<Listing>,
    ) -> Result<Frozen, FilesError> {
        self.finish(pids, listed::survey(pids, listings)?)
    }

    fn finish(&self, pids: &[i32], survey: Survey) -> Result<Frozen, FilesError> {
        let saver = Saver::new(pids, survey, &self.limits, Some(self), Outside::default());
        let outcome = saver.run()?;
        Ok(Frozen {
            image: outcome.image,
            sockets: outcome.sockets,
            places: outcome.places,
        })
    }
}
