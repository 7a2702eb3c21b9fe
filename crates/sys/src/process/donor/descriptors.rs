//! The descriptors of a tree that is watched.

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
    /// The tree's descriptors: all of them at first, then what changed since the last look. To be called after
    /// [`Tracker::round`], which finds memory that descriptors may share, by a thread in the tree's network namespace.
    ///
    /// # Errors
    /// [`Error::Blocked`] if something that cannot move has appeared; the tree goes on, and is watched still.
    pub fn descriptors(&mut self) -> Result<Descriptors> {
        // Those that were born since the last round belong to the tree, too.
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

    /// Makes ready what the next freeze reads, from what was listed of [`Tracker::pids`] since the last [`Tracker::descriptors`].
    /// Of sockets that are `expected` to be seen from beside them no copies will be made. Gives whether that was of use: the
    /// freeze takes longer where something was opened or closed meanwhile.
    pub fn expect(&self, listings: Vec<Listing>, expected: &Arc<BTreeSet<FileId>>) -> bool {
        let pids = self.living();
        self.draft.as_ref().is_some_and(|draft| {
            draft.expect(&pids, listings, expected);
            draft.is_prepared()
        })
    }

    /// The processes that have descriptors, as the caller sees them.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.living()
    }

    /// Where the tree's TCP and UDP sockets were found by the last [`Tracker::descriptors`], and what they were born with.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, Address, &SocketStatic)> {
        self.draft.iter().flat_map(|draft| {
            let places = draft.places.iter();
            places.filter_map(|(id, place)| Some((*id, *place, &**draft.sockets.get(id)?)))
        })
    }

    /// Processes that have descriptors.
    fn living(&self) -> Vec<i32> {
        let living = self
            .processes
            .iter()
            .filter(|tracked| tracked.watched.is_some());
        living.map(|tracked| tracked.pid).collect()
    }

    /// Says of each process whose descriptor table it shares.
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
    /// What changed of the tree's descriptors since the tracker looked last. Copies of its TCP and UDP sockets are kept from now
    /// on.
    ///
    /// # Errors
    /// [`Error::Blocked`], [`Error::Socket`]: some blockers come and go, so that another try may succeed.
    pub fn descriptors(&mut self) -> Result<Descriptors> {
        let frozen = self.draft()?.save_frozen(&self.pids())?;
        self.changed(frozen)
    }

    /// For reading the descriptors beside whatever else is done with the tree.
    ///
    /// # Errors
    /// Nobody looked at them while it ran.
    pub fn describer(&self) -> Result<Describer> {
        Ok(Describer {
            draft: Arc::clone(self.draft()?),
            pids: self.pids(),
        })
    }

    /// [`StoppedTree::descriptors`] from what [`Describer::read`] has found. Sockets that were expected to be seen from beside
    /// them and are `unseen` are copied.
    ///
    /// # Errors
    /// As there.
    pub fn described(
        &mut self,
        Described(mut frozen): Described,
        unseen: &[FileId],
    ) -> Result<Descriptors> {
        self.draft()?.copy_unseen(&mut frozen, unseen)?;
        self.changed(frozen)
    }

    /// The processes that have descriptors, as the caller sees them.
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

    /// Where sockets are of which there are no copies, since they were seen from beside.
    pub(super) fn uncopied(&self) -> Vec<Address> {
        let all = self.draft().map(|draft| self.places.all(draft));
        let all = all.unwrap_or_default().into_iter();
        let uncopied = all.filter(|(id, _)| !self.copied.contains(id));
        uncopied.map(|(_, place)| place).collect()
    }

    /// The addresses of listeners that have connections which wait to be accepted: they do not move with the tree.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn unaccepted(&self) -> Result<Vec<SocketAddr>> {
        Ok(self.sockets.unaccepted()?)
    }

    /// The tree's TCP and UDP sockets.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStatic)> {
        self.sockets.iter()
    }

    /// The state of all sockets but those that are known, connections by `threads` threads. Nothing may reach them any more, nor
    /// leave them.
    ///
    /// # Errors
    /// [`Error::Socket`]; they go on as before.
    pub fn extract(
        &mut self,
        threads: usize,
        is_known: impl Fn(FileId) -> bool,
    ) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract(threads, is_known)?)
    }

    /// What of a connection was received and not read, if that is exactly so many bytes. The connection is not touched.
    #[must_use]
    pub fn unread(&self, id: FileId, length: u32) -> Option<Vec<u8>> {
        self.sockets.unread(id, length)
    }

    /// [`StoppedTree::extract`] of one socket.
    ///
    /// # Errors
    /// As there.
    pub fn extract_one(&mut self, id: FileId) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract_one(id)?)
    }
}

/// The processes of a tree that have descriptors; only the root where it cannot be listed.
pub(crate) fn living_tree(root: i32) -> Vec<i32> {
    let mut pids = inspect::tree(root).unwrap_or_else(|_| vec![root]);
    pids.retain(|pid| Stat::read(*pid).is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X')));
    pids
}

/// Reads the descriptors of a tree that stands still.
#[derive(Debug)]
pub struct Describer {
    draft: Arc<Draft>,
    pids: Vec<i32>,
}

/// What it has found, for [`StoppedTree::described`].
#[derive(Debug)]
pub struct Described(Frozen);

impl Describer {
    /// The processes that have descriptors, as the caller sees them.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Reads them, from what was listed of all [`Describer::pids`] since they stand still. Sockets that are `expected` to be seen from
    /// beside them cost least, and next to nothing if [`Tracker::expect`] had the same `expected`. To be called by a thread in the
    /// tree's network namespace.
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
