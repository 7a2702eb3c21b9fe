//! Files and shared memory that stub processes map. The restorer opens these objects and passes them on.

use crate::digest::{DigestedPart, TreeDigest, checksum_file};
use crate::donor::boot_id;
use crate::error::{Context, Error, Result, check_long};
use crate::file_identity;
use crate::file_rights::{FileOpener, FileRights};
use crate::files::{FdStore, create_nameless};
use crate::image::{
    PageContent, PageRun, ProcessLayout, SharedMemory, SharedMemoryKind, TreeLayout,
};
use crate::system_v_memory::RecreatedSystemVSegment;
use rustix::fs::OFlags;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Objects that the restorer holds, by index in the tree.
#[derive(Debug, Default)]
pub(super) struct MappedObjectStore {
    files: Vec<File>,
    shared_memory: Vec<SharedObject>,
    /// Number of shared memory objects that the store of open files has received.
    stored: usize,
    /// Opens files with the tree's rights.
    opener: FileOpener,
}

/// A shared memory object.
#[derive(Debug)]
struct SharedObject {
    file: File,
    /// The System V segment, if the object is one.
    segment: Option<RecreatedSystemVSegment>,
    /// True for the donor's own object on the same machine: its content is present already.
    is_donors_object: bool,
}

impl MappedObjectStore {
    /// Sets the rights with which the tree's files are opened.
    pub fn set_rights(&mut self, rights: FileRights) {
        self.opener = FileOpener::new(rights);
    }

    pub fn rights(&self) -> &FileRights {
        self.opener.rights()
    }

    /// Opens or makes the objects of a tree that do not exist yet.
    pub fn update(&mut self, tree: &TreeLayout) -> Result<()> {
        self.open_new_objects(tree)?;
        // End the opener's helper processes, as their PIDs may be the tree's.
        self.opener.end_deputies();
        self.resize_shared(tree)
    }

    fn open_new_objects(&mut self, tree: &TreeLayout) -> Result<()> {
        for file in tree.files.iter().skip(self.files.len()) {
            let file = file_identity::open_identical(file, &mut self.opener)?;
            self.files.push(with_high_fd(file)?);
        }
        for object in tree.shared_memory.iter().skip(self.shared_memory.len()) {
            let segment = object.segment().filter(|segment| !segment.is_gone);
            let segment = segment
                .map(|segment| RecreatedSystemVSegment::new(*segment))
                .transpose()?;
            let file = with_high_fd(match &segment {
                Some(made) => made.open()?,
                None => make_shared(object, &mut self.opener)?,
            })?;
            let is_donors_object = is_donors_object(tree, object, &file)?;
            if let SharedMemoryKind::Posix { path, .. } = &object.kind
                && !is_donors_object
                && is_in_use(&file)
            {
                return Err(Error::Refused(format!(
                    "{} is in use: end the program that uses it",
                    String::from_utf8_lossy(path)
                )));
            }
            self.shared_memory.push(SharedObject {
                file,
                segment,
                is_donors_object,
            });
        }
        Ok(())
    }

    fn resize_shared(&mut self, tree: &TreeLayout) -> Result<()> {
        for (object, held) in tree.shared_memory.iter().zip(&mut self.shared_memory) {
            if let (Some(made), Some(wanted)) = (&mut held.segment, object.segment())
                && !wanted.is_gone
            {
                made.update(*wanted)?;
            }
            let resizable = !matches!(
                object.kind,
                SharedMemoryKind::Anonymous | SharedMemoryKind::SystemV(_)
            ) && !held.is_donors_object;
            let size = held
                .file
                .metadata()
                .context(|| "reading the size of shared memory".to_owned())?
                .len();
            if resizable && size != object.size {
                held.file
                    .set_len(object.size)
                    .context(|| "resizing shared memory".to_owned())?;
            }
        }
        Ok(())
    }

    /// Writes a run of shared memory.
    pub fn write_shared(&self, index: u32, run: PageRun, bytes: Option<&[u8]>) -> Result<()> {
        let Some(SharedObject {
            file: handle,
            is_donors_object: donors,
            ..
        }) = self.shared_memory.get(index as usize)
        else {
            return Err(Error::Image("pages of unknown shared memory"));
        };
        if *donors {
            return Ok(());
        }
        let writing = || "writing shared memory".to_owned();
        if let (PageContent::Bytes, Some(bytes)) = (run.content, bytes) {
            let size = handle.metadata().context(writing)?.len();
            let length = size.saturating_sub(run.start).min(bytes.len() as u64) as usize;
            return handle
                .write_all_at(&bytes[..length], run.start)
                .context(writing);
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no pointers are passed.
        let outcome = unsafe {
            libc::fallocate(
                handle.as_raw_fd(),
                mode,
                run.start as i64,
                run.length as i64,
            )
        };
        check_long(outcome.into()).map(drop).context(writing)
    }

    /// Adds the checksums of shared memory.
    pub fn add_checksums(&self, digest: &mut TreeDigest) -> Result<()> {
        for (index, held) in (0..).zip(&self.shared_memory) {
            let checksum =
                checksum_file(&held.file).context(|| "reading shared memory".to_owned())?;
            digest.insert(DigestedPart::Shared(index), checksum);
        }
        Ok(())
    }

    /// Returns memory objects that descriptors may refer to as well, by device and inode at the donor. Objects that
    /// an earlier call returned are left out.
    pub fn take_new_shared_memory(
        &mut self,
        tree: &TreeLayout,
    ) -> Result<BTreeMap<(u64, u64), OwnedFd>> {
        let all = tree.shared_memory.iter().zip(&self.shared_memory);
        // Named files are opened by name.
        let new_objects = all.skip(self.stored).filter(|(object, held)| {
            held.segment.is_none() && !matches!(object.kind, SharedMemoryKind::File(_))
        });
        let mut found = BTreeMap::new();
        for (object, held) in new_objects {
            let copy = held
                .file
                .try_clone()
                .context(|| "duplicating a descriptor of shared memory".to_owned())?;
            found.insert(object.device_and_inode(), OwnedFd::from(copy));
        }
        self.stored = self.shared_memory.len();
        Ok(found)
    }

    /// Returns a mapped or executed file.
    pub fn mapped_file(&self, index: u32) -> BorrowedFd<'_> {
        self.files[index as usize].as_fd()
    }

    /// Opens shared memory with the access that `mode` allows and no more.
    pub fn open_shared(&self, index: u32, mode: i32) -> Result<OwnedFd> {
        let file = &self.shared_memory[index as usize].file;
        if mode == libc::O_RDWR {
            // Memory opened through a path could not be mapped executable.
            let copy = file.try_clone();
            return Ok(copy.context(|| "opening shared memory".to_owned())?.into());
        }
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = File::open(&link);
        Ok(opened
            .context(|| "opening shared memory".to_owned())?
            .into())
    }

    /// Opens the working directories, by process index, that processes may use only because the policy exempts them.
    pub fn open_exempt_directories(&mut self, tree: &TreeLayout) -> Vec<Option<OwnedFd>> {
        let mut open = |process: &ProcessLayout| {
            let path = Path::new(OsStr::from_bytes(&process.directory));
            let exempt = self.opener.is_limited() && self.rights().is_exempt(path);
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            exempt.then(|| self.opener.open(path, flags).ok()).flatten()
        };
        let opened = tree.processes.iter().map(&mut open).collect();
        // End the opener's helper processes, as their PIDs may be the tree's.
        self.opener.end_deputies();
        opened
    }

    /// Returns true if processes have no more rights than their users.
    pub fn has_limited_rights(&self) -> bool {
        self.opener.is_limited()
    }

    /// Returns the ID of the System V segment, if the object is one.
    pub fn segment_id(&self, index: u32) -> Option<i32> {
        let made = self.shared_memory.get(index as usize)?.segment.as_ref()?;
        Some(made.segment.id)
    }

    /// Returns the indexes of System V segments that were removed at the donor. New segments may reuse their IDs.
    pub fn removed_segments(&self, tree: &TreeLayout) -> Vec<u32> {
        let known = (0..).zip(tree.shared_memory.iter().zip(&self.shared_memory));
        let removed = known.filter(|(_, (object, held))| {
            held.segment.is_some() && object.segment().is_some_and(|segment| segment.is_gone)
        });
        removed.map(|(index, _)| index).collect()
    }

    /// Removes segments that no stub process attaches any more.
    pub fn remove_segments(&mut self, gone: &[u32]) -> Result<()> {
        for index in gone {
            let held = self.shared_memory.get_mut(*index as usize);
            if let Some(mut made) = held.and_then(|held| held.segment.take()) {
                made.detach();
                made.remove()?;
            }
        }
        Ok(())
    }

    /// Sets the owners and permissions of System V segments, after the last attachment here.
    pub fn set_segment_permissions(&mut self) -> Result<()> {
        let mut segments = self
            .shared_memory
            .iter_mut()
            .filter_map(|held| held.segment.as_mut());
        segments.try_for_each(RecreatedSystemVSegment::finish)
    }

    /// Detaches the restorer from System V segments, and leaves them to the tree.
    pub fn detach_segments(&mut self) {
        let segments = self.shared_memory.iter_mut();
        segments
            .filter_map(|held| held.segment.as_mut())
            .for_each(RecreatedSystemVSegment::detach);
    }
}

/// Moves a file to a descriptor number out of the way of the tree's.
fn with_high_fd(file: File) -> Result<File> {
    Ok(File::from(FdStore::move_caller_fd_up(file.into())?))
}

fn is_donors_object(tree: &TreeLayout, object: &SharedMemory, file: &File) -> Result<bool> {
    let here = file.metadata().context(|| "inspecting a file".to_owned())?;
    let device = (libc::major(here.dev()), libc::minor(here.dev()));
    let (major, minor, inode) = object.identity;
    let named = matches!(
        object.kind,
        SharedMemoryKind::File(_) | SharedMemoryKind::Posix { .. }
    );
    Ok(named && tree.boot_id == boot_id() && (device, here.ino()) == ((major, minor), inode))
}

/// Returns true if another process has the file open for writing or maps it writable, since the kernel then refuses a
/// lease.
fn is_in_use(file: &File) -> bool {
    let lease = |kind: i32| {
        // SAFETY: no pointers are passed.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    let in_use =
        lease(libc::F_WRLCK) < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
    lease(libc::F_UNLCK);
    in_use
}

fn make_shared(object: &SharedMemory, opener: &mut FileOpener) -> Result<File> {
    let making = || "creating shared memory".to_owned();
    match &object.kind {
        SharedMemoryKind::Anonymous => make_anonymous(object.size),
        SharedMemoryKind::Memfd(name) => {
            let name = CString::new(name.as_slice()).unwrap_or_default();
            // SAFETY: the name ends with a NUL and outlives the call.
            let fd = unsafe {
                libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
            };
            check_long(fd.into()).context(making)?;
            // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
            Ok(unsafe { File::from_raw_fd(fd) })
        }
        // The segment was removed before its first transfer, so no process maps it.
        SharedMemoryKind::SystemV(_) => make_anonymous(object.size),
        SharedMemoryKind::File(path) => {
            let path = Path::new(OsStr::from_bytes(path));
            let file = opener.open(path, OFlags::RDWR);
            file.map(File::from)
                .map_err(|error| Error::Refused(opener.failure_reason(path, &error)))
        }
        SharedMemoryKind::Posix { path, access } => {
            let path = Path::new(OsStr::from_bytes(path));
            let file = match opener.open(path, OFlags::RDWR) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    opener.create(path, *access)
                }
                opened => opened,
            };
            file.map(File::from)
                .map_err(|error| Error::Refused(opener.failure_reason(path, &error)))
        }
        SharedMemoryKind::Deleted { form, access } => {
            let file = create_nameless(opener, form, *access);
            file.map(File::from)
                .map_err(|error| Error::Refused(error.to_string()))
        }
    }
}

/// Makes the same object as `mmap(MAP_SHARED | MAP_ANONYMOUS)`, so that the program sees no difference.
fn make_anonymous(size: u64) -> Result<File> {
    let making = || "creating shared memory".to_owned();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let length = size as usize;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing refers to, and which is unmapped
    // below.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error()).context(making);
    }
    let link = format!(
        "/proc/self/map_files/{:x}-{:x}",
        address.addr(),
        address.addr() + length
    );
    let file = File::options().read(true).write(true).open(link);
    // SAFETY: the mapping made above, to which nothing refers.
    unsafe { libc::munmap(address, length) };
    file.context(making)
}
