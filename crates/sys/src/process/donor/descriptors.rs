//! Descriptors of a tracked tree.

use super::freeze::StoppedTree;
use super::tracker::Tracker;
use crate::process::error::{Error, Result};
use crate::process::files::image::FileId;
use crate::process::files::{Address, Draft, Frozen, Limits, Listing, shared_tables};
use crate::process::image::{Descriptors, Files, Process};
use crate::process::inspect;
use crate::process::procfs::Stat;
use crate::process::sockets::{Held, SocketState, SocketStatic};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

impl Tracker {
    /// Returns the tree's descriptors: all of them at first, then the changes since the last call. Call this after
    /// [`Tracker::round`], which finds memory that descriptors may share, in a thread in the tree's network
    /// namespace.
    ///
    /// # Errors
    /// [`Error::Blocked`] if something that cannot move has appeared; the tree runs on, and stays tracked.
    pub fn descriptors(&mut self) -> Result<Descriptors> {
        // Processes forked since the last round belong to the tree too.
        let pids = || living_tree(self.root);
        let limits = Limits {
            elsewhere: self.catalogue.memory(),
            ..Limits::default()
        };
        let draft = Draft::look(pids, &limits, self.draft.as_deref())?;
        let Some(before) = &self.draft else {
            let found = Descriptors {
                files: Files::Image(draft.image.clone()),
                sockets: fresh(&draft.sockets, &BTreeMap::new()),
                gone: BTreeSet::new(),
            };
            self.draft = Some(Arc::new(draft));
            return Ok(found);
        };
        let ids: BTreeSet<FileId> = draft.sockets.keys().copied().collect();
        let found = Descriptors {
            files: Files::Changes(draft.image.changes_since(&before.image)),
            sockets: fresh(&draft.sockets, &before.sockets),
            gone: gone(before, &ids),
        };
        self.draft = Some(Arc::new(draft));
        Ok(found)
    }

    /// Prepares the reads of the next freeze, from listings of [`Tracker::pids`] made since the last
    /// [`Tracker::descriptors`]. Sockets that are `expected` to be snapshotted without their descriptors are not
    /// copied. Returns false if this was of no use, and the freeze takes longer: a descriptor was opened or closed
    /// meanwhile.
    pub fn expect(&self, listings: Vec<Listing>, expected: &Arc<BTreeSet<FileId>>) -> bool {
        let pids = self.living();
        self.draft.as_ref().is_some_and(|draft| {
            draft.expect(&pids, listings, expected);
            draft.is_prepared()
        })
    }

    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.living()
    }

    /// Returns the TCP and UDP sockets that the last [`Tracker::descriptors`] found, with their places and static
    /// properties.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, Address, &SocketStatic)> {
        self.draft.iter().flat_map(|draft| {
            let places = draft.places.iter();
            places.filter_map(|(id, place)| Some((*id, *place, &**draft.sockets.get(id)?)))
        })
    }

    /// Returns the processes that have descriptors.
    fn living(&self) -> Vec<i32> {
        let living = self
            .processes
            .iter()
            .filter(|tracked| tracked.watched.is_some());
        living.map(|tracked| tracked.pid).collect()
    }

    /// Records for each process the process with which it shares its descriptor table.
    pub(super) fn find_shared_tables(&self, shapes: &mut [Process]) {
        let living = self.processes.iter().enumerate();
        let living = living.filter(|(_, tracked)| tracked.watched.is_some());
        let (places, pids): (Vec<usize>, Vec<i32>) =
            living.map(|(at, tracked)| (at, tracked.pid)).unzip();
        for (at, other) in places.iter().zip(shared_tables(&pids)) {
            shapes[*at].table_of = other.map(|other| places[other] as u32);
        }
    }
}

impl StoppedTree {
    /// Returns the changes of the tree's descriptors since the tracker last read them. Copies of the tree's TCP and
    /// UDP sockets are kept from here on.
    ///
    /// # Errors
    /// [`Error::Blocked`], [`Error::Socket`]: some blockers are temporary, so another attempt may succeed.
    pub fn descriptors(&mut self) -> Result<Descriptors> {
        let frozen = self.draft()?.save_frozen(&self.pids())?;
        self.changed(frozen)
    }

    /// Returns a reader of the descriptors that can run in parallel with other work on the tree.
    ///
    /// # Errors
    /// The descriptors were not read while the tree ran.
    pub fn describer(&self) -> Result<Describer> {
        Ok(Describer {
            draft: Arc::clone(self.draft()?),
            pids: self.pids(),
        })
    }

    /// Completes [`StoppedTree::descriptors`] from the result of [`Describer::read`]. The `unseen` sockets, which
    /// were expected to be snapshotted and were not, are copied.
    ///
    /// # Errors
    /// As [`StoppedTree::descriptors`].
    pub fn described(
        &mut self,
        Described(mut frozen): Described,
        unseen: &[FileId],
    ) -> Result<Descriptors> {
        self.draft()?.copy_unseen(&mut frozen, unseen)?;
        self.changed(frozen)
    }

    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.tracker.living()
    }

    fn draft(&self) -> Result<&Arc<Draft>> {
        let draft = self.tracker.draft.as_ref();
        draft.ok_or(Error::Image("descriptors that nobody looked at"))
    }

    fn changed(&mut self, frozen: Frozen) -> Result<Descriptors> {
        let before = self.draft()?;
        let found = Descriptors {
            files: Files::Changes(frozen.changes),
            sockets: fresh(&frozen.fixed, &BTreeMap::new()),
            gone: frozen.gone,
        };
        let mut held = BTreeMap::new();
        for (id, copy) in frozen.sockets {
            let fixed = frozen.fixed.get(&id).or_else(|| before.sockets.get(&id));
            let fixed = fixed.ok_or(Error::Image("a socket that nobody looked at"))?;
            held.insert(id, (copy, Arc::clone(fixed)));
        }
        self.copied = held.keys().copied().collect();
        self.places = frozen.places;
        self.sockets = Held::new(held);
        Ok(found)
    }

    /// Returns the places of sockets that were snapshotted, and so not copied.
    pub(super) fn uncopied(&self) -> Vec<Address> {
        let all = self.draft().map(|draft| self.places.all(draft));
        let all = all.unwrap_or_default().into_iter();
        let uncopied = all.filter(|(id, _)| !self.copied.contains(id));
        uncopied.map(|(_, place)| place).collect()
    }

    /// Returns the addresses of listeners with connections that wait to be accepted. Such connections do not move
    /// with the tree.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unaccepted(&self) -> Result<Vec<SocketAddr>> {
        Ok(self.sockets.unaccepted()?)
    }

    /// Returns the tree's TCP and UDP sockets.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStatic)> {
        self.sockets.iter()
    }

    /// Extracts the state of all sockets except the ones for which `is_known` returns true, connections by `threads`
    /// threads. No packet may reach or leave the sockets after this.
    ///
    /// # Errors
    /// [`Error::Socket`]; the sockets go on unchanged.
    pub fn extract(
        &mut self,
        threads: usize,
        is_known: impl Fn(FileId) -> bool,
    ) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract(threads, is_known)?)
    }

    /// Returns the received bytes of a connection that were not read, if there are exactly `length`. The connection
    /// is not touched.
    #[must_use]
    pub fn unread(&self, id: FileId, length: u32) -> Option<Vec<u8>> {
        self.sockets.unread(id, length)
    }

    /// Extracts the state of one socket, like [`StoppedTree::extract`].
    ///
    /// # Errors
    /// As [`StoppedTree::extract`].
    pub fn extract_one(&mut self, id: FileId) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract_one(id)?)
    }
}

/// Returns the processes of a tree that have descriptors; only the root if the tree cannot be listed.
pub(crate) fn living_tree(root: i32) -> Vec<i32> {
    let mut pids = inspect::tree(root).unwrap_or_else(|_| vec![root]);
    pids.retain(|pid| Stat::read(*pid).is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X')));
    pids
}

/// Reader of the descriptors of a stopped tree.
#[derive(Debug)]
pub struct Describer {
    draft: Arc<Draft>,
    pids: Vec<i32>,
}

/// Result of [`Describer::read`], for [`StoppedTree::described`].
#[derive(Debug)]
pub struct Described(Frozen);

impl Describer {
    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Reads the descriptors, from listings of all [`Describer::pids`] made since the processes are stopped.
    /// Sockets that are `expected` to be snapshotted without their descriptors cost least, and next to nothing if
    /// [`Tracker::expect`] got the same `expected`. Call this in a thread in the tree's network namespace.
    ///
    /// # Errors
    /// As [`StoppedTree::descriptors`].
    pub fn read(
        &self,
        listings: Vec<Listing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) -> Result<Described> {
        let frozen = self
            .draft
            .save_frozen_listed(&self.pids, listings, expected)?;
        Ok(Described(frozen))
    }
}

fn fresh(
    now: &BTreeMap<FileId, Arc<SocketStatic>>,
    before: &BTreeMap<FileId, Arc<SocketStatic>>,
) -> BTreeMap<FileId, SocketStatic> {
    let fresh = now
        .iter()
        .filter(|(id, fixed)| before.get(id) != Some(*fixed));
    fresh.map(|(id, fixed)| (*id, (**fixed).clone())).collect()
}

fn gone(before: &Draft, now: &BTreeSet<FileId>) -> BTreeSet<FileId> {
    let gone = before.sockets.keys().filter(|id| !now.contains(id));
    gone.copied().collect()
}
