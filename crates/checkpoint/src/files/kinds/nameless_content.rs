//! Memory files and files without a name, which move by value.

use crate::file_rights::{FileOpener, FileOwnerAndMode};
use crate::files::acceptor::FdStore;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, FilesRefusal, StepContext};
use crate::files::image::limits::CHUNK_BYTES_MAX;
use crate::files::image::{
    ByteString, ContentForm, FileId, FilePath, NamelessContent, ObjectId, OpenFileKind,
};
use crate::files::kinds::named_file::{self, or_refusal};
use crate::files::syscalls;
use rustix::fs::{
    FallocateFlags, Gid, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Stat, Timespec, Timestamps,
    Uid, fallocate, fchmod, fchown, fcntl_add_seals, fcntl_get_seals, fstatfs, ftruncate, futimens,
    memfd_create, open, unlink,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// `HUGETLBFS_MAGIC` (`linux/magic.h`).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
const NS_PER_SECOND: i64 = 1_000_000_000;
/// `O_LARGEFILE` as the kernel shows it; the C library defines it as 0 here.
const O_LARGEFILE: i32 = 0o100_000;
/// Flags of an open file that say nothing about the way in which it was opened.
const STATUS_ONLY_FLAGS: i32 = O_LARGEFILE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_ASYNC
    | libc::O_NOATIME
    | libc::O_CLOEXEC;

/// Saves an open file without a name, and its content at the first encounter.
pub fn save(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let content = saver.object_id(&source.info);
    if !saver.image.contents.contains_key(&content) {
        let size = stat.st_size as u64;
        let limit = saver.limits.content_bytes_max;
        if size > limit
            && !saver
                .limits
                .mapped_memory
                .contains(&(stat.st_dev, stat.st_ino))
        {
            return Err(BlockReason::TooLarge { size, limit }.into());
        }
        if fstatfs(&source.copy).with_step("fstatfs")?.f_type == HUGETLBFS_MAGIC {
            return Err(BlockReason::HugePages.into());
        }
        let identity = (stat.st_dev, stat.st_ino);
        let elsewhere = saver
            .limits
            .mapped_memory
            .contains(&identity)
            .then_some(identity);
        let chunks = match elsewhere {
            Some(_) => BTreeMap::new(),
            None => read_chunks(&source.reopen_path(), size)
                .with_step("reading a file without a name")?,
        };
        let value = NamelessContent {
            form: read_form(source)?,
            access: (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777),
            times_ns: (
                to_nanoseconds(stat.st_atime, stat.st_atime_nsec),
                to_nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            ),
            size,
            mapped_memory: elsewhere,
            chunks,
        };
        saver.image.contents.insert(content, value);
    }
    let offset = source.info.offset;
    Ok(OpenFileKind::Content { content, offset })
}

fn to_nanoseconds(seconds: i64, more: impl Into<u64>) -> i64 {
    seconds
        .saturating_mul(NS_PER_SECOND)
        .saturating_add(more.into() as i64)
}

fn read_form(source: &FileBeingSaved) -> SaveResult<ContentForm> {
    let path = named_file::former_name(&source.path);
    if let Some(name) = path.as_os_str().as_bytes().strip_prefix(b"/memfd:") {
        return Ok(ContentForm::Memory {
            name: name.to_vec().into(),
            seals: fcntl_get_seals(&source.copy)
                .with_step("F_GET_SEALS")?
                .bits(),
        });
    }
    if !path.parent().is_some_and(Path::has_root) {
        return Err(BlockReason::Unreachable.into());
    }
    Ok(ContentForm::from_removed_path(
        path.as_os_str().as_bytes(),
        source.info.inode,
    ))
}

/// Reads the data between holes. The file is reopened, because a search for holes moves the file position.
fn read_chunks(path: &str, size: u64) -> io::Result<BTreeMap<u64, ByteString>> {
    let mut file = File::options();
    let file = file.read(true).custom_flags(libc::O_NOATIME).open(path)?;
    let mut chunks = BTreeMap::new();
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(data))?.min(size);
        at = data;
        while at < end {
            let mut chunk =
                vec![0; (CHUNK_BYTES_MAX - at % CHUNK_BYTES_MAX).min(end - at) as usize];
            file.read_exact_at(&mut chunk, at)?;
            let length = chunk.len() as u64;
            chunks.insert(at, ByteString(chunk));
            at += length;
        }
    }
    Ok(chunks)
}

/// Opens content, which is created at its first use.
pub fn make(
    store: &mut FdStore,
    id: FileId,
    content: ObjectId,
    flags: u32,
) -> Result<(), FilesError> {
    if !store.object_fds.contains_key(&content) {
        let value = store.image.contents[&content].clone();
        let fd = match value.mapped_memory {
            Some(identity) => {
                let memory = store.memory.get(&identity);
                let memory = memory.ok_or(FilesRefusal::ContentMissing(content))?;
                memory.try_clone().with_step("dup")?
            }
            None => {
                let fd = create(&mut store.opener, &value.form, value.access)?;
                write_changes(&fd, &value, None)?;
                fd
            }
        };
        // A program's open file with write access is the one created here: a memory file opened for writing by a path
        // could not be executed.
        let first = store.move_above_tree(fd.try_clone().with_step("dup")?)?;
        let writing = libc::O_RDWR as u32;
        store.unclaimed_ends.insert((content, writing), first);
        store.insert_object_fd(content, fd)?;
    }
    let opened = flags & !(STATUS_ONLY_FLAGS as u32);
    if let Some(first) = store.unclaimed_ends.remove(&(content, opened)) {
        syscalls::set_status(first.as_fd(), flags & !(libc::O_ASYNC as u32))
            .with_step("F_SETFL")?;
        return store.insert(id, first);
    }
    let path = format!("/proc/self/fd/{}", store.object_fds[&content].as_raw_fd());
    // The flags may still contain `O_TMPFILE` from the file's creation and `O_NOFOLLOW` from `shm_open`; this path is a
    // link.
    let opening = flags & !((libc::O_TMPFILE | libc::O_NOFOLLOW) as u32);
    let fd = named_file::open(&path, opening)?;
    store.insert(id, fd)
}

/// Creates an empty file without a name.
pub(crate) fn create(
    opener: &mut FileOpener,
    form: &ContentForm,
    access: FileOwnerAndMode,
) -> Result<OwnedFd, FilesError> {
    let (uid, gid, mode) = access;
    let fd = match form {
        ContentForm::Memory { name, .. } => {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            memfd_create(name.as_os_str(), flags).with_step("memfd_create")?
        }
        ContentForm::Deleted { path } if !opener.is_limited() => create_deleted(path)?,
        ContentForm::Deleted { path } => {
            let outcome = opener.create_nameless(path, true, access);
            return or_refusal(opener, path, outcome);
        }
        ContentForm::Temporary { directory } if opener.is_limited() => {
            let outcome = opener.create_nameless(directory, false, access);
            return or_refusal(opener, directory, outcome);
        }
        ContentForm::Temporary { directory } => {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            open(&**directory, flags, Mode::RUSR | Mode::WUSR).with_step(directory)?
        }
    };
    fchown(&fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).with_step("fchown")?;
    // Only root's rights allow the set-user-ID and set-group-ID bits.
    let mode_mask = if opener.is_limited() { 0o1777 } else { 0o7777 };
    fchmod(&fd, Mode::from_raw_mode(mode & mode_mask)).with_step("fchmod")?;
    Ok(fd)
}

/// Creates a file under its former name, or under a similar one if that is in use, and unlinks it.
fn create_deleted(path: &FilePath) -> Result<OwnedFd, FilesError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let mut name = path.as_os_str().to_owned();
    for attempt in 0.. {
        match open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => {
                unlink(&name).with_step(path)?;
                return Ok(fd);
            }
            Err(rustix::io::Errno::EXIST) if attempt < 1000 => {
                name = path.as_os_str().to_owned();
                name.push(format!(".{attempt}"));
            }
            Err(error) => return Err(error).with_step(path),
        }
    }
    unreachable!("the loop ends by returning");
}

/// Writes changes that were made while the tree ran.
pub fn update(
    fd: &OwnedFd,
    previous: &NamelessContent,
    current: &NamelessContent,
) -> Result<(), FilesError> {
    if previous != current && current.mapped_memory.is_none() {
        write_changes(fd, current, Some(previous))?;
    }
    Ok(())
}

/// Brings content to its final state: changes since its creation, then its times, then its seals.
pub fn write_final_state(
    fd: &OwnedFd,
    previous: Option<&NamelessContent>,
    current: &NamelessContent,
) -> Result<(), FilesError> {
    if previous != Some(current) && current.mapped_memory.is_none() {
        write_changes(fd, current, previous)?;
    }
    let (access, change) = current.times_ns;
    let time = |ns: i64| Timespec {
        tv_sec: ns.div_euclid(NS_PER_SECOND),
        tv_nsec: ns.rem_euclid(NS_PER_SECOND) as _,
    };
    let times = Timestamps {
        last_access: time(access),
        last_modification: time(change),
    };
    futimens(fd, &times).with_step("futimens")?;
    if let ContentForm::Memory { seals, .. } = &current.form {
        let seals = SealFlags::from_bits_retain(*seals);
        let present_seals = fcntl_get_seals(fd).with_step("F_GET_SEALS")?;
        if !present_seals.contains(seals) {
            fcntl_add_seals(fd, seals).with_step("F_ADD_SEALS")?;
        }
    }
    Ok(())
}

/// Writes the chunks that differ. Former data at their place is punched out first, so that holes stay holes.
fn write_changes(
    fd: &OwnedFd,
    current: &NamelessContent,
    previous: Option<&NamelessContent>,
) -> Result<(), FilesError> {
    let shown = display_path(&current.form);
    ftruncate(fd, current.size).with_step(shown)?;
    let file = File::from(fd.try_clone().with_step(shown)?);
    let empty = BTreeMap::new();
    let old = previous.map_or(&empty, |content| &content.chunks);
    let cell = |offset: &u64| offset / CHUNK_BYTES_MAX;
    let differs = |offset: &&u64| old.get(*offset) != current.chunks.get(*offset);
    let all_offsets = old.keys().chain(current.chunks.keys());
    let changed: BTreeSet<u64> = all_offsets.filter(differs).map(cell).collect();
    for number in changed {
        let cell = number * CHUNK_BYTES_MAX..(number + 1) * CHUNK_BYTES_MAX;
        if old.range(cell.clone()).next().is_some() {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(fd, hole, cell.start, CHUNK_BYTES_MAX).with_step(shown)?;
        }
        for (offset, chunk) in current.chunks.range(cell) {
            file.write_all_at(&chunk.0, *offset).with_step(shown)?;
        }
    }
    Ok(())
}

/// Returns the path that stands for content without a name in errors.
fn display_path(form: &ContentForm) -> &FilePath {
    match form {
        ContentForm::Memory { name, .. } => name,
        ContentForm::Deleted { path } | ContentForm::Temporary { directory: path } => path,
    }
}
