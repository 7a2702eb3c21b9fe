//! Reading the descriptors of a running tree.

mod beside;
mod copier;
mod inet;
mod outside;
mod saver;

pub use copier::Copier;
pub use saver::{Saved, Saver, Subject};

use super::error::{At, Blocker, FilesError, Reason};
use super::image::{FileId, Image, ObjectId};
use super::kept::Kept;
use super::listed::{self, Listing};
use super::survey::{Key, Survey, survey};
use crate::process::sockets::SocketStatic;
use saver::{Stage, Stop};
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
    /// Where they can be copied from ([`Copier::copy`]), but for those in flight.
    pub places: BTreeMap<FileId, Address>,
    limits: Limits,
    known: Known,
    kept: Arc<Kept>,
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

/// The descriptors of a stopped tree.
#[derive(Debug)]
pub struct Frozen {
    /// Everything; what the acceptor needs is its difference from the draft.
    pub image: Image,
    /// Copies of the tree's TCP and UDP sockets; with [`Draft::save_frozen_listed`] not of those that were seen.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Where all can be copied from, but for those in flight.
    pub places: BTreeMap<FileId, Address>,
    /// What those of which there are copies were born with and the draft has nothing, or nothing that still holds.
    pub fixed: BTreeMap<FileId, Arc<SocketStatic>>,
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
            kept: Arc::new(Kept::open(&known.sets)),
            known,
        })
    }

    /// Reads the descriptors of the same tree while none of its threads runs. Nothing changes for the tree.
    ///
    /// # Errors
    /// As [`Self::save`]; some blockers come and go, so that another try may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<Frozen, FilesError> {
        self.finish(pids, survey(pids)?, &BTreeSet::new())
    }

    /// [`Self::save_frozen`] from what was listed of all `pids` since they stand still. Sockets that the draft has and
    /// whose state is `seen` from beside them cost no system call: they are not copied.
    ///
    /// # Errors
    /// As there.
    pub fn save_frozen_listed(
        &self,
        pids: &[i32],
        listings: Vec<Listing>,
        seen: &BTreeSet<FileId>,
    ) -> Result<Frozen, FilesError> {
        self.finish(pids, listed::survey(pids, listings, &self.kept)?, seen)
    }

    /// Makes the copies that [`Self::save_frozen_listed`] has left out of sockets that were not seen after all.
    ///
    /// # Errors
    /// As there.
    pub fn copy_unseen(
        &self,
        frozen: &mut Frozen,
        seen: &BTreeSet<FileId>,
    ) -> Result<(), FilesError> {
        let held = std::mem::take(&mut frozen.sockets);
        let mut found = inet::Found::of(held, std::mem::take(&mut frozen.fixed));
        let mut copier = Copier::default();
        for (id, place) in frozen.places.iter().filter(|(id, _)| !seen.contains(id)) {
            if found.held.contains_key(id) {
                continue;
            }
            let copy = copier.copy(*place).at("pidfd_getfd")?;
            let known = self.sockets.get(id).map(|known| &**known);
            found.hold(*id, copy, known).map_err(|stop| match stop {
                Stop::Failed(error) => error,
                Stop::Reason(reason) => FilesError::Blocked(vec![blocker(*place, reason)]),
            })?;
        }
        (frozen.sockets, frozen.fixed) = (found.held, found.fixed);
        Ok(())
    }

    fn finish(
        &self,
        pids: &[i32],
        survey: Survey,
        seen: &BTreeSet<FileId>,
    ) -> Result<Frozen, FilesError> {
        let mut saver = Saver::new(pids, survey, &self.limits, Some(self), Stage::Frozen);
        saver.inet.seen.clone_from(seen);
        let (image, _, inet) = saver.run()?;
        Ok(Frozen {
            image,
            sockets: inet.held,
            places: inet.places,
            fixed: inet.fixed,
        })
    }
}

fn blocker((pid, fd): Address, reason: Reason) -> Blocker {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
    Blocker {
        pid,
        fd: Some(fd),
        path: link.to_string_lossy().into_owned(),
        reason,
    }
}
