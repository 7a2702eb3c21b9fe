//! Reading the descriptors of a running tree.

mod beside;
mod copier;
mod frozen;
mod inet;
mod outside;
mod prepared;
mod saver;
mod subject;

pub use copier::Copier;
pub use frozen::{Frozen, Places};
pub use outside::Outside;
pub use saver::{Saved, Saver};
pub use subject::Subject;

use super::error::FilesError;
use super::image::{FileId, Image, ObjectId};
use super::kept::Kept;
use super::listed::Listing;
use super::survey::{Key, survey};
use crate::process::sockets::SocketStatic;
use prepared::Prepared;
use saver::Stage;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
#[derive(Debug)]
pub struct Draft {
    /// What is sent to the acceptor before the freeze.
    pub image: Image,
    /// What the tree's TCP and UDP sockets were born with.
    pub sockets: BTreeMap<FileId, Arc<SocketStatic>>,
    /// Where they can be copied from ([`Copier::copy`]), but for those in flight.
    pub places: BTreeMap<FileId, Address>,
    limits: Limits,
    known: Known,
    kept: Kept,
    /// Taken by the first freeze.
    prepared: Mutex<Option<Box<Prepared>>>,
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
    /// Where epoll sets are, of which there is much to tell.
    sets: BTreeSet<Address>,
}

impl Draft {
    /// Reads the descriptors of processes that may be running. `pids` are those of the caller's PID namespace; threads are
    /// left out. The calling thread must be in their network namespace.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let saver = Saver::new(pids, survey(pids)?, limits, None, Stage::Running);
        Self::of(saver, limits.clone())
    }

    /// Reads the descriptors of the same tree again while it runs: what was there has the same numbers.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn again(&self, pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let saver = Saver::new(pids, survey(pids)?, limits, Some(self), Stage::Running);
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
            places: inet.places,
            limits,
            kept: Kept::open(&known.sets),
            prepared: Mutex::default(),
            known,
        })
    }

    /// Gets ready for the freeze, from what was listed of all `pids` since this was read: where the same was found still, what the
    /// freeze finds again costs it no more than a comparison, and of sockets that are `expected` to be seen from beside them
    /// there is nothing else to do. To be called while the tree runs.
    pub fn expect(&self, pids: &[i32], listings: Vec<Listing>, expected: &Arc<BTreeSet<FileId>>) {
        let prepared = Prepared::new(self, pids, listings, expected);
        *self.prepared() = prepared.map(Box::new);
    }

    /// Whether the next freeze finds something to compare with.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        self.prepared().is_some()
    }

    fn prepared(&self) -> MutexGuard<'_, Option<Box<Prepared>>> {
        let prepared = self.prepared.lock();
        prepared.unwrap_or_else(PoisonError::into_inner)
    }
}
