//! Reading the descriptors of a stopped tree.

use super::freeze_prediction::FreezePrediction;
use super::open_file_saver::{OpenFileSaver, SaveFailure, TreeRunState};
use super::signal_owner::nofile_limits;
use super::{DescriptorCopier, FilesSnapshot, ProcessFd, inet_sockets};
use crate::files::descriptor_listings::{self, DescriptorListing};
use crate::files::descriptor_survey::{DescriptorSurvey, survey_descriptors};
use crate::files::error::{BlockReason, DescriptorBlocker, FilesError, StepContext};
use crate::files::image::FileId;
use crate::files::image::changes::FilesImageChanges;
use crate::sockets::SocketStaticState;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The descriptors of a stopped tree.
#[derive(Debug)]
pub struct FrozenFiles {
    /// Changes since the files snapshot.
    pub changes: FilesImageChanges,
    /// TCP and UDP sockets of the files snapshot that the tree no longer has.
    pub closed_sockets: BTreeSet<FileId>,
    /// Copies of the tree's TCP and UDP sockets; with [`FilesSnapshot::save_frozen_from_listings`], the sockets in `skip_copy` are not
    /// copied.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Descriptors from which all sockets can be copied, except sockets in flight.
    pub socket_fds: SocketFds,
    /// Fixed properties of the copied sockets for which the files snapshot has no valid ones.
    pub statics: BTreeMap<FileId, Arc<SocketStaticState>>,
}

/// Descriptors of the TCP and UDP sockets of a stopped tree.
#[derive(Debug, Default)]
pub struct SocketFds {
    found_in_freeze: BTreeMap<FileId, ProcessFd>,
    /// Set if all other sockets are where the files snapshot has them. The value is kept because dropping it would take time in
    /// the freeze.
    used_prediction: Option<Box<FreezePrediction>>,
}

impl SocketFds {
    /// Returns the descriptor of a socket.
    #[must_use]
    pub fn get(&self, snapshot: &FilesSnapshot, id: FileId) -> Option<ProcessFd> {
        let in_snapshot = || {
            snapshot
                .socket_fds
                .get(&id)
                .filter(|_| self.used_prediction.is_some())
        };
        self.found_in_freeze.get(&id).or_else(in_snapshot).copied()
    }

    /// Returns the descriptors of all sockets.
    #[must_use]
    pub fn all(&self, snapshot: &FilesSnapshot) -> BTreeMap<FileId, ProcessFd> {
        let in_snapshot = snapshot
            .socket_fds
            .iter()
            .filter(|_| self.used_prediction.is_some());
        let all = in_snapshot.chain(&self.found_in_freeze);
        all.map(|(id, place)| (*id, *place)).collect()
    }

    /// Returns true if the freeze used the preparation made before it.
    #[must_use]
    pub fn is_from_prediction(&self) -> bool {
        self.used_prediction.is_some()
    }
}

impl FilesSnapshot {
    /// Reads the descriptors of the same tree while all of its threads are stopped. The tree is not changed.
    ///
    /// # Errors
    /// Same as [`Self::save`]; some blockers are temporary, so that another attempt may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<FrozenFiles, FilesError> {
        self.finish(pids, survey_descriptors(pids)?, Arc::default())
    }

    /// Same as [`Self::save_frozen`], from a listing of all `pids` that was made since they were stopped. Sockets of
    /// the files snapshot that are in `skip_copy`, because the caller reads their state without a descriptor, are not copied and cost
    /// no system call.
    ///
    /// # Errors
    /// Same as [`Self::save_frozen`].
    pub fn save_frozen_from_listings(
        &self,
        pids: &[i32],
        listings: Vec<DescriptorListing>,
        skip_copy: &Arc<BTreeSet<FileId>>,
    ) -> Result<FrozenFiles, FilesError> {
        let prepared = self.lock_prediction().take();
        let prepared = prepared.filter(|prepared| prepared.covers(pids, skip_copy));
        if let Some(mut prepared) = prepared
            && prepared.update(&listings, &self.fdinfo_cache)
        {
            return self.finish_from_prediction(pids, prepared, skip_copy);
        }
        let survey = descriptor_listings::survey_from_listings(pids, listings, &self.fdinfo_cache)?;
        self.finish(pids, survey, Arc::clone(skip_copy))
    }

    /// Makes the copies that [`Self::save_frozen_from_listings`] has left out, for the sockets in `missing`: the caller could
    /// not read their state after all.
    ///
    /// # Errors
    /// Same as [`Self::save_frozen`].
    pub fn copy_missing_sockets(
        &self,
        frozen: &mut FrozenFiles,
        missing: &[FileId],
    ) -> Result<(), FilesError> {
        let copies = std::mem::take(&mut frozen.sockets);
        let mut found =
            inet_sockets::InetSockets::from_copies(copies, std::mem::take(&mut frozen.statics));
        let mut copier = DescriptorCopier::default();
        for &id in missing {
            let process_fd = frozen.socket_fds.get(self, id);
            let Some(process_fd) = process_fd.filter(|_| !found.copies.contains_key(&id)) else {
                continue;
            };
            let copy = copier.copy(process_fd).with_step("pidfd_getfd")?;
            let previous = self.sockets.get(&id).map(|known| &**known);
            found
                .add_copy(id, copy, previous)
                .map_err(|stop| match stop {
                    SaveFailure::Failed(error) => error,
                    SaveFailure::Reason(reason) => {
                        FilesError::Blocked(vec![blocker(process_fd, reason)])
                    }
                })?;
        }
        (frozen.sockets, frozen.statics) = (found.copies, found.socket_statics);
        Ok(())
    }

    fn finish(
        &self,
        pids: &[i32],
        survey: DescriptorSurvey,
        skip_copy: Arc<BTreeSet<FileId>>,
    ) -> Result<FrozenFiles, FilesError> {
        let mut saver =
            OpenFileSaver::new(pids, survey, &self.limits, Some(self), TreeRunState::Frozen);
        saver.inet_sockets.skip_copy = skip_copy;
        let (image, _, inet) = saver.save_tree()?;
        let snapshot_ids = self.sockets.keys();
        Ok(FrozenFiles {
            changes: image.changes_since(&self.image),
            closed_sockets: snapshot_ids
                .filter(|id| !image.files.contains_key(id))
                .copied()
                .collect(),
            sockets: inet.copies,
            socket_fds: SocketFds {
                found_in_freeze: inet.socket_fds,
                used_prediction: None,
            },
            statics: inet.socket_statics,
        })
    }

    /// Completes a freeze in which every descriptor refers to the same file as in the files snapshot: only files that may have
    /// changed are read.
    fn finish_from_prediction(
        &self,
        pids: &[i32],
        mut prepared: Box<FreezePrediction>,
        skip_copy: &Arc<BTreeSet<FileId>>,
    ) -> Result<FrozenFiles, FilesError> {
        let open = prepared.take_open_files();
        let (stage, others) = (TreeRunState::Frozen, open.2.len());
        let mut saver = OpenFileSaver::with_ids(pids, open, &self.limits, Some(self), stage);
        saver.inet_sockets.skip_copy = Arc::clone(skip_copy);
        saver.save(prepared.required_reads(), others)?;
        let mut limits = BTreeMap::new();
        for (number, table) in &saver.survey {
            limits.insert(*number, nofile_limits(table.holders[0].pid)?);
        }
        prepared.put_back((saver.survey, saver.open_files, saver.ids));
        Ok(FrozenFiles {
            changes: saver.image.changes_of_same_files(&self.image, &limits),
            closed_sockets: BTreeSet::new(),
            sockets: saver.inet_sockets.copies,
            socket_fds: SocketFds {
                found_in_freeze: saver.inet_sockets.socket_fds,
                used_prediction: Some(prepared),
            },
            statics: saver.inet_sockets.socket_statics,
        })
    }
}

fn blocker((pid, fd): ProcessFd, reason: BlockReason) -> DescriptorBlocker {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
    DescriptorBlocker {
        pid,
        fd: Some(fd),
        path: link.to_string_lossy().into_owned(),
        reason,
    }
}
