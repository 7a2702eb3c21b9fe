//! Files and shared memory that empty processes map. The restorer opens these objects and passes them on.

use crate::process::digest::{Digest, Part, of_file};
use crate::process::donor::boot_id;
use crate::process::error::{Context, Error, Result, check_long};
use crate::process::files::{Stock, create_nameless};
use crate::process::identity;
use crate::process::image::{Content, Process, Run, Shared, SharedKind, Tree};
use crate::process::rights::{Opener, Rights};
use crate::process::system_v::Made;
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
pub(super) struct Objects {
    files: Vec<File>,
    shared: Vec<Held>,
    /// Number of shared memory objects that the store of open files has received.
    stocked: usize,
    /// Opens files with the tree's rights.
    opener: Opener,
}

/// A shared memory object.
#[derive(Debug)]
struct Held {
    file: File,
    /// The System V segment, if the object is one.
    segment: Option<Made>,
    /// True for the donor's own object on the same machine: its content is present already.
    donors: bool,
}

impl Objects {
    /// Sets the rights with which the tree's files are opened.
    pub fn set_rights(&mut self, rights: Rights) {
        self.opener = Opener::new(rights);
    }

    pub fn rights(&self) -> &Rights {
        self.opener.rights()
    }

    /// Opens or makes the objects of a tree that do not exist yet.
    pub fn follow(&mut self, tree: &Tree) -> Result<()> {
        self.open(tree)?;
        // End the opener's helper processes, as their PIDs may be the tree's.
        self.opener.rest();
        self.resize(tree)
    }

    fn open(&mut self, tree: &Tree) -> Result<()> {
        for file in tree.files.iter().skip(self.files.len()) {
            let file = identity::open_same(file, &mut self.opener)?;
            self.files.push(lift(file)?);
        }
        for object in tree.shared.iter().skip(self.shared.len()) {
            let segment = object.segment().filter(|of| !of.gone);
            let segment = segment.map(|of| Made::new(*of)).transpose()?;
            let file = lift(match &segment {
                Some(made) => made.open()?,
                None => make(object, &mut self.opener)?,
            })?;
            let donors = is_donors(tree, object, &file)?;
            if let SharedKind::Posix { path, .. } = &object.kind
                && !donors
                && is_in_use(&file)
            {
                return Err(Error::Refused(format!(
                    "{} is in use here: end the program that has it",
                    String::from_utf8_lossy(path)
                )));
            }
            self.shared.push(Held {
                file,
                segment,
                donors,
            });
        }
        Ok(())
    }

    fn resize(&mut self, tree: &Tree) -> Result<()> {
        for (object, held) in tree.shared.iter().zip(&mut self.shared) {
            if let (Some(made), Some(wanted)) = (&mut held.segment, object.segment())
                && !wanted.gone
            {
                made.follow(*wanted)?;
            }
            let resizable = !matches!(object.kind, SharedKind::Anonymous | SharedKind::SystemV(_))
                && !held.donors;
            let size = held
                .file
                .metadata()
                .context(|| "size of shared memory".to_owned())?
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
    pub fn write(&self, index: u32, run: Run, bytes: Option<&[u8]>) -> Result<()> {
        let Some(Held {
            file: handle,
            donors,
            ..
        }) = self.shared.get(index as usize)
        else {
            return Err(Error::Image("pages of unknown shared memory"));
        };
        if *donors {
            return Ok(());
        }
        let writing = || "writing shared memory".to_owned();
        if let (Content::Bytes, Some(bytes)) = (run.content, bytes) {
            let size = handle.metadata().context(writing)?.len();
            let inside = size.saturating_sub(run.start).min(bytes.len() as u64) as usize;
            return handle
                .write_all_at(&bytes[..inside], run.start)
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
    pub fn add_to(&self, digest: &mut Digest) -> Result<()> {
        for (index, held) in (0..).zip(&self.shared) {
            let checksum = of_file(&held.file).context(|| "reading shared memory".to_owned())?;
            digest.insert(Part::Shared(index), checksum);
        }
        Ok(())
    }

    /// Returns memory objects that descriptors may refer to as well, by device and inode at the donor. Objects that
    /// an earlier call returned are left out.
    pub fn fresh_memory(&mut self, tree: &Tree) -> Result<BTreeMap<(u64, u64), OwnedFd>> {
        let all = tree.shared.iter().zip(&self.shared);
        // Named files are opened by name.
        let fresh = all.skip(self.stocked).filter(|(object, held)| {
            held.segment.is_none() && !matches!(object.kind, SharedKind::File(_))
        });
        let mut found = BTreeMap::new();
        for (object, held) in fresh {
            let copy = held.file.try_clone().context(|| "a copy".to_owned())?;
            found.insert(object.device_and_inode(), OwnedFd::from(copy));
        }
        self.stocked = self.shared.len();
        Ok(found)
    }

    /// Returns a mapped or executed file.
    pub fn file(&self, index: u32) -> BorrowedFd<'_> {
        self.files[index as usize].as_fd()
    }

    /// Opens shared memory with the access that `mode` allows and no more.
    pub fn open_shared(&self, index: u32, mode: i32) -> Result<OwnedFd> {
        let file = &self.shared[index as usize].file;
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
    pub fn directories(&mut self, tree: &Tree) -> Vec<Option<OwnedFd>> {
        let mut open = |process: &Process| {
            let path = Path::new(OsStr::from_bytes(&process.directory));
            let exempt = self.opener.is_bounded() && self.rights().exempts(path);
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            exempt.then(|| self.opener.open(path, flags).ok()).flatten()
        };
        let opened = tree.processes.iter().map(&mut open).collect();
        // End the opener's helper processes, as their PIDs may be the tree's.
        self.opener.rest();
        opened
    }

    /// Returns true if processes have no more rights than their users.
    pub fn is_bounded(&self) -> bool {
        self.opener.is_bounded()
    }

    /// Returns the ID of the System V segment, if the object is one.
    pub fn segment(&self, index: u32) -> Option<i32> {
        let made = self.shared.get(index as usize)?.segment.as_ref()?;
        Some(made.segment.id)
    }

    /// Returns the indexes of System V segments that were removed at the donor. New segments may reuse their IDs.
    pub fn gone_segments(&self, tree: &Tree) -> Vec<u32> {
        let known = (0..).zip(tree.shared.iter().zip(&self.shared));
        let gone = known.filter(|(_, (object, held))| {
            held.segment.is_some() && object.segment().is_some_and(|of| of.gone)
        });
        gone.map(|(index, _)| index).collect()
    }

    /// Removes segments that no empty process attaches any more.
    pub fn drop_segments(&mut self, gone: &[u32]) -> Result<()> {
        for index in gone {
            let held = self.shared.get_mut(*index as usize);
            if let Some(mut made) = held.and_then(|held| held.segment.take()) {
                made.let_go();
                made.remove()?;
            }
        }
        Ok(())
    }

    /// Sets the owners and permissions of System V segments, after the last attachment here.
    pub fn finish_segments(&mut self) -> Result<()> {
        let mut segments = self
            .shared
            .iter_mut()
            .filter_map(|held| held.segment.as_mut());
        segments.try_for_each(Made::finish)
    }

    /// Detaches the restorer from System V segments, and leaves them to the tree.
    pub fn let_go(&mut self) {
        let segments = self.shared.iter_mut();
        segments
            .filter_map(|held| held.segment.as_mut())
            .for_each(Made::let_go);
    }
}

/// Moves a file to a descriptor number out of the way of the tree's.
fn lift(file: File) -> Result<File> {
    Ok(File::from(Stock::lift_own(file.into())?))
}

fn is_donors(tree: &Tree, object: &Shared, file: &File) -> Result<bool> {
    let here = file.metadata().context(|| "looking at a file".to_owned())?;
    let device = (libc::major(here.dev()), libc::minor(here.dev()));
    let (major, minor, inode) = object.identity;
    let named = matches!(object.kind, SharedKind::File(_) | SharedKind::Posix { .. });
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

fn make(object: &Shared, opener: &mut Opener) -> Result<File> {
    let making = || "making shared memory".to_owned();
    match &object.kind {
        SharedKind::Anonymous => anonymous(object.size),
        SharedKind::Memfd(name) => {
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
        SharedKind::SystemV(_) => anonymous(object.size),
        SharedKind::File(path) => {
            let path = Path::new(OsStr::from_bytes(path));
            let file = opener.open(path, OFlags::RDWR);
            file.map(File::from)
                .map_err(|error| Error::Refused(opener.why_not(path, &error)))
        }
        SharedKind::Posix { path, access } => {
            let path = Path::new(OsStr::from_bytes(path));
            let file = match opener.open(path, OFlags::RDWR) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    opener.create(path, *access)
                }
                opened => opened,
            };
            file.map(File::from)
                .map_err(|error| Error::Refused(opener.why_not(path, &error)))
        }
        SharedKind::Deleted { form, access } => {
            let file = create_nameless(opener, form, *access);
            file.map(File::from)
                .map_err(|error| Error::Refused(error.to_string()))
        }
    }
}

/// Makes the same object as `mmap(MAP_SHARED | MAP_ANONYMOUS)`, so that the program sees no difference.
fn anonymous(size: u64) -> Result<File> {
    let making = || "making shared memory".to_owned();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let length = size as usize;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing refers to, and which is unmapped
    // below.
    let place = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    if place == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error()).context(making);
    }
    let link = format!(
        "/proc/self/map_files/{:x}-{:x}",
        place.addr(),
        place.addr() + length
    );
    let file = File::options().read(true).write(true).open(link);
    // SAFETY: the mapping made above, to which nothing refers.
    unsafe { libc::munmap(place, length) };
    file.context(making)
}
