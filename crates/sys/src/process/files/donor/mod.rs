//! Reading the descriptors of a running tree.

mod beside;
mod copier;
mod frozen;
mod inet;
mod outside;
mod prepared;
mod saver;
mod subject;

pub use beside::has_owner;
pub use copier::Copier;
pub use frozen::{Frozen, Places};
pub use outside::Outside;
pub use saver::{Saved, Saver};
pub use subject::Subject;

use super::error::{Blocker, FilesError};
use super::image::{FileId, Image, ObjectId};
use super::kept::Kept;
use super::listed::Listing;
use super::survey::{Key, survey};
use crate::process::sockets::SocketStatic;
use prepared::Prepared;
use saver::{Half, Stage};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limits of saving.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest file without a name, or memory file, that is moved by value.
    pub content_bytes_max: u64,
    /// Most directory entries that are searched for another name of a file.
    pub search_entries_max: usize,
    /// Device (`st_dev`) and inode of memory files and of files without a name that processes map, so that their
    /// content moves with the mappings.
    pub elsewhere: BTreeSet<(u64, u64)>,
    /// True if files with names are read and hashed, so that an acceptor can check for equal files.
    pub digests: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            content_bytes_max: 256 << 20,
            search_entries_max: 100_000,
            elsewhere: BTreeSet::new(),
            digests: true,
        }
    }
}

/// The descriptors of a tree, read while the tree ran.
#[derive(Debug)]
pub struct Draft {
    /// Image that is sent to the acceptor before the freeze.
    pub image: Image,
    /// Fixed properties of the tree's TCP and UDP sockets.
    pub sockets: BTreeMap<FileId, Arc<SocketStatic>>,
    /// Descriptors from which the sockets can be copied ([`Copier::copy`]), except sockets in flight.
    pub places: BTreeMap<FileId, Address>,
    limits: Limits,
    known: Known,
    kept: Kept,
    /// Preparation for the freeze, taken by the first freeze.
    prepared: Mutex<Option<Box<Prepared>>>,
}

/// Number of reads of a running tree in which a blocker must be found to be reported, and the pause between reads.
const LOOKS: usize = 6;
const PAUSE: Duration = Duration::from_millis(20);

/// A process, by its PID as the caller sees it, and one of its descriptors.
pub type Address = (i32, u32);

/// Numbers assigned in an image, so that a later image gives the same file the same number.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Open files by descriptor (table and number).
    files: HashMap<(u32, u32), (Key, FileId)>,
    /// Pipes and contents by mount and inode.
    objects: HashMap<(u32, u64), ObjectId>,
    /// Descriptors of epoll sets, which have long texts in `fdinfo`.
    sets: BTreeSet<Address>,
}

impl Draft {
    /// Reads a running tree. Processes of the tree start and end, and open and close descriptors, meanwhile: only
    /// blockers found in each of several reads are reported; any other file that could not be read is left out, and a
    /// later read or the freeze decides about it. Files that are in the draft `before` keep their numbers. `pids` lists
    /// the tree's processes.
    ///
    /// # Errors
    /// Same as [`Self::save`].
    pub fn look(
        pids: impl Fn() -> Vec<i32>,
        limits: &Limits,
        before: Option<&Self>,
    ) -> Result<Self, FilesError> {
        let mut lasting: Option<Vec<Blocker>> = None;
        let mut failures = 0;
        for look in 1..=LOOKS {
            let (draft, blockers, failed) = match Self::look_once(&pids(), limits, before) {
                Ok((draft, blockers, failed)) => (Some(draft), blockers, failed),
                Err(FilesError::Blocked(blockers)) => (None, blockers, None),
                Err(failed) => (None, Vec::new(), Some(failed)),
            };
            let complete = blockers.is_empty() && failed.is_none();
            failures += usize::from(failed.is_some());
            let lasting = match &mut lasting {
                Some(lasting) => {
                    lasting.retain(|one| blockers.contains(one));
                    lasting
                }
                none => none.insert(blockers),
            };
            match (draft, failed) {
                (Some(draft), _) if complete => return Ok(draft),
                _ if look < LOOKS => std::thread::sleep(PAUSE),
                _ if !lasting.is_empty() => {
                    return Err(FilesError::Blocked(std::mem::take(lasting)));
                }
                (None, Some(failed)) => return Err(failed),
                (_, Some(failed)) if failures == LOOKS => return Err(failed),
                (Some(draft), _) => return Ok(draft),
                (None, None) => {}
            }
        }
        Self::save(&pids(), limits)
    }

    fn look_once(
        pids: &[i32],
        limits: &Limits,
        before: Option<&Self>,
    ) -> Result<(Self, Vec<Blocker>, Option<FilesError>), FilesError> {
        let saver = Saver::new(pids, survey(pids)?, limits, before, Stage::Running);
        let Half {
            image,
            known,
            inet,
            blockers,
            failed,
        } = saver.run_half()?;
        let mut draft = Self {
            image,
            sockets: inet.fixed,
            places: inet.places,
            limits: limits.clone(),
            kept: Kept::open(&known.sets),
            prepared: Mutex::default(),
            known,
        };
        // Sizes that the kernel tunes by itself are no reason to create a socket anew.
        for (id, fixed) in &mut draft.sockets {
            let known = before.and_then(|before| before.sockets.get(id));
            if let Some(known) = known.filter(|known| known.is_like(fixed)) {
                fixed.clone_from(known);
            }
        }
        Ok((draft, blockers, failed))
    }

    /// Reads the descriptors of processes that may be running. `pids` are PIDs in the caller's PID namespace, without
    /// thread IDs. The calling thread must be in the network namespace of the processes.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &Limits) -> Result<Self, FilesError> {
        let (draft, blockers, failed) = Self::look_once(pids, limits, None)?;
        if !blockers.is_empty() {
            return Err(FilesError::Blocked(blockers));
        }
        failed.map_or(Ok(draft), Err)
    }

    /// Prepares for the freeze, from a listing of all `pids` made since this draft was read. If the listing matches the
    /// draft, unchanged files cost the freeze no more than a comparison, and sockets in `expected`, which the caller
    /// expects to read without a descriptor, cost nothing else. To be called while the tree runs.
    pub fn expect(&self, pids: &[i32], listings: Vec<Listing>, expected: &Arc<BTreeSet<FileId>>) {
        let prepared = Prepared::new(self, pids, listings, expected);
        *self.prepared() = prepared.map(Box::new);
    }

    /// Returns true if the next freeze has a preparation to compare with.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        self.prepared().is_some()
    }

    fn prepared(&self) -> MutexGuard<'_, Option<Box<Prepared>>> {
        let prepared = self.prepared.lock();
        prepared.unwrap_or_else(PoisonError::into_inner)
    }
}
