//! Files, directories and devices with a path.

use super::fingerprint;
use crate::file_rights::{FileOpener, is_refusal};
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, FilesRefusal, StepContext};
use crate::files::image::{FilePath, OpenFileKind};
use crate::procfs;
use rustix::fs::{FileType, Mode, OFlags, RawDir, Stat, fstat, fstatfs, open as open_file, stat};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File systems with content that the kernel generates: proc, sysfs, cgroup2, cgroup, debugfs, tracefs
/// (`linux/magic.h`).
const GENERATED_CONTENT_MAGICS: [i64; 6] = [
    0x9fa0,
    0x6265_6572,
    0x6367_7270,
    0x0027_e0eb,
    0x6462_6720,
    0x7472_6163,
];
/// `HUGETLBFS_MAGIC`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// `MQUEUE_MAGIC`, which no header defines.
const MQUEUE_MAGIC: i64 = 0x1980_0202;

/// Saves a regular file.
pub fn save_regular(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let magic = fstatfs(&source.copy).with_step("fstatfs")?.f_type;
    if magic == HUGETLBFS_MAGIC {
        return Err(BlockReason::HugePages.into());
    }
    if magic == MQUEUE_MAGIC {
        return Err(BlockReason::MessageQueue.into());
    }
    let is_generated = GENERATED_CONTENT_MAGICS.contains(&magic);
    let path = if is_generated {
        source.path.clone()
    } else {
        current_path(source, stat, saver.limits.search_entries_max)?
    };
    let before = match source.previous.as_ref().map(|file| &file.kind) {
        Some(OpenFileKind::Regular {
            fingerprint: stamp, ..
        }) => stamp.as_ref(),
        _ => None,
    };
    let stamp = if is_generated {
        None
    } else {
        Some(fingerprint::compute(&source.copy, before, saver.limits.hash_files).with_step(&path)?)
    };
    Ok(OpenFileKind::Regular {
        path,
        offset: source.info.offset,
        fingerprint: stamp,
    })
}

/// Saves path and position of an open directory.
pub fn save_directory(source: &FileBeingSaved, stat: &Stat) -> SaveResult<OpenFileKind> {
    let path = current_path(source, stat, 0)?;
    // `F_NOTIFY` makes its caller the owner; nothing else sets an owner of a directory.
    if crate::files::donor::has_owner(source.fd())? {
        return Err(BlockReason::DirectoryNotify.into());
    }
    let offset = source.info.offset;
    Ok(OpenFileKind::Directory { path, offset })
}

/// Saves the path of a file opened with `O_PATH`.
pub fn save_o_path_file(source: &FileBeingSaved, stat: &Stat) -> SaveResult<OpenFileKind> {
    let path = current_path(source, stat, 0)?;
    Ok(OpenFileKind::Path { path })
}

/// Returns the present path of a file: the path that the kernel shows, or another name nearby.
fn current_path(
    source: &FileBeingSaved,
    file: &Stat,
    search_entries_max: usize,
) -> SaveResult<FilePath> {
    let names_it =
        |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| is_same_inode(&found, file));
    if names_it(&source.path) {
        return Ok(source.path.clone());
    }
    // A process that was restored here has a `/proc` of its own.
    if fstatfs(&source.copy).with_step("fstatfs")?.f_type == GENERATED_CONTENT_MAGICS[0] {
        return Ok(source.path.clone());
    }
    let path = former_name(&source.path);
    let start = path.parent().unwrap_or(Path::new("/"));
    if !path.has_root() || !start.exists() {
        return Err(BlockReason::Unreachable.into());
    }
    if search_entries_max == 0 {
        return Err(BlockReason::OtherName.into());
    }
    let found = find_other_name(start, file, search_entries_max).ok_or(BlockReason::OtherName)?;
    Ok(found.into())
}

/// Returns the former path of an unlinked file, without the suffix that the kernel appends.
pub fn former_name(shown: &FilePath) -> &Path {
    let bytes = shown.as_bytes();
    let former = bytes.strip_suffix(procfs::DELETED_SUFFIX).unwrap_or(bytes);
    Path::new(OsStr::from_bytes(former))
}

fn is_same_inode(found: &fs::Metadata, file: &Stat) -> bool {
    (found.dev(), found.ino()) == (file.st_dev, file.st_ino)
}

/// Finds another name of a file on the same file system: breadth first from its former directory, then from each
/// directory above.
fn find_other_name(start: &Path, file: &Stat, entries_max: usize) -> Option<PathBuf> {
    let mut entries_left = entries_max;
    let mut visited: Option<PathBuf> = None;
    for root in start.ancestors() {
        let mut directories = std::collections::VecDeque::from([root.to_path_buf()]);
        while let Some(directory) = directories.pop_front() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                entries_left = entries_left.checked_sub(1)?;
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                if is_same_inode(&metadata, file) {
                    return Some(entry.path());
                }
                let is_visited = visited.as_ref() == Some(&entry.path());
                if metadata.is_dir() && metadata.dev() == file.st_dev && !is_visited {
                    directories.push_back(entry.path());
                }
            }
        }
        visited = Some(root.to_path_buf());
    }
    None
}

/// Flags that `F_GETFL` can show. Other flags would create or truncate files.
const GETFL_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_LARGEFILE
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_PATH;

/// Opens a file, a directory, or a path only; flags that an open file cannot have are ignored.
pub fn open(path: impl AsRef<Path>, flags: u32) -> Result<OwnedFd, FilesError> {
    let path = path.as_ref();
    let flags = OFlags::from_bits_retain(flags & GETFL_FLAGS as u32) | OFlags::CLOEXEC;
    let outcome = open_file(path, flags | OFlags::NOCTTY, Mode::empty());
    match outcome {
        Err(rustix::io::Errno::NOENT) => Err(FilesRefusal::Missing(path_text(path)).into()),
        outcome => outcome.with_step(path_text(path)),
    }
}

/// Same as [`open`], with the rights of the tree.
pub fn open_with_rights(
    opener: &mut FileOpener,
    path: impl AsRef<Path>,
    flags: u32,
) -> Result<OwnedFd, FilesError> {
    let path = path.as_ref();
    let flags = OFlags::from_bits_retain(flags & GETFL_FLAGS as u32);
    let outcome = opener.open(path, flags);
    or_refusal(opener, path, outcome)
}

/// Turns an error into a refusal that names the path, if the file is missing or the tree has no right to open it.
pub fn or_refusal<T>(
    opener: &FileOpener,
    path: impl AsRef<Path>,
    outcome: io::Result<T>,
) -> Result<T, FilesError> {
    let shown = path_text(path.as_ref());
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(FilesRefusal::Missing(shown).into())
        }
        Err(error) if opener.is_limited() && is_refusal(&error) => {
            Err(FilesRefusal::NotAllowed(shown).into())
        }
        outcome => outcome.with_step(shown),
    }
}

/// Returns a path as text.
fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// Checks that the kernel generates the content of a file: any other file has content to compare.
pub fn require_generated_content(fd: &OwnedFd, path: &Path) -> Result<(), FilesError> {
    match GENERATED_CONTENT_MAGICS.contains(&fstatfs(fd).with_step("fstatfs")?.f_type) {
        true => Ok(()),
        false => Err(differs_refusal(path, "file system")),
    }
}

/// Opens a device, if it has the expected numbers.
pub fn open_device(
    opener: &mut FileOpener,
    path: &Path,
    device: (u32, u32),
    flags: u32,
) -> Result<OwnedFd, FilesError> {
    verify_device(path, device)?;
    let fd = open_with_rights(opener, path, flags)?;
    let opened = fstat(&fd).with_step(path_text(path))?;
    require_device(path, device, &opened)?;
    Ok(fd)
}

/// Checks that the path leads to a character device with these numbers.
pub fn verify_device(path: &Path, device: (u32, u32)) -> Result<(), FilesError> {
    let found = stat(path).map_err(|_| FilesRefusal::Missing(path_text(path)))?;
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
    Err(differs_refusal(path, "device number"))
}

/// Checks that a path leads to a file of this type.
pub fn verify_type(path: &Path, wanted: FileType, what: &'static str) -> Result<(), FilesError> {
    let found = stat(path).map_err(|_| FilesRefusal::Missing(path_text(path)))?;
    if FileType::from_raw_mode(found.st_mode) == wanted {
        return Ok(());
    }
    Err(differs_refusal(path, what))
}

/// Returns the refusal for a file that differs.
pub fn differs_refusal(path: impl AsRef<Path>, what: &'static str) -> FilesError {
    let path = path_text(path.as_ref());
    FilesRefusal::Differs {
        path,
        property: what,
    }
    .into()
}

/// Moves the position of an open directory. An entry is read first: an ext4 directory that is first read at its end
/// stays empty when it is read from its beginning next.
pub fn seek_in_directory(fd: &OwnedFd, offset: u64) -> Result<(), FilesError> {
    let mut entries = [MaybeUninit::uninit(); 1024];
    // A directory that cannot be read, or was removed, fails in the same way when the program reads it.
    let _ = RawDir::new(fd, &mut entries).next();
    seek(fd, offset)
}

/// Moves the position of an open file or directory.
pub fn seek(fd: &OwnedFd, offset: u64) -> Result<(), FilesError> {
    let seek = rustix::fs::seek(fd, rustix::fs::SeekFrom::Start(offset));
    seek.map(|_| ()).map_err(io::Error::from).with_step("lseek")
}
