//! Files, directories and devices with a path.

use super::stamp;
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason, Refusal};
use crate::process::files::image::{FilePath, Kind};
use crate::process::procfs;
use crate::process::rights::{Opener, is_refusal};
use rustix::fs::{FileType, Mode, OFlags, RawDir, Stat, fstat, fstatfs, open as open_file, stat};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File systems whose content is the kernel's own: proc, sysfs, cgroup2, cgroup, debugfs, tracefs (`linux/magic.h`).
const KERNELS_OWN: [i64; 6] = [
    0x9fa0,
    0x6265_6572,
    0x6367_7270,
    0x0027_e0eb,
    0x6462_6720,
    0x7472_6163,
];
/// `HUGETLBFS_MAGIC`.
const HUGETLBFS: i64 = 0x9584_58f6;
/// `MQUEUE_MAGIC`, in no header.
const MQUEUE: i64 = 0x1980_0202;

/// A file.
pub fn save_regular(saver: &Saver<'_>, subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let magic = fstatfs(&subject.copy).at("fstatfs")?.f_type;
    if magic == HUGETLBFS {
        return Err(Reason::HugePages.into());
    }
    if magic == MQUEUE {
        return Err(Reason::MessageQueue.into());
    }
    let own = KERNELS_OWN.contains(&magic);
    let path = if own {
        subject.path.clone()
    } else {
        present_path(subject, stat, saver.limits.search_entries_max)?
    };
    let before = match subject.before.as_ref().map(|file| &file.kind) {
        Some(Kind::Regular { stamp, .. }) => stamp.as_ref(),
        _ => None,
    };
    let stamp = if own {
        None
    } else {
        Some(stamp::take(&subject.copy, before, saver.limits.digests).at(&path)?)
    };
    Ok(Kind::Regular {
        path,
        offset: subject.info.offset,
        stamp,
    })
}

/// A directory.
pub fn save_directory(subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let path = present_path(subject, stat, 0)?;
    // `F_NOTIFY` makes its caller the owner; nothing else would have one of a directory.
    if crate::process::files::donor::has_owner(subject.fd())? {
        return Err(Reason::DirectoryNotify.into());
    }
    let offset = subject.info.offset;
    Ok(Kind::Directory { path, offset })
}

/// What `O_PATH` opened.
pub fn save_path(subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let path = present_path(subject, stat, 0)?;
    Ok(Kind::Path { path })
}

/// The path by which a file is found now: what the kernel shows, or another name of it nearby.
fn present_path(subject: &Subject, file: &Stat, search_entries_max: usize) -> Saved<FilePath> {
    let names_it =
        |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| is_same(&found, file));
    if names_it(&subject.path) {
        return Ok(subject.path.clone());
    }
    // A process that came here has a /proc of its own.
    if fstatfs(&subject.copy).at("fstatfs")?.f_type == KERNELS_OWN[0] {
        return Ok(subject.path.clone());
    }
    let path = former_name(&subject.path);
    let start = path.parent().unwrap_or(Path::new("/"));
    if !path.has_root() || !start.exists() {
        return Err(Reason::Unreachable.into());
    }
    if search_entries_max == 0 {
        return Err(Reason::OtherName.into());
    }
    let found = other_name(start, file, search_entries_max).ok_or(Reason::OtherName)?;
    Ok(found.into())
}

/// The name that a file had which has none any more.
pub fn former_name(shown: &FilePath) -> &Path {
    let bytes = shown.as_bytes();
    let former = bytes.strip_suffix(procfs::DELETED).unwrap_or(bytes);
    Path::new(OsStr::from_bytes(former))
}

fn is_same(found: &fs::Metadata, file: &Stat) -> bool {
    (found.dev(), found.ino()) == (file.st_dev, file.st_ino)
}

/// Another name of a file: breadth first from the directory in which it was, then from those above it, on one file
/// system.
fn other_name(start: &Path, file: &Stat, entries_max: usize) -> Option<PathBuf> {
    let mut left = entries_max;
    let mut done: Option<PathBuf> = None;
    for root in start.ancestors() {
        let mut directories = std::collections::VecDeque::from([root.to_path_buf()]);
        while let Some(directory) = directories.pop_front() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                left = left.checked_sub(1)?;
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                if is_same(&metadata, file) {
                    return Some(entry.path());
                }
                let seen = done.as_ref() == Some(&entry.path());
                if metadata.is_dir() && metadata.dev() == file.st_dev && !seen {
                    directories.push_back(entry.path());
                }
            }
        }
        done = Some(root.to_path_buf());
    }
    None
}

/// What `F_GETFL` can show. Other flags would make or empty files.
const SHOWN: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_LARGEFILE
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_PATH;

/// Opens a file, a directory, or a path only, with those of the flags that an open file can have.
pub fn open(path: impl AsRef<Path>, flags: u32) -> Result<OwnedFd, FilesError> {
    let path = path.as_ref();
    let flags = OFlags::from_bits_retain(flags & SHOWN as u32) | OFlags::CLOEXEC;
    let outcome = open_file(path, flags | OFlags::NOCTTY, Mode::empty());
    match outcome {
        Err(rustix::io::Errno::NOENT) => Err(Refusal::Missing(shown(path)).into()),
        outcome => outcome.at(shown(path)),
    }
}

/// The same, with the rights of the tree.
pub fn open_for(
    opener: &mut Opener,
    path: impl AsRef<Path>,
    flags: u32,
) -> Result<OwnedFd, FilesError> {
    let path = path.as_ref();
    let flags = OFlags::from_bits_retain(flags & SHOWN as u32);
    let outcome = opener.open(path, flags);
    allowed(opener, path, outcome)
}

/// Names what the tree has no right to.
pub fn allowed<T>(
    opener: &Opener,
    path: impl AsRef<Path>,
    outcome: io::Result<T>,
) -> Result<T, FilesError> {
    let shown = shown(path.as_ref());
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Refusal::Missing(shown).into())
        }
        Err(error) if opener.is_bounded() && is_refusal(&error) => {
            Err(Refusal::NotAllowed(shown).into())
        }
        outcome => outcome.at(shown),
    }
}

/// A path as text.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A file whose content the kernel makes has none to be compared; any other has.
pub fn require_kernels_own(fd: &OwnedFd, path: &Path) -> Result<(), FilesError> {
    match KERNELS_OWN.contains(&fstatfs(fd).at("fstatfs")?.f_type) {
        true => Ok(()),
        false => Err(differs(path, "file system")),
    }
}

/// Opens a device, if it is the one that is meant.
pub fn open_device(
    opener: &mut Opener,
    path: &Path,
    device: (u32, u32),
    flags: u32,
) -> Result<OwnedFd, FilesError> {
    verify_device(path, device)?;
    let fd = open_for(opener, path, flags)?;
    let opened = fstat(&fd).at(shown(path))?;
    require_device(path, device, &opened)?;
    Ok(fd)
}

/// The path stands for a character device with these numbers.
pub fn verify_device(path: &Path, device: (u32, u32)) -> Result<(), FilesError> {
    let found = stat(path).map_err(|_| Refusal::Missing(shown(path)))?;
    require_device(path, device, &found)
}

fn require_device(path: &Path, device: (u32, u32), found: &Stat) -> Result<(), FilesError> {
    let numbers = (
        rustix::fs::major(found.st_rdev),
        rustix::fs::minor(found.st_rdev),
    );
    let is_device = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
    if is_device && numbers == device {
        return Ok(());
    }
    Err(differs(path, "device number"))
}

/// A path stands for what is meant: a file with this type.
pub fn verify_type(path: &Path, wanted: FileType, what: &'static str) -> Result<(), FilesError> {
    let found = stat(path).map_err(|_| Refusal::Missing(shown(path)))?;
    if FileType::from_raw_mode(found.st_mode) == wanted {
        return Ok(());
    }
    Err(differs(path, what))
}

/// A refusal.
pub fn differs(path: impl AsRef<Path>, what: &'static str) -> FilesError {
    let path = shown(path.as_ref());
    Refusal::Differs { path, what }.into()
}

/// Moves the position of an open directory. Something is read of it before: an ext4 directory that is first read at its end stays
/// empty when it is read from its beginning next.
pub fn seek_in_directory(fd: &OwnedFd, offset: u64) -> Result<(), FilesError> {
    let mut entries = [MaybeUninit::uninit(); 1024];
    // A directory that cannot be read, or was removed, fails in the same way when the program reads it.
    let _ = RawDir::new(fd, &mut entries).next();
    seek(fd, offset)
}

/// Moves the position of an open file, of a directory too.
pub fn seek(fd: &OwnedFd, offset: u64) -> Result<(), FilesError> {
    let seek = rustix::fs::seek(fd, rustix::fs::SeekFrom::Start(offset));
    seek.map(|_| ()).map_err(io::Error::from).at("lseek")
}
