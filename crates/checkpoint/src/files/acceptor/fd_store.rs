//! The open files of an image, made once, at numbers where they are in the way of no other descriptor.

use super::{ProvidedFiles, named_file_check};
use crate::file_rights::{FileOpener, FileRights};
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::changes::PreviousValues;
use crate::files::image::{FileId, FilesImage, ObjectId, OpenFileKind};
use crate::files::kinds::{self, epoll, unix::StagingDirectory};
use crate::files::syscalls;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Numbers above the tree's that stay free for descriptors that the tree opens before it is stopped.
const FREE_NUMBERS_MARGIN: u32 = 64;
/// Most numbers at the top of the limit that are reserved for the caller.
const CALLER_FDS_MAX: u32 = 4096;
/// Highest limit of descriptors that is requested: the kernel's table grows to the highest number in use.
const NOFILE_LIMIT_MAX: u64 = 1 << 18;

/// The open files of an image. The store uses the calling process's descriptor numbers: the caller's own descriptors
/// must be at [`FdStore::caller_fd_floor`] or above while a store exists.
#[derive(Debug)]
pub struct FdStore {
    /// Image of the files made so far.
    pub(in crate::files) image: FilesImage,
    /// Pipes and contents, kept open until they are filled.
    pub(in crate::files) object_fds: BTreeMap<ObjectId, OwnedFd>,
    /// Ends of new pipes and files of new contents that no open file has taken yet, by access mode.
    pub(in crate::files) unclaimed_ends: BTreeMap<(ObjectId, u32), OwnedFd>,
    /// Other ends of Unix sockets with closed peers.
    pub(in crate::files) closed_peers: BTreeMap<FileId, OwnedFd>,
    /// Directories with socket files that are not published yet.
    pub(in crate::files) staging_directories: Vec<StagingDirectory>,
    /// Memory that moves with its mappings.
    pub(in crate::files) memory: BTreeMap<(u64, u64), OwnedFd>,
    /// Opener of the files that the image names.
    pub(in crate::files) opener: FileOpener,
    pub(super) files: BTreeMap<FileId, OwnedFd>,
    /// Number of times that each file was made.
    pub(super) versions: HashMap<FileId, u32>,
    assigned_numbers: HashMap<FileId, u32>,
    pub(super) private_floor: u32,
    /// True if descriptors may have changed since the last call of [`Self::take_slots_changed`].
    pub(super) slots_changed: bool,
}

impl FdStore {
    /// Verifies an image, then makes all its open files as far as possible while the donor still runs. Only abstract
    /// socket names become visible to other processes. `provided` contains sockets that have been made already (others may
    /// follow with [`Self::apply_final`]) and all memory that is restored elsewhere.
    ///
    /// # Errors
    /// [`FilesError::Refused`] names a resource that is missing or differs here; [`FilesError::Kernel`]. The donor is
    /// not affected.
    pub fn prepare(image: FilesImage, provided: ProvidedFiles) -> Result<Self, FilesError> {
        Self::prepare_with_rights(image, provided, FileRights::Root)
    }

    /// Same as [`Self::prepare`], for a tree that may not open everything.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`FilesRefusal::NotAllowed`] for a file that the tree may not open.
    pub fn prepare_with_rights(
        image: FilesImage,
        provided: ProvidedFiles,
        rights: FileRights,
    ) -> Result<Self, FilesError> {
        let mut opener = FileOpener::new(rights);
        named_file_check::verify(&mut opener, &image)?;
        let homes = assign_numbers(&image);
        let mut store = Self {
            private_floor: image.descriptor_ceiling() + FREE_NUMBERS_MARGIN,
            image,
            object_fds: BTreeMap::new(),
            unclaimed_ends: BTreeMap::new(),
            closed_peers: BTreeMap::new(),
            staging_directories: Vec::new(),
            memory: BTreeMap::new(),
            files: BTreeMap::new(),
            versions: HashMap::new(),
            assigned_numbers: homes,
            opener,
            slots_changed: true,
        };
        store.reserve_numbers()?;
        let ids: BTreeSet<FileId> = store.image.files.keys().copied().collect();
        store.make_files(&ids, provided)?;
        epoll::update_sets(&mut store, &PreviousValues::default(), &ids)?;
        store.opener.end_deputies();
        Ok(store)
    }

    /// Returns the lowest number for descriptors of the caller; [`Self::move_caller_fd_up`] moves them there.
    ///
    /// # Errors
    /// No error of the kernel is known to occur.
    pub fn caller_fd_floor() -> Result<u32, FilesError> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let limit = limit.min(1 << 20) as u32;
        Ok(limit - CALLER_FDS_MAX.min(limit / 4))
    }

    /// Raises `RLIMIT_NOFILE` as far as allowed, so that a store has enough numbers. To be called before
    /// [`Self::move_caller_fd_up`].
    ///
    /// # Errors
    /// [`FilesError::Kernel`].
    pub fn raise_limit() -> Result<(), FilesError> {
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: Some(
                limit
                    .maximum
                    .unwrap_or(NOFILE_LIMIT_MAX)
                    .min(NOFILE_LIMIT_MAX),
            ),
            ..limit
        };
        setrlimit(Resource::Nofile, raised).with_step("RLIMIT_NOFILE")
    }

    /// Moves a descriptor of the caller above the numbers of the tree, close-on-exec.
    ///
    /// # Errors
    /// Same as [`Self::caller_fd_floor`]; [`FilesError::Kernel`].
    pub fn move_caller_fd_up(fd: OwnedFd) -> Result<OwnedFd, FilesError> {
        move_fd_above(fd, Self::caller_fd_floor()?)
    }

    /// Returns true if the result of [`Self::table_slots`] may have changed since the last call.
    pub fn take_slots_changed(&mut self) -> bool {
        std::mem::take(&mut self.slots_changed)
    }

    /// Returns the image of the files made so far.
    #[must_use]
    pub fn image(&self) -> &FilesImage {
        &self.image
    }

    fn reserve_numbers(&self) -> Result<(), FilesError> {
        let unassigned = self.image.files.len() - self.assigned_numbers.len();
        // A pipe takes two numbers: for the pipe itself, and for an end that is not used yet.
        let objects = self.image.pipes.len() * 2 + self.image.contents.len();
        let unix_sockets = self
            .image
            .files
            .values()
            .filter(|file| matches!(file.kind, OpenFileKind::Unix(_)));
        let extra_numbers = unassigned + objects + unix_sockets.count();
        let needed =
            u64::from(self.private_floor) + extra_numbers as u64 + u64::from(FREE_NUMBERS_MARGIN);
        if needed > u64::from(Self::caller_fd_floor()?) {
            return Err(FilesRefusal::TooMany(needed).into());
        }
        Ok(())
    }

    /// Makes these files, in place of their former versions.
    pub(super) fn make_files(
        &mut self,
        ids: &BTreeSet<FileId>,
        provided: ProvidedFiles,
    ) -> Result<(), FilesError> {
        for (identity, fd) in provided.memory {
            let fd = self.move_above_tree(fd)?;
            self.memory.insert(identity, fd);
        }
        let sockets: Vec<FileId> = provided.sockets.keys().copied().collect();
        self.insert_sockets(provided.sockets)?;
        self.set_modes(&sockets)?;
        // A slave is opened once its master is made.
        let is_slave = |image: &FilesImage, id: &FileId| {
            matches!(image.files[id].kind, OpenFileKind::TerminalSlave { .. })
        };
        for slaves in [false, true] {
            for id in ids {
                if is_slave(&self.image, id) == slaves && !self.files.contains_key(id) {
                    let file = self.image.files[id].clone();
                    kinds::make(self, *id, &file)?;
                }
            }
        }
        Ok(())
    }

    /// Sets the status flags of sockets that were made elsewhere, without `O_ASYNC`: no signals are sent yet.
    fn set_modes(&self, sockets: &[FileId]) -> Result<(), FilesError> {
        for id in sockets {
            if let (Some(fd), Some(file)) = (self.files.get(id), self.image.files.get(id)) {
                let flags = file.flags & !(libc::O_ASYNC as u32);
                syscalls::set_status(fd.as_fd(), flags).with_step("F_SETFL")?;
            }
        }
        Ok(())
    }

    /// Puts sockets into the store. The sockets may be at each other's numbers.
    fn insert_sockets(
        &mut self,
        mut provided: BTreeMap<FileId, OwnedFd>,
    ) -> Result<(), FilesError> {
        provided.retain(|id, _| self.image.files.contains_key(id));
        let numbers = provided.iter().map(|(id, fd)| (fd.as_raw_fd() as u32, *id));
        let mut ids_by_number: HashMap<u32, FileId> = numbers.collect();
        let mut next = None;
        while let Some(id) = next.take().or_else(|| provided.keys().next().copied()) {
            let Some(fd) = provided.remove(&id) else {
                continue;
            };
            ids_by_number.remove(&(fd.as_raw_fd() as u32));
            let home = self.assigned_numbers.get(&id).copied();
            // A socket at this number is moved aside, and placed at its own number next.
            if let Some(other) = home.and_then(|home| ids_by_number.remove(&home))
                && let Some(there) = provided.remove(&other)
            {
                provided.insert(other, self.move_above_tree(there)?);
                next = Some(other);
            }
            self.insert(id, fd)?;
        }
        Ok(())
    }

    /// Puts an open file into the store, at a number that the file has in the tree, and that no other file of the store
    /// has.
    pub(in crate::files) fn insert(&mut self, id: FileId, fd: OwnedFd) -> Result<(), FilesError> {
        *self.versions.entry(id).or_default() += 1;
        self.slots_changed = true;
        // The former version is closed first: its number may be the same.
        self.files.remove(&id);
        let fd = match self.assigned_numbers.get(&id) {
            Some(home) => {
                syscalls::duplicate_to(fd.as_raw_fd(), *home, true).with_step("dup3")?;
                if fd.as_raw_fd() as u32 == *home {
                    fd
                } else {
                    // SAFETY: the number is the store's, and was just given to this file.
                    unsafe { OwnedFd::from_raw_fd(*home as RawFd) }
                }
            }
            None => self.move_above_tree(fd)?,
        };
        self.files.insert(id, fd);
        Ok(())
    }

    /// Keeps a pipe or content open, above the numbers of the tree.
    pub(in crate::files) fn insert_object_fd(
        &mut self,
        id: ObjectId,
        fd: OwnedFd,
    ) -> Result<(), FilesError> {
        let fd = self.move_above_tree(fd)?;
        self.object_fds.insert(id, fd);
        Ok(())
    }

    /// Moves a descriptor above the numbers of the tree.
    pub(in crate::files) fn move_above_tree(&self, fd: OwnedFd) -> Result<OwnedFd, FilesError> {
        move_fd_above(fd, self.private_floor)
    }

    /// Returns true if a file has been made.
    pub(in crate::files) fn contains(&self, id: FileId) -> bool {
        self.files.contains_key(&id)
    }

    /// Returns a file that has been made.
    pub(in crate::files) fn get(&self, id: FileId) -> Result<BorrowedFd<'_>, FilesError> {
        let fd = self.files.get(&id).ok_or(FilesRefusal::SocketMissing(id))?;
        Ok(fd.as_fd())
    }

    /// Returns the number of a file that has been made.
    pub(in crate::files) fn raw_fd(&self, id: FileId) -> Result<RawFd, FilesError> {
        self.get(id).map(|fd| fd.as_raw_fd())
    }

    /// Calls `work` while a file is at this number; the descriptor that is there otherwise is put back afterwards.
    pub(in crate::files) fn with_fd_at(
        &mut self,
        number: u32,
        id: FileId,
        work: impl FnOnce(RawFd) -> io::Result<()>,
    ) -> Result<(), FilesError> {
        let file = self.get(id)?;
        if file.as_raw_fd() as u32 == number {
            return work(number as RawFd).with_step("epoll_ctl");
        }
        // SAFETY: the descriptor, if there is one, is used only here, while nothing closes it.
        let there = unsafe { BorrowedFd::borrow_raw(number as RawFd) };
        let moved_aside = match rustix::io::fcntl_dupfd_cloexec(there, self.private_floor as RawFd)
        {
            Ok(aside) => Some((rustix::io::fcntl_getfd(there).with_step("F_GETFD")?, aside)),
            Err(rustix::io::Errno::BADF) => None,
            Err(error) => return Err(error).with_step("F_DUPFD")?,
        };
        syscalls::duplicate_to(file.as_raw_fd(), number, true).with_step("dup3")?;
        let outcome = work(number as RawFd).with_step("epoll_ctl");
        match moved_aside {
            Some((flags, aside)) => {
                let close_on_exec = flags.contains(rustix::io::FdFlags::CLOEXEC);
                syscalls::duplicate_to(aside.as_raw_fd(), number, close_on_exec)
                    .with_step("dup3")?;
            }
            None => syscalls::close_range(number, number).with_step("close")?,
        }
        outcome
    }

    /// Closes all files made here: processes that have copies are then their only owners.
    pub fn close(&mut self) {
        let files = std::mem::take(&mut self.files).into_values();
        let other_fds = std::mem::take(&mut self.object_fds).into_values();
        let other_fds = other_fds.chain(std::mem::take(&mut self.unclaimed_ends).into_values());
        let other_fds = other_fds.chain(std::mem::take(&mut self.closed_peers).into_values());
        syscalls::close_all(files.chain(other_fds).collect());
    }

    /// Gives up the descriptors without closing them: the process that has the table owns them.
    pub(super) fn leave_all_open(&mut self) {
        for (_, fd) in std::mem::take(&mut self.files) {
            let _ = fd.into_raw_fd();
        }
    }
}

fn move_fd_above(fd: OwnedFd, floor: u32) -> Result<OwnedFd, FilesError> {
    if fd.as_raw_fd() as u32 >= floor {
        return Ok(fd);
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, floor as RawFd).with_step("F_DUPFD_CLOEXEC")
}

/// Assigns a number to each file that has a number in some table which no other file was assigned.
fn assign_numbers(image: &FilesImage) -> HashMap<FileId, u32> {
    let mut taken_numbers = BTreeSet::new();
    let mut homes = HashMap::new();
    for table in image.tables.values() {
        for (number, slot) in &table.slots {
            if !homes.contains_key(&slot.file) && taken_numbers.insert(*number) {
                homes.insert(slot.file, *number);
            }
        }
    }
    homes
}
