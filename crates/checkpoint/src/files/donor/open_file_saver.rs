//! A single read of a tree: saves each open file once, including files found in flight on the way.

use super::outside_holders::OutsideHolders;
use super::signal_owner::{has_owner, nofile_limits, read_signal_owner};
use super::{
    AssignedNumbers, DescriptorCopier, FileBeingSaved, FilesSnapshot, ProcessFd, SaveLimits,
    inet_sockets,
};
use crate::files::descriptor_survey::{
    DescriptorSurvey, FdSource, SurveyedOpenFiles, file_key, read_own_fdinfo, status_inner_pid,
};
use crate::files::error::{BlockReason, DescriptorBlocker, FilesError, StepContext};
use crate::files::fdinfo::FdInfo;
use crate::files::image::{
    DescriptorSlot, DescriptorTable, FileId, FilesImage, ObjectId, OpenFile, OpenFileKind,
};
use crate::files::{kinds, lock_risks};
use crate::procfs::ProcStat;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Reason why an open file was not saved.
#[derive(Debug)]
pub enum SaveFailure {
    /// The file cannot move.
    Reason(BlockReason),
    /// The kernel refused a step.
    Failed(FilesError),
}

impl From<BlockReason> for SaveFailure {
    fn from(reason: BlockReason) -> Self {
        Self::Reason(reason)
    }
}

impl From<FilesError> for SaveFailure {
    fn from(error: FilesError) -> Self {
        Self::Failed(error)
    }
}

/// Result of reading a running tree.
#[derive(Debug)]
pub struct PartialSave {
    pub image: FilesImage,
    pub numbers: AssignedNumbers,
    pub inet_sockets: inet_sockets::InetSockets,
    /// Descriptors that could not move at that moment.
    pub blockers: Vec<DescriptorBlocker>,
    /// The first step that the kernel refused.
    pub first_error: Option<FilesError>,
}

/// State of the tree while it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeRunState {
    /// The tree runs.
    Running,
    /// The tree is stopped.
    Frozen,
}

/// Result of saving a part of an open file.
pub type SaveResult<T> = Result<T, SaveFailure>;

/// Reader of a tree's open files.
#[derive(Debug)]
pub struct OpenFileSaver<'a> {
    /// Limits of saving.
    pub limits: SaveLimits,
    /// True if the tree is stopped, so that data for its descriptors can be read completely.
    pub frozen: bool,
    /// All open files.
    pub open_files: SurveyedOpenFiles,
    /// Image built from the open files.
    pub image: FilesImage,
    /// Files held by processes outside the tree.
    pub outside_holders: OutsideHolders,
    /// The kernel's list of Unix sockets, once it was queried.
    pub unix: Option<kinds::unix::DiagSockets>,
    /// Pipes with an open end that was not found yet: index of the open file, and text in `/proc/PID/fd`.
    pub unpaired_pipes: Vec<(usize, String)>,
    /// The tree's PIDs as the caller sees them.
    pub pids: Vec<i32>,
    /// TCP and UDP sockets found.
    pub inet_sockets: inet_sockets::InetSockets,
    /// First step that the kernel refused while the tree ran: the file concerned is left out.
    first_error: Option<FilesError>,
    /// Descriptor tables in which the open files were found.
    pub(super) survey: DescriptorSurvey,
    /// Numbers of the first of `open_files`.
    pub(super) ids: Vec<FileId>,
    snapshot: Option<&'a FilesSnapshot>,
    used_ids: HashSet<FileId>,
    next_file: FileId,
    objects: HashMap<(u32, u64), ObjectId>,
    epoll_sets: BTreeSet<ProcessFd>,
    next_object: ObjectId,
    copier: DescriptorCopier,
}

impl<'a> OpenFileSaver<'a> {
    /// Creates a saver for the descriptors of a survey.
    pub fn new(
        pids: &[i32],
        survey: DescriptorSurvey,
        limits: &SaveLimits,
        snapshot: Option<&'a FilesSnapshot>,
        stage: TreeRunState,
    ) -> Self {
        let open_files = SurveyedOpenFiles::new(&survey);
        Self::with_ids(
            pids,
            (survey, open_files, Vec::new()),
            limits,
            snapshot,
            stage,
        )
    }

    /// Creates a saver for descriptors that are grouped already; `ids` are the numbers of the first open files.
    pub(super) fn with_ids(
        pids: &[i32],
        (survey, open_files, ids): (DescriptorSurvey, SurveyedOpenFiles, Vec<FileId>),
        limits: &SaveLimits,
        snapshot: Option<&'a FilesSnapshot>,
        stage: TreeRunState,
    ) -> Self {
        let (frozen, outside) = match stage {
            TreeRunState::Frozen => (true, OutsideHolders::default()),
            TreeRunState::Running => (false, OutsideHolders::read(pids)),
        };
        let numbers = snapshot.map(|snapshot| &snapshot.numbers);
        let next = |numbers: Option<u32>| numbers.map_or(0, |last| last + 1);
        Self {
            limits: limits.clone(),
            frozen,
            open_files,
            image: FilesImage::default(),
            outside_holders: outside,
            unix: None,
            unpaired_pipes: Vec::new(),
            pids: pids.to_vec(),
            inet_sockets: inet_sockets::InetSockets::default(),
            first_error: None,
            survey,
            ids,
            snapshot,
            used_ids: HashSet::new(),
            next_file: next(
                snapshot.and_then(|snapshot| snapshot.image.files.keys().next_back().copied()),
            ),
            objects: numbers
                .map(|known| known.objects.clone())
                .unwrap_or_default(),
            epoll_sets: BTreeSet::new(),
            next_object: next(numbers.and_then(|known| known.objects.values().max().copied())),
            copier: DescriptorCopier::default(),
        }
    }

    /// Saves all open files and descriptor tables of the tree.
    pub fn save_tree(
        mut self,
    ) -> Result<(FilesImage, AssignedNumbers, inet_sockets::InetSockets), FilesError> {
        self.assign_ids();
        self.save(&[], 0)?;
        let numbers = self.fill_tables()?;
        Ok((self.image, numbers, self.inet_sockets))
    }

    /// Saves the movable files of a running tree. The others are left out together with everything that refers to them,
    /// and are reported.
    pub fn save_movable_files(mut self) -> Result<PartialSave, FilesError> {
        self.assign_ids();
        let blockers = self.save_all(&[], 0)?;
        self.image.drop_dangling();
        let numbers = self.fill_tables()?;
        // Tables of processes that have ended are left out, so their locks must go too.
        self.image.drop_dangling();
        let files = &self.image.files;
        self.inet_sockets
            .socket_statics
            .retain(|id, _| files.contains_key(id));
        self.inet_sockets
            .socket_fds
            .retain(|id, _| files.contains_key(id));
        Ok(PartialSave {
            image: self.image,
            numbers,
            inet_sockets: self.inet_sockets,
            blockers,
            first_error: self.first_error,
        })
    }

    /// Saves these open files, and all from index `others` on: files in flight are found on the way and appended.
    pub(super) fn save(&mut self, indices: &[usize], others: usize) -> Result<(), FilesError> {
        let blockers = self.save_all(indices, others)?;
        if blockers.is_empty() {
            return Ok(());
        }
        Err(FilesError::Blocked(blockers))
    }

    fn save_all(
        &mut self,
        these: &[usize],
        others: usize,
    ) -> Result<Vec<DescriptorBlocker>, FilesError> {
        let mut blockers = Vec::new();
        for index in these {
            self.save_one(*index, &mut blockers)?;
        }
        let mut index = others;
        while index < self.open_files.list.len() {
            self.save_one(index, &mut blockers)?;
            index += 1;
        }
        for (index, link) in kinds::pipe::pipes_open_outside(self) {
            blockers.push(self.blocker(index, link, BlockReason::OtherEndOutside(None)));
        }
        Ok(blockers)
    }

    fn save_one(
        &mut self,
        index: usize,
        blockers: &mut Vec<DescriptorBlocker>,
    ) -> Result<(), FilesError> {
        let mut link = String::new();
        match self.save_open_file(index, &mut link) {
            Ok(Some(file)) => {
                self.image.files.insert(self.ids[index], file);
            }
            Ok(None) => {}
            Err(SaveFailure::Failed(error)) if self.frozen => return Err(error),
            // Usually the file was closed, or the number was reused, during the read.
            Err(SaveFailure::Failed(error)) => drop(self.first_error.get_or_insert(error)),
            Err(SaveFailure::Reason(reason)) => blockers.push(self.blocker(index, link, reason)),
        }
        Ok(())
    }

    /// Returns the number of an open file of the tree.
    pub fn file_id(&self, index: usize) -> FileId {
        self.ids[index]
    }

    /// Returns the number of an open file in flight; it is saved after the open files in descriptor tables.
    pub fn add_in_flight(&mut self, copy: OwnedFd) -> Result<FileId, FilesError> {
        let info = read_own_fdinfo(&copy).with_step("/proc/self/fdinfo")?;
        let index = self.open_files.add(FdSource::InFlight(copy), &info);
        self.assign_ids();
        Ok(self.ids[index])
    }

    /// Returns the number of a pipe or content.
    pub fn object_id(&mut self, info: &FdInfo) -> ObjectId {
        let next = &mut self.next_object;
        *self
            .objects
            .entry((info.mount, info.inode))
            .or_insert_with(|| {
                *next += 1;
                *next - 1
            })
    }

    /// Returns the PID that a process of the tree sees for itself, or `None` for other processes. A zombie has no
    /// descriptors, and moves with its parent.
    pub fn inner_pid(&self, pid: i32) -> Option<i32> {
        let holders = self.survey.values().flat_map(|table| &table.holders);
        let found = holders.into_iter().find(|holder| holder.pid == pid);
        let zombie = || {
            let stat = ProcStat::read(pid).ok()?;
            let is_ours = stat.state == 'Z' && self.pids.contains(&stat.parent);
            is_ours.then(|| status_inner_pid(pid))?
        };
        found.map(|holder| holder.inner_pid).or_else(zombie)
    }

    fn assign_ids(&mut self) {
        for index in self.ids.len()..self.open_files.list.len() {
            let previous_id = self
                .previous_id(index)
                .filter(|id| !self.used_ids.contains(id));
            let id = previous_id.unwrap_or_else(|| {
                self.next_file += 1;
                self.next_file - 1
            });
            self.used_ids.insert(id);
            self.ids.push(id);
        }
    }

    fn previous_id(&self, index: usize) -> Option<FileId> {
        let numbers = &self.snapshot?.numbers;
        let open_file = &self.open_files.list[index];
        let key = file_key(&open_file.info);
        open_file.slots.iter().find_map(|slot| {
            let (before, id) = numbers.files.get(slot)?;
            (*before == key).then_some(*id)
        })
    }

    /// Saves an open file; `None` for a descriptor that a running process closed meanwhile.
    fn save_open_file(&mut self, index: usize, link: &mut String) -> SaveResult<Option<OpenFile>> {
        let id = self.ids[index];
        let before = self
            .snapshot
            .and_then(|snapshot| snapshot.image.files.get(&id));
        let unchanged = inet_sockets::saved_if_unchanged(&self.open_files.list[index].info, before);
        let unchanged = unchanged.filter(|_| self.frozen);
        if unchanged.is_some()
            && self.open_files.list[index].has_identity
            && self.inet_sockets.skip_copy.contains(&id)
        {
            self.record_socket_fd(index);
            return Ok(unchanged);
        }
        let Some(copy) = self.copy(index)? else {
            return Ok(None);
        };
        // Without a listing, it is unknown yet if the file has an owner for its signals.
        let sends_no_signals = || -> Result<bool, FilesError> {
            Ok(self.open_files.list[index].has_identity || !has_owner(copy.as_fd())?)
        };
        if unchanged.is_some() && sends_no_signals()? {
            let previous = self.snapshot.and_then(|snapshot| snapshot.sockets.get(&id));
            let previous = previous.map(|known| &**known);
            self.record_socket_fd(index);
            self.inet_sockets.add_copy(id, copy, previous)?;
            return Ok(unchanged);
        }
        let info = self.open_files.list[index].info.clone();
        let before = before.cloned();
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let target = fs::read_link(&path).with_step(&path)?;
        *link = target.to_string_lossy().into_owned();
        let source = FileBeingSaved {
            copy,
            link: link.clone(),
            path: target.into(),
            info,
            open_file_index: index,
            previous: before,
        };
        let locks = self.read_locks(&source)?;
        let owner = read_signal_owner(self, &source)?;
        let kind = kinds::save(self, &source)?;
        let process_fd = self.open_files.list[index].source.process_fd();
        if let Some(pid) = self
            .outside_holders
            .holder_of_file(&source.link, process_fd)
        {
            return Err(BlockReason::HeldOutside(pid).into());
        }
        let flags = source.info.flags;
        if let (OpenFileKind::Epoll { .. }, FdSource::Process(pid, fd)) =
            (&kind, &self.open_files.list[index].source)
        {
            self.epoll_sets.insert((*pid, *fd));
        }
        if matches!(kind, OpenFileKind::Inet { .. }) {
            self.record_socket_fd(index);
            if self.frozen {
                self.inet_sockets.add_copy(id, source.copy, None)?;
            } else {
                self.inet_sockets.read_static(id, source.fd())?;
            }
        }
        Ok(Some(OpenFile {
            flags,
            owner,
            locks,
            kind,
        }))
    }

    fn record_socket_fd(&mut self, index: usize) {
        if let FdSource::Process(pid, fd) = self.open_files.list[index].source {
            self.inet_sockets
                .socket_fds
                .insert(self.ids[index], (pid, fd));
        }
    }

    fn copy(&mut self, index: usize) -> SaveResult<Option<OwnedFd>> {
        let address = match &self.open_files.list[index].source {
            FdSource::InFlight(copy) => return Ok(Some(copy.try_clone().with_step("dup")?)),
            FdSource::Process(pid, fd) => (*pid, *fd),
        };
        match self.copier.copy(address) {
            // A running process has closed the descriptor, or has ended.
            Err(error)
                if !self.frozen
                    && matches!(error.raw_os_error(), Some(libc::EBADF | libc::ESRCH)) =>
            {
                Ok(None)
            }
            outcome => {
                let copy = outcome.with_step("pidfd_getfd")?;
                // The descriptor was closed too, and its number is reused already.
                let is_other_file = || -> Result<bool, FilesError> {
                    let found = rustix::fs::fstat(&copy).with_step("fstat")?;
                    Ok(found.st_ino != self.open_files.list[index].info.inode)
                };
                Ok((self.frozen || !is_other_file()?).then_some(copy))
            }
        }
    }

    /// Returns the locks of an open file. `fdinfo` shows a lock only at descriptors of the table, or of the open
    /// file, that took it.
    fn read_locks(
        &self,
        source: &FileBeingSaved,
    ) -> SaveResult<Vec<super::super::image::FileLock>> {
        let mut locks = Vec::new();
        for (table, fd) in &self.open_files.list[source.open_file_index].slots {
            let descriptors = &self.survey[table].descriptors;
            let Ok(at) = descriptors.binary_search_by_key(fd, |one| one.number) else {
                continue;
            };
            for lock in descriptors[at]
                .info
                .locks(*table)
                .map_err(|_| BlockReason::Lease)?
            {
                if !locks.contains(&lock) {
                    locks.push(lock);
                }
            }
        }
        let info = &source.info;
        match lock_risks::shared_fs_risk(source.fd(), info, &locks) {
            Some(reason) => Err(BlockReason::Lock(reason).into()),
            None => Ok(locks),
        }
    }

    fn fill_tables(&mut self) -> Result<AssignedNumbers, FilesError> {
        let mut numbers = AssignedNumbers::default();
        for (open_file, file) in self.open_files.list.iter().zip(&self.ids) {
            if self.image.files.contains_key(file) {
                for slot in &open_file.slots {
                    let key = file_key(&open_file.info);
                    numbers.files.insert(*slot, (key, *file));
                }
            }
        }
        for (number, seen) in &self.survey {
            let slots = seen.descriptors.iter().filter_map(|one| {
                let (_, file) = numbers.files.get(&(*number, one.number))?;
                let slot = DescriptorSlot {
                    file: *file,
                    close_on_exec: one.info.close_on_exec,
                };
                Some((one.number, slot))
            });
            let table = DescriptorTable {
                pids: seen.holders.iter().map(|holder| holder.inner_pid).collect(),
                slots: slots.collect(),
                descriptors_max: match nofile_limits(seen.holders[0].pid) {
                    Err(_) if !self.frozen => continue,
                    found => found?,
                },
            };
            self.image.tables.insert(*number, table);
        }
        numbers.objects = std::mem::take(&mut self.objects);
        numbers.epoll_sets = std::mem::take(&mut self.epoll_sets);
        Ok(numbers)
    }

    fn blocker(&self, index: usize, path: String, reason: BlockReason) -> DescriptorBlocker {
        let (pid, fd) = match &self.open_files.list[index].source {
            FdSource::Process(pid, fd) => (*pid, Some(*fd)),
            FdSource::InFlight(_) => (self.pids[0], None),
        };
        DescriptorBlocker {
            pid,
            fd,
            path,
            reason,
        }
    }
}
