//! Reading the descriptors of a stopped tree.

use super::beside::descriptors_max;
use super::prepared::Prepared;
use super::saver::{Saver, Stage, Stop};
use super::{Address, Copier, Draft, inet};
use crate::process::files::error::{At, Blocker, FilesError, Reason};
use crate::process::files::image::FileId;
use crate::process::files::image::changes::Changes;
use crate::process::files::listed::{self, Listing};
use crate::process::files::survey::{Survey, survey};
use crate::process::sockets::SocketStatic;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The descriptors of a stopped tree.
#[derive(Debug)]
pub struct Frozen {
    /// Changes since the draft.
    pub changes: Changes,
    /// TCP and UDP sockets of the draft that the tree no longer has.
    pub gone: BTreeSet<FileId>,
    /// Copies of the tree's TCP and UDP sockets; with [`Draft::save_frozen_listed`], the sockets in `seen` are not
    /// copied.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Descriptors from which all sockets can be copied, except sockets in flight.
    pub places: Places,
    /// Fixed properties of the copied sockets for which the draft has no valid ones.
    pub fixed: BTreeMap<FileId, Arc<SocketStatic>>,
}

/// Descriptors of the TCP and UDP sockets of a stopped tree.
#[derive(Debug, Default)]
pub struct Places {
    found: BTreeMap<FileId, Address>,
    /// Set if all other sockets are where the draft has them. The value is kept because dropping it would take time in
    /// the freeze.
    prepared: Option<Box<Prepared>>,
}

impl Places {
    /// Returns the descriptor of a socket.
    #[must_use]
    pub fn get(&self, draft: &Draft, id: FileId) -> Option<Address> {
        let drafted = || draft.places.get(&id).filter(|_| self.prepared.is_some());
        self.found.get(&id).or_else(drafted).copied()
    }

    /// Returns the descriptors of all sockets.
    #[must_use]
    pub fn all(&self, draft: &Draft) -> BTreeMap<FileId, Address> {
        let drafted = draft.places.iter().filter(|_| self.prepared.is_some());
        let all = drafted.chain(&self.found);
        all.map(|(id, place)| (*id, *place)).collect()
    }

    /// Returns true if the freeze used the preparation made before it.
    #[must_use]
    pub fn were_prepared(&self) -> bool {
        self.prepared.is_some()
    }
}

impl Draft {
    /// Reads the descriptors of the same tree while all of its threads are stopped. The tree is not changed.
    ///
    /// # Errors
    /// Same as [`Self::save`]; some blockers are temporary, so that another attempt may succeed.
    pub fn save_frozen(&self, pids: &[i32]) -> Result<Frozen, FilesError> {
        self.finish(pids, survey(pids)?, Arc::default())
    }

    /// Same as [`Self::save_frozen`], from a listing of all `pids` that was made since they were stopped. Sockets of
    /// the draft that are in `seen`, because the caller reads their state without a descriptor, are not copied and cost
    /// no system call.
    ///
    /// # Errors
    /// Same as [`Self::save_frozen`].
    pub fn save_frozen_listed(
        &self,
        pids: &[i32],
        listings: Vec<Listing>,
        seen: &Arc<BTreeSet<FileId>>,
    ) -> Result<Frozen, FilesError> {
        let prepared = self.prepared().take();
        let prepared = prepared.filter(|prepared| prepared.is_for(pids, seen));
        if let Some(mut prepared) = prepared
            && prepared.renew(&listings, &self.kept)
        {
            return self.finish_prepared(pids, prepared, seen);
        }
        let survey = listed::survey(pids, listings, &self.kept)?;
        self.finish(pids, survey, Arc::clone(seen))
    }

    /// Makes the copies that [`Self::save_frozen_listed`] has left out, for the sockets in `unseen`: the caller could
    /// not read their state after all.
    ///
    /// # Errors
    /// Same as [`Self::save_frozen`].
    pub fn copy_unseen(&self, frozen: &mut Frozen, unseen: &[FileId]) -> Result<(), FilesError> {
        let held = std::mem::take(&mut frozen.sockets);
        let mut found = inet::Found::of(held, std::mem::take(&mut frozen.fixed));
        let mut copier = Copier::default();
        for &id in unseen {
            let place = frozen.places.get(self, id);
            let Some(place) = place.filter(|_| !found.held.contains_key(&id)) else {
                continue;
            };
            let copy = copier.copy(place).at("pidfd_getfd")?;
            let known = self.sockets.get(&id).map(|known| &**known);
            found.hold(id, copy, known).map_err(|stop| match stop {
                Stop::Failed(error) => error,
                Stop::Reason(reason) => FilesError::Blocked(vec![blocker(place, reason)]),
            })?;
        }
        (frozen.sockets, frozen.fixed) = (found.held, found.fixed);
        Ok(())
    }

    fn finish(
        &self,
        pids: &[i32],
        survey: Survey,
        seen: Arc<BTreeSet<FileId>>,
    ) -> Result<Frozen, FilesError> {
        let mut saver = Saver::new(pids, survey, &self.limits, Some(self), Stage::Frozen);
        saver.inet.seen = seen;
        let (image, _, inet) = saver.run()?;
        let drafted = self.sockets.keys();
        Ok(Frozen {
            changes: image.changes_since(&self.image),
            gone: drafted
                .filter(|id| !image.files.contains_key(id))
                .copied()
                .collect(),
            sockets: inet.held,
            places: Places {
                found: inet.places,
                prepared: None,
            },
            fixed: inet.fixed,
        })
    }

    /// Completes a freeze in which every descriptor refers to the same file as in the draft: only files that may have
    /// changed are read.
    fn finish_prepared(
        &self,
        pids: &[i32],
        mut prepared: Box<Prepared>,
        seen: &Arc<BTreeSet<FileId>>,
    ) -> Result<Frozen, FilesError> {
        let open = prepared.take();
        let (stage, others) = (Stage::Frozen, open.2.len());
        let mut saver = Saver::numbered(pids, open, &self.limits, Some(self), stage);
        saver.inet.seen = Arc::clone(seen);
        saver.save(prepared.loud(), others)?;
        let mut limits = BTreeMap::new();
        for (number, table) in &saver.survey {
            limits.insert(*number, descriptors_max(table.holders[0].pid)?);
        }
        prepared.give_back((saver.survey, saver.pool, saver.ids));
        Ok(Frozen {
            changes: saver.image.changes_among(&self.image, &limits),
            gone: BTreeSet::new(),
            sockets: saver.inet.held,
            places: Places {
                found: saver.inet.places,
                prepared: Some(prepared),
            },
            fixed: saver.inet.fixed,
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
