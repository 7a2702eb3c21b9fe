//! Descriptors of a tracked tree.

use super::freeze::StoppedTree;
use super::tree_tracker::TreeTracker;
use crate::error::{Error, Result};
use crate::files::image::FileId;
use crate::files::{
    DescriptorListing, FilesSnapshot, FrozenFiles, ProcessFd, SaveLimits, shared_tables,
};
use crate::image::{DescriptorUpdate, OpenFilesUpdate, ProcessLayout};
use crate::inspect;
use crate::procfs::ProcStat;
use crate::sockets::{FrozenSockets, SocketState, SocketStaticState};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

impl TreeTracker {
    /// Returns the tree's descriptors: all of them at first, then the changes since the last call. Call this after
    /// [`TreeTracker::next_round`], which finds memory that descriptors may share, in a thread in the tree's network
    /// namespace.
    ///
    /// # Errors
    /// [`Error::Blocked`] if something that cannot move has appeared; the tree runs on, and stays tracked.
    pub fn read_descriptors(&mut self) -> Result<DescriptorUpdate> {
        // Processes forked since the last round belong to the tree too.
        let pids = || living_pids_of_tree(self.root);
        let limits = SaveLimits {
            mapped_memory: self.catalogue.moved_memory(),
            ..SaveLimits::default()
        };
        let snapshot = FilesSnapshot::take(pids, &limits, self.descriptor_snapshot.as_deref())?;
        let Some(before) = &self.descriptor_snapshot else {
            let found = DescriptorUpdate {
                files: OpenFilesUpdate::Image(snapshot.image.clone()),
                sockets: changed_sockets(&snapshot.sockets, &BTreeMap::new()),
                removed: BTreeSet::new(),
            };
            self.descriptor_snapshot = Some(Arc::new(snapshot));
            return Ok(found);
        };
        let ids: BTreeSet<FileId> = snapshot.sockets.keys().copied().collect();
        let found = DescriptorUpdate {
            files: OpenFilesUpdate::Changes(snapshot.image.changes_since(&before.image)),
            sockets: changed_sockets(&snapshot.sockets, &before.sockets),
            removed: removed_sockets(before, &ids),
        };
        self.descriptor_snapshot = Some(Arc::new(snapshot));
        Ok(found)
    }

    /// Prepares the reads of the next freeze, from listings of [`TreeTracker::pids`] made since the last
    /// [`TreeTracker::read_descriptors`]. Sockets that are `expected` to be snapshotted without their descriptors are not
    /// copied. Returns false if this was of no use, and the freeze takes longer: a descriptor was opened or closed
    /// meanwhile.
    pub fn prepare_freeze(
        &self,
        listings: Vec<DescriptorListing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) -> bool {
        let pids = self.living_pids();
        self.descriptor_snapshot.as_ref().is_some_and(|snapshot| {
            snapshot.predict_freeze(&pids, listings, expected);
            snapshot.has_prediction()
        })
    }

    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.living_pids()
    }

    /// Returns the TCP and UDP sockets that the last [`TreeTracker::read_descriptors`] found, with their places and static
    /// properties.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, ProcessFd, &SocketStaticState)> {
        self.descriptor_snapshot.iter().flat_map(|snapshot| {
            let places = snapshot.socket_fds.iter();
            places.filter_map(|(id, place)| Some((*id, *place, &**snapshot.sockets.get(id)?)))
        })
    }

    /// Returns the processes that have descriptors.
    fn living_pids(&self) -> Vec<i32> {
        let living = self
            .processes
            .iter()
            .filter(|tracked| tracked.watched.is_some());
        living.map(|tracked| tracked.pid).collect()
    }

    /// Records for each process the process with which it shares its descriptor table.
    pub(super) fn set_shared_tables(&self, shapes: &mut [ProcessLayout]) {
        let living = self.processes.iter().enumerate();
        let living = living.filter(|(_, tracked)| tracked.watched.is_some());
        let (places, pids): (Vec<usize>, Vec<i32>) =
            living.map(|(at, tracked)| (at, tracked.pid)).unzip();
        for (at, other) in places.iter().zip(shared_tables(&pids)) {
            shapes[*at].shares_table_with = other.map(|other| places[other] as u32);
        }
    }
}

impl StoppedTree {
    /// Returns the changes of the tree's descriptors since the tracker last read them. Copies of the tree's TCP and
    /// UDP sockets are kept from here on.
    ///
    /// # Errors
    /// [`Error::Blocked`], [`Error::Socket`]: some blockers are temporary, so another attempt may succeed.
    pub fn read_descriptors(&mut self) -> Result<DescriptorUpdate> {
        let frozen = self.descriptor_snapshot()?.save_frozen(&self.pids())?;
        self.descriptor_changes(frozen)
    }

    /// Returns a reader of the descriptors that can run in parallel with other work on the tree.
    ///
    /// # Errors
    /// The descriptors were not read while the tree ran.
    pub fn descriptor_reader(&self) -> Result<DescriptorReader> {
        Ok(DescriptorReader {
            snapshot: Arc::clone(self.descriptor_snapshot()?),
            pids: self.pids(),
        })
    }

    /// Completes [`StoppedTree::read_descriptors`] from the result of [`DescriptorReader::read`]. The `unseen` sockets, which
    /// were expected to be snapshotted and were not, are copied.
    ///
    /// # Errors
    /// As [`StoppedTree::read_descriptors`].
    pub fn finish_reading_descriptors(
        &mut self,
        FrozenDescriptors(mut frozen): FrozenDescriptors,
        unseen: &[FileId],
    ) -> Result<DescriptorUpdate> {
        self.descriptor_snapshot()?
            .copy_missing_sockets(&mut frozen, unseen)?;
        self.descriptor_changes(frozen)
    }

    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.tracker.living_pids()
    }

    fn descriptor_snapshot(&self) -> Result<&Arc<FilesSnapshot>> {
        let snapshot = self.tracker.descriptor_snapshot.as_ref();
        snapshot.ok_or(Error::Image("descriptors were not read"))
    }

    fn descriptor_changes(&mut self, frozen: FrozenFiles) -> Result<DescriptorUpdate> {
        let before = self.descriptor_snapshot()?;
        let found = DescriptorUpdate {
            files: OpenFilesUpdate::Changes(frozen.changes),
            sockets: changed_sockets(&frozen.statics, &BTreeMap::new()),
            removed: frozen.closed_sockets,
        };
        let mut kept = BTreeMap::new();
        for (id, copy) in frozen.sockets {
            let fixed = frozen.statics.get(&id).or_else(|| before.sockets.get(&id));
            let fixed = fixed.ok_or(Error::Image("a socket was not read"))?;
            kept.insert(id, (copy, Arc::clone(fixed)));
        }
        self.copied_sockets = kept.keys().copied().collect();
        self.socket_places = frozen.socket_fds;
        self.sockets = FrozenSockets::new(kept);
        Ok(found)
    }

    /// Returns the places of sockets that were snapshotted, and so not copied.
    pub(super) fn uncopied_sockets(&self) -> Vec<ProcessFd> {
        let all = self
            .descriptor_snapshot()
            .map(|snapshot| self.socket_places.all(snapshot));
        let all = all.unwrap_or_default().into_iter();
        let uncopied = all.filter(|(id, _)| !self.copied_sockets.contains(id));
        uncopied.map(|(_, place)| place).collect()
    }

    /// Returns the addresses of listeners with connections that wait to be accepted. Such connections do not move
    /// with the tree.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn listeners_with_unaccepted(&self) -> Result<Vec<SocketAddr>> {
        Ok(self.sockets.unaccepted()?)
    }

    /// Returns the tree's TCP and UDP sockets.
    pub fn sockets(&self) -> impl Iterator<Item = (FileId, BorrowedFd<'_>, &SocketStaticState)> {
        self.sockets.iter()
    }

    /// Extracts the state of all sockets except the ones for which `is_known` returns true, connections by `threads`
    /// threads. No packet may reach or leave the sockets after this.
    ///
    /// # Errors
    /// [`Error::Socket`]; the sockets go on unchanged.
    pub fn extract_sockets(
        &mut self,
        threads: usize,
        is_known: impl Fn(FileId) -> bool,
    ) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract(threads, is_known)?)
    }

    /// Returns the received bytes of a connection that were not read, if there are exactly `length`. The connection
    /// is not touched.
    #[must_use]
    pub fn unread_socket_bytes(&self, id: FileId, length: u32) -> Option<Vec<u8>> {
        self.sockets.unread(id, length)
    }

    /// Extracts the state of one socket, like [`StoppedTree::extract_sockets`].
    ///
    /// # Errors
    /// As [`StoppedTree::extract_sockets`].
    pub fn extract_socket(&mut self, id: FileId) -> Result<BTreeMap<FileId, SocketState>> {
        Ok(self.sockets.extract_one(id)?)
    }
}

/// Returns the processes of a tree that have descriptors; only the root if the tree cannot be listed.
pub(crate) fn living_pids_of_tree(root: i32) -> Vec<i32> {
    let mut pids = inspect::tree_pids(root).unwrap_or_else(|_| vec![root]);
    pids.retain(|pid| ProcStat::read(*pid).is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X')));
    pids
}

/// Reader of the descriptors of a stopped tree.
#[derive(Debug)]
pub struct DescriptorReader {
    snapshot: Arc<FilesSnapshot>,
    pids: Vec<i32>,
}

/// Result of [`DescriptorReader::read`], for [`StoppedTree::finish_reading_descriptors`].
#[derive(Debug)]
pub struct FrozenDescriptors(FrozenFiles);

impl DescriptorReader {
    /// Returns the PIDs, as the caller sees them, of processes that have descriptors.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Reads the descriptors, from listings of all [`DescriptorReader::pids`] made since the processes are stopped.
    /// Sockets that are `expected` to be snapshotted without their descriptors cost least, and next to nothing if
    /// [`TreeTracker::prepare_freeze`] got the same `expected`. Call this in a thread in the tree's network namespace.
    ///
    /// # Errors
    /// As [`StoppedTree::read_descriptors`].
    pub fn read(
        &self,
        listings: Vec<DescriptorListing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) -> Result<FrozenDescriptors> {
        let frozen = self
            .snapshot
            .save_frozen_from_listings(&self.pids, listings, expected)?;
        Ok(FrozenDescriptors(frozen))
    }
}

fn changed_sockets(
    present: &BTreeMap<FileId, Arc<SocketStaticState>>,
    before: &BTreeMap<FileId, Arc<SocketStaticState>>,
) -> BTreeMap<FileId, SocketStaticState> {
    let fresh = present
        .iter()
        .filter(|(id, fixed)| before.get(id) != Some(*fixed));
    fresh.map(|(id, fixed)| (*id, (**fixed).clone())).collect()
}

fn removed_sockets(before: &FilesSnapshot, present: &BTreeSet<FileId>) -> BTreeSet<FileId> {
    let gone = before.sockets.keys().filter(|id| !present.contains(id));
    gone.copied().collect()
}
