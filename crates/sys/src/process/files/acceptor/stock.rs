//! The open files of an image, made once, at numbers where they are in the way of no other descriptor.

use super::{Given, verify};
use crate::process::files::error::{At, FilesError, Refusal};
use crate::process::files::image::changes::Former;
use crate::process::files::image::{FileId, Image, Kind, ObjectId};
use crate::process::files::kinds::{self, epoll, unix::Stage};
use crate::process::files::raw;
use crate::process::rights::{Opener, Rights};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Numbers above the tree's that stay free for descriptors that the tree opens before it is stopped.
const MARGIN: u32 = 64;
/// Most numbers at the top of the limit that are reserved for the caller.
const CALLERS: u32 = 4096;
/// Highest limit of descriptors that is requested: the kernel's table grows to the highest number in use.
const LIMIT: u64 = 1 << 18;

/// The open files of an image. The stock uses the calling process's descriptor numbers: the caller's own descriptors
/// must be at [`Stock::callers_floor`] or above while a stock exists.
#[derive(Debug)]
pub struct Stock {
    /// Image of the files made so far.
    pub(in crate::process::files) image: Image,
    /// Pipes and contents, kept open until they are filled.
    pub(in crate::process::files) keepers: BTreeMap<ObjectId, OwnedFd>,
    /// Ends of new pipes and files of new contents that no open file has taken yet, by access mode.
    pub(in crate::process::files) first_files: BTreeMap<(ObjectId, u32), OwnedFd>,
    /// Other ends of Unix sockets with closed peers.
    pub(in crate::process::files) ghosts: BTreeMap<FileId, OwnedFd>,
    /// Directories with socket files that are not published yet.
    pub(in crate::process::files) stages: Vec<Stage>,
    /// Memory that moves with its mappings.
    pub(in crate::process::files) memory: BTreeMap<(u64, u64), OwnedFd>,
    /// Opener of the files that the image names.
    pub(in crate::process::files) opener: Opener,
    pub(super) files: BTreeMap<FileId, OwnedFd>,
    /// Number of times that each file was made.
    pub(super) versions: HashMap<FileId, u32>,
    homes: HashMap<FileId, u32>,
    pub(super) floor: u32,
    /// True if descriptors may have changed since the last call of [`Self::take_stale`].
    pub(super) stale: bool,
}

impl Stock {
    /// Verifies an image, then makes all its open files as far as possible while the donor still runs. Only abstract
    /// socket names become visible to other processes. `given` contains sockets that have been made already (others may
    /// follow with [`Self::finish`]) and all memory that is restored elsewhere.
    ///
    /// # Errors
    /// [`FilesError::Refused`] names a resource that is missing or differs here; [`FilesError::Kernel`]. The donor is
    /// not affected.
    pub fn prepare(image: Image, given: Given) -> Result<Self, FilesError> {
        Self::prepare_for(image, given, Rights::All)
    }

    /// Same as [`Self::prepare`], for a tree that may not open everything.
    ///
    /// # Errors
    /// Same as [`Self::prepare`]; [`Refusal::NotAllowed`] for a file that the tree may not open.
    pub fn prepare_for(image: Image, given: Given, rights: Rights) -> Result<Self, FilesError> {
        let mut opener = Opener::new(rights);
        verify::verify(&mut opener, &image)?;
        let homes = homes(&image);
        let mut stock = Self {
            floor: image.ceiling() + MARGIN,
            image,
            keepers: BTreeMap::new(),
            first_files: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            stages: Vec::new(),
            memory: BTreeMap::new(),
            files: BTreeMap::new(),
            versions: HashMap::new(),
            homes,
            opener,
            stale: true,
        };
        stock.make_room()?;
        let ids: BTreeSet<FileId> = stock.image.files.keys().copied().collect();
        stock.make(&ids, given)?;
        epoll::finish(&mut stock, &Former::default(), &ids)?;
        stock.opener.rest();
        Ok(stock)
    }

    /// Returns the lowest number for descriptors of the caller; [`Self::lift_own`] moves them there.
    ///
    /// # Errors
    /// No error of the kernel is known to occur.
    pub fn callers_floor() -> Result<u32, FilesError> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let limit = limit.min(1 << 20) as u32;
        Ok(limit - CALLERS.min(limit / 4))
    }

    /// Raises `RLIMIT_NOFILE` as far as allowed, so that a stock has enough numbers. To be called before
    /// [`Self::lift_own`].
    ///
    /// # Errors
    /// [`FilesError::Kernel`].
    pub fn raise_limit() -> Result<(), FilesError> {
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: Some(limit.maximum.unwrap_or(LIMIT).min(LIMIT)),
            ..limit
        };
        setrlimit(Resource::Nofile, raised).at("RLIMIT_NOFILE")
    }

    /// Moves a descriptor of the caller above the numbers of the tree, close-on-exec.
    ///
    /// # Errors
    /// Same as [`Self::callers_floor`]; [`FilesError::Kernel`].
    pub fn lift_own(fd: OwnedFd) -> Result<OwnedFd, FilesError> {
        lift(fd, Self::callers_floor()?)
    }

    /// Returns true if the result of [`Self::places`] may have changed since the last call.
    pub fn take_stale(&mut self) -> bool {
        std::mem::take(&mut self.stale)
    }

    /// Returns the image of the files made so far.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    fn make_room(&self) -> Result<(), FilesError> {
        let homeless = self.image.files.len() - self.homes.len();
        // A pipe takes two numbers: for the pipe itself, and for an end that is not used yet.
        let objects = self.image.pipes.len() * 2 + self.image.contents.len();
        let ghosts = self
            .image
            .files
            .values()
            .filter(|file| matches!(file.kind, Kind::Unix(_)));
        let high = homeless + objects + ghosts.count();
        let needed = u64::from(self.floor) + high as u64 + u64::from(MARGIN);
        if needed > u64::from(Self::callers_floor()?) {
            return Err(Refusal::TooMany(needed).into());
        }
        Ok(())
    }

    /// Makes these files, in place of their former versions.
    pub(super) fn make(&mut self, ids: &BTreeSet<FileId>, given: Given) -> Result<(), FilesError> {
        for (identity, fd) in given.memory {
            let fd = self.lift(fd)?;
            self.memory.insert(identity, fd);
        }
        let sockets: Vec<FileId> = given.sockets.keys().copied().collect();
        self.keep_sockets(given.sockets)?;
        self.set_modes(&sockets)?;
        // A slave is opened once its master is made.
        let is_slave =
            |image: &Image, id: &FileId| matches!(image.files[id].kind, Kind::TerminalSlave { .. });
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
                raw::set_status(fd.as_fd(), flags).at("F_SETFL")?;
            }
        }
        Ok(())
    }

    /// Puts sockets into the stock. The sockets may be at each other's numbers.
    fn keep_sockets(&mut self, mut given: BTreeMap<FileId, OwnedFd>) -> Result<(), FilesError> {
        given.retain(|id, _| self.image.files.contains_key(id));
        let places = given.iter().map(|(id, fd)| (fd.as_raw_fd() as u32, *id));
        let mut places: HashMap<u32, FileId> = places.collect();
        let mut next = None;
        while let Some(id) = next.take().or_else(|| given.keys().next().copied()) {
            let Some(fd) = given.remove(&id) else {
                continue;
            };
            places.remove(&(fd.as_raw_fd() as u32));
            let home = self.homes.get(&id).copied();
            // A socket at this number is moved aside, and placed at its own number next.
            if let Some(other) = home.and_then(|home| places.remove(&home))
                && let Some(there) = given.remove(&other)
            {
                given.insert(other, self.lift(there)?);
                next = Some(other);
            }
            self.keep(id, fd)?;
        }
        Ok(())
    }

    /// Puts an open file into the stock, at a number that the file has in the tree, and that no other file of the stock
    /// has.
    pub(in crate::process::files) fn keep(
        &mut self,
        id: FileId,
        fd: OwnedFd,
    ) -> Result<(), FilesError> {
        *self.versions.entry(id).or_default() += 1;
        self.stale = true;
        // The former version is closed first: its number may be the same.
        self.files.remove(&id);
        let fd = match self.homes.get(&id) {
            Some(home) => {
                raw::place(fd.as_raw_fd(), *home, true).at("dup3")?;
                if fd.as_raw_fd() as u32 == *home {
                    fd
                } else {
                    // SAFETY: the number is the stock's, and was just given to this file.
                    unsafe { OwnedFd::from_raw_fd(*home as RawFd) }
                }
            }
            None => self.lift(fd)?,
        };
        self.files.insert(id, fd);
        Ok(())
    }

    /// Keeps a pipe or content open, above the numbers of the tree.
    pub(in crate::process::files) fn keeper(
        &mut self,
        id: ObjectId,
        fd: OwnedFd,
    ) -> Result<(), FilesError> {
        let fd = self.lift(fd)?;
        self.keepers.insert(id, fd);
        Ok(())
    }

    /// Moves a descriptor above the numbers of the tree.
    pub(in crate::process::files) fn lift(&self, fd: OwnedFd) -> Result<OwnedFd, FilesError> {
        lift(fd, self.floor)
    }

    /// Returns true if a file has been made.
    pub(in crate::process::files) fn has(&self, id: FileId) -> bool {
        self.files.contains_key(&id)
    }

    /// Returns a file that has been made.
    pub(in crate::process::files) fn get(&self, id: FileId) -> Result<BorrowedFd<'_>, FilesError> {
        let fd = self.files.get(&id).ok_or(Refusal::SocketAbsent(id))?;
        Ok(fd.as_fd())
    }

    /// Returns the number of a file that has been made.
    pub(in crate::process::files) fn raw(&self, id: FileId) -> Result<RawFd, FilesError> {
        self.get(id).map(|fd| fd.as_raw_fd())
    }

    /// Calls `work` while a file is at this number; the descriptor that is there otherwise is put back afterwards.
    pub(in crate::process::files) fn at_number(
        &mut self,
        number: u32,
        id: FileId,
        work: impl FnOnce(RawFd) -> io::Result<()>,
    ) -> Result<(), FilesError> {
        let file = self.get(id)?;
        if file.as_raw_fd() as u32 == number {
            return work(number as RawFd).at("epoll_ctl");
        }
        // SAFETY: the descriptor, if there is one, is used only here, while nothing closes it.
        let there = unsafe { BorrowedFd::borrow_raw(number as RawFd) };
        let aside = match rustix::io::fcntl_dupfd_cloexec(there, self.floor as RawFd) {
            Ok(aside) => Some((rustix::io::fcntl_getfd(there).at("F_GETFD")?, aside)),
            Err(rustix::io::Errno::BADF) => None,
            Err(error) => return Err(error).at("F_DUPFD")?,
        };
        raw::place(file.as_raw_fd(), number, true).at("dup3")?;
        let outcome = work(number as RawFd).at("epoll_ctl");
        match aside {
            Some((flags, aside)) => {
                let close_on_exec = flags.contains(rustix::io::FdFlags::CLOEXEC);
                raw::place(aside.as_raw_fd(), number, close_on_exec).at("dup3")?;
            }
            None => raw::close_range(number, number).at("close")?,
        }
        outcome
    }

    /// Closes all files made here: processes that have copies are then their only owners.
    pub fn close(&mut self) {
        let files = std::mem::take(&mut self.files).into_values();
        let others = std::mem::take(&mut self.keepers).into_values();
        let others = others.chain(std::mem::take(&mut self.first_files).into_values());
        let others = others.chain(std::mem::take(&mut self.ghosts).into_values());
        raw::close_all(files.chain(others).collect());
    }

    /// Gives up the descriptors without closing them: the process that has the table owns them.
    pub(super) fn forget(&mut self) {
        for (_, fd) in std::mem::take(&mut self.files) {
            let _ = fd.into_raw_fd();
        }
    }
}

fn lift(fd: OwnedFd, floor: u32) -> Result<OwnedFd, FilesError> {
    if fd.as_raw_fd() as u32 >= floor {
        return Ok(fd);
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, floor as RawFd).at("F_DUPFD_CLOEXEC")
}

/// Assigns a number to each file that has a number in some table which no other file was assigned.
fn homes(image: &Image) -> HashMap<FileId, u32> {
    let mut taken = BTreeSet::new();
    let mut homes = HashMap::new();
    for table in image.tables.values() {
        for (number, slot) in &table.slots {
            if !homes.contains_key(&slot.file) && taken.insert(*number) {
                homes.insert(slot.file, *number);
            }
        }
    }
    homes
}
