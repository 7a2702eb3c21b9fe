//! Reading the descriptors of a running tree.

mod descriptor_copier;
mod file_being_saved;
mod freeze_prediction;
mod frozen_files;
mod inet_sockets;
mod open_file_saver;
mod outside_holders;
mod signal_owner;

pub use descriptor_copier::DescriptorCopier;
pub use file_being_saved::FileBeingSaved;
pub use frozen_files::{FrozenFiles, SocketFds};
pub use open_file_saver::{OpenFileSaver, SaveResult};
pub use outside_holders::OutsideHolders;
pub use signal_owner::has_owner;

use super::descriptor_listings::DescriptorListing;
use super::descriptor_survey::{FileKey, survey_descriptors};
use super::error::{DescriptorBlocker, FilesError};
use super::fdinfo_cache::FdInfoCache;
use super::image::{FileId, FilesImage, ObjectId};
use crate::sockets::SocketStaticState;
use freeze_prediction::FreezePrediction;
use open_file_saver::{PartialSave, TreeRunState};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limits of saving a tree's open files.
#[derive(Clone, Debug)]
pub struct SaveLimits {
    /// Largest file without a name, or memory file, that is moved by value.
    pub content_bytes_max: u64,
    /// Most directory entries that are searched for another name of a file.
    pub search_entries_max: usize,
    /// Device (`st_dev`) and inode of memory files and of files without a name that processes map, so that their
    /// content moves with the mappings.
    pub mapped_memory: BTreeSet<(u64, u64)>,
    /// True if files with names are read and hashed, so that an acceptor can check for equal files.
    pub hash_files: bool,
}

impl Default for SaveLimits {
    fn default() -> Self {
        Self {
            content_bytes_max: 256 << 20,
            search_entries_max: 100_000,
            mapped_memory: BTreeSet::new(),
            hash_files: true,
        }
    }
}

/// The descriptors of a tree, read while the tree ran.
#[derive(Debug)]
pub struct FilesSnapshot {
    /// Image that is sent to the acceptor before the freeze.
    pub image: FilesImage,
    /// Fixed properties of the tree's TCP and UDP sockets.
    pub sockets: BTreeMap<FileId, Arc<SocketStaticState>>,
    /// Descriptors from which the sockets can be copied ([`DescriptorCopier::copy`]), except sockets in flight.
    pub socket_fds: BTreeMap<FileId, ProcessFd>,
    limits: SaveLimits,
    numbers: AssignedNumbers,
    fdinfo_cache: FdInfoCache,
    /// Preparation for the freeze, taken by the first freeze.
    prediction: Mutex<Option<Box<FreezePrediction>>>,
}

/// Number of reads of a running tree in which a blocker must be found to be reported, and the pause between reads.
const SNAPSHOT_ATTEMPTS: usize = 6;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(20);

/// A process, by its PID as the caller sees it, and one of its descriptors.
pub type ProcessFd = (i32, u32);

/// Numbers assigned in an image, so that a later image gives the same file the same number.
#[derive(Clone, Debug, Default)]
pub struct AssignedNumbers {
    /// Open files by descriptor (table and number).
    files: HashMap<(u32, u32), (FileKey, FileId)>,
    /// Pipes and contents by mount and inode.
    objects: HashMap<(u32, u64), ObjectId>,
    /// Descriptors of epoll sets, which have long texts in `fdinfo`.
    epoll_sets: BTreeSet<ProcessFd>,
}

impl FilesSnapshot {
    /// Reads a running tree. Processes of the tree start and end, and open and close descriptors, meanwhile: only
    /// blockers found in each of several reads are reported; any other file that could not be read is left out, and a
    /// later read or the freeze decides about it. Files that are in the files snapshot `before` keep their numbers. `pids` lists
    /// the tree's processes.
    ///
    /// # Errors
    /// Same as [`Self::save`].
    pub fn take(
        pids: impl Fn() -> Vec<i32>,
        limits: &SaveLimits,
        previous: Option<&Self>,
    ) -> Result<Self, FilesError> {
        let mut lasting_blockers: Option<Vec<DescriptorBlocker>> = None;
        let mut failures = 0;
        for attempt in 1..=SNAPSHOT_ATTEMPTS {
            let (snapshot, blockers, failed) = match Self::take_once(&pids(), limits, previous) {
                Ok((snapshot, blockers, failed)) => (Some(snapshot), blockers, failed),
                Err(FilesError::Blocked(blockers)) => (None, blockers, None),
                Err(failed) => (None, Vec::new(), Some(failed)),
            };
            let is_complete = blockers.is_empty() && failed.is_none();
            failures += usize::from(failed.is_some());
            let lasting = match &mut lasting_blockers {
                Some(lasting) => {
                    lasting.retain(|one| blockers.contains(one));
                    lasting
                }
                none => none.insert(blockers),
            };
            match (snapshot, failed) {
                (Some(snapshot), _) if is_complete => return Ok(snapshot),
                _ if attempt < SNAPSHOT_ATTEMPTS => std::thread::sleep(ATTEMPT_PAUSE),
                _ if !lasting.is_empty() => {
                    return Err(FilesError::Blocked(std::mem::take(lasting)));
                }
                (None, Some(failed)) => return Err(failed),
                (_, Some(failed)) if failures == SNAPSHOT_ATTEMPTS => return Err(failed),
                (Some(snapshot), _) => return Ok(snapshot),
                (None, None) => {}
            }
        }
        Self::save(&pids(), limits)
    }

    fn take_once(
        pids: &[i32],
        limits: &SaveLimits,
        previous: Option<&Self>,
    ) -> Result<(Self, Vec<DescriptorBlocker>, Option<FilesError>), FilesError> {
        let saver = OpenFileSaver::new(
            pids,
            survey_descriptors(pids)?,
            limits,
            previous,
            TreeRunState::Running,
        );
        let PartialSave {
            image,
            numbers: known,
            inet_sockets: inet,
            blockers,
            first_error: failed,
        } = saver.save_movable_files()?;
        let mut snapshot = Self {
            image,
            sockets: inet.socket_statics,
            socket_fds: inet.socket_fds,
            limits: limits.clone(),
            fdinfo_cache: FdInfoCache::open(&known.epoll_sets),
            prediction: Mutex::default(),
            numbers: known,
        };
        // Sizes that the kernel tunes by itself are no reason to create a socket anew.
        for (id, fixed) in &mut snapshot.sockets {
            let previous = previous.and_then(|before| before.sockets.get(id));
            if let Some(previous) = previous.filter(|known| known.is_compatible_with(fixed)) {
                fixed.clone_from(previous);
            }
        }
        Ok((snapshot, blockers, failed))
    }

    /// Reads the descriptors of processes that may be running. `pids` are PIDs in the caller's PID namespace, without
    /// thread IDs. The calling thread must be in the network namespace of the processes.
    ///
    /// # Errors
    /// [`FilesError::Blocked`] with every descriptor that cannot move; [`FilesError::Kernel`].
    pub fn save(pids: &[i32], limits: &SaveLimits) -> Result<Self, FilesError> {
        let (snapshot, blockers, failed) = Self::take_once(pids, limits, None)?;
        if !blockers.is_empty() {
            return Err(FilesError::Blocked(blockers));
        }
        failed.map_or(Ok(snapshot), Err)
    }

    /// Prepares for the freeze, from a listing of all `pids` made since this files snapshot was read. If the listing matches the
    /// files snapshot, unchanged files cost the freeze no more than a comparison, and sockets in `expected`, which the caller
    /// expects to read without a descriptor, cost nothing else. To be called while the tree runs.
    pub fn predict_freeze(
        &self,
        pids: &[i32],
        listings: Vec<DescriptorListing>,
        expected: &Arc<BTreeSet<FileId>>,
    ) {
        let prepared = FreezePrediction::new(self, pids, listings, expected);
        *self.lock_prediction() = prepared.map(Box::new);
    }

    /// Returns true if the next freeze has a preparation to compare with.
    #[must_use]
    pub fn has_prediction(&self) -> bool {
        self.lock_prediction().is_some()
    }

    fn lock_prediction(&self) -> MutexGuard<'_, Option<Box<FreezePrediction>>> {
        let prepared = self.prediction.lock();
        prepared.unwrap_or_else(PoisonError::into_inner)
    }
}
