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
    /// Whether files with names are read, so that an acceptor can tell whether it has equal ones.
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

/// A tree that runs is looked at so often before something in it is said to stand in the way, with pauses.
const LOOKS: usize = 6;
const PAUSE: Duration = Duration::from_millis(20);

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
    /// Looks at a tree whose processes open and close descriptors, and come and go, all the while. Only what stands in the way in
    /// each of several looks does so; anything else is left out, for a later look or the freeze to decide about. With a draft
    /// from `before`, what was there then has the same numbers. `pids` lists the tree.
    ///
    /// # Errors
    /// As [`Self::save`].
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
        // Sizes that the kernel tunes are no reason to make a socket anew.
        for (id, fixed) in &mut draft.sockets {
            let known = before.and_then(|before| before.sockets.get(id));
            if let Some(known) = known.filter(|known| known.is_like(fixed)) {
                fixed.clone_from(known);
            }
        }
        Ok((draft, blockers, failed))
    }

    /// Reads the descriptors of processes that may be running. `pids` are those of the caller's PID namespace; threads are
    /// left out. The calling thread must be in their network namespace.
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
