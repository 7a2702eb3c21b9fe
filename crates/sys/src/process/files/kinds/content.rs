//! Memory files and files without a name, which move by value.

use crate::process::files::acceptor::Stock;
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason, Refusal};
use crate::process::files::image::limits::CHUNK;
use crate::process::files::image::{Bytes, Content, ContentForm, FileId, FilePath, Kind, ObjectId};
use crate::process::files::kinds::named::{self, allowed};
use crate::process::files::raw;
use crate::process::rights::{Access, Opener};
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
const HUGETLBFS: i64 = 0x9584_58f6;
const SECOND_NS: i64 = 1_000_000_000;
/// `O_LARGEFILE` as the kernel shows it; the C library defines it as 0 here.
const LARGE: i32 = 0o100_000;
/// Flags of an open file that say nothing about the way in which it was opened.
const LATER: i32 = LARGE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_ASYNC
    | libc::O_NOATIME
    | libc::O_CLOEXEC;

/// Saves an open file without a name, and its content at the first encounter.
pub fn save(saver: &mut Saver<'_>, subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let content = saver.object(&subject.info);
    if !saver.image.contents.contains_key(&content) {
        let size = stat.st_size as u64;
        let limit = saver.limits.content_bytes_max;
        if size > limit && !saver.limits.elsewhere.contains(&(stat.st_dev, stat.st_ino)) {
            return Err(Reason::TooLarge { size, limit }.into());
        }
        if fstatfs(&subject.copy).at("fstatfs")?.f_type == HUGETLBFS {
            return Err(Reason::HugePages.into());
        }
        let identity = (stat.st_dev, stat.st_ino);
        let elsewhere = saver
            .limits
            .elsewhere
            .contains(&identity)
            .then_some(identity);
        let chunks = match elsewhere {
            Some(_) => BTreeMap::new(),
            None => read(&subject.reopen_path(), size).at("content without a name")?,
        };
        let value = Content {
            form: form(subject)?,
            access: (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777),
            times_ns: (
                nanoseconds(stat.st_atime, stat.st_atime_nsec),
                nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            ),
            size,
            elsewhere,
            chunks,
        };
        saver.image.contents.insert(content, value);
    }
    let offset = subject.info.offset;
    Ok(Kind::Content { content, offset })
}

fn nanoseconds(seconds: i64, more: impl Into<u64>) -> i64 {
    seconds
        .saturating_mul(SECOND_NS)
        .saturating_add(more.into() as i64)
}

fn form(subject: &Subject) -> Saved<ContentForm> {
    let path = named::former_name(&subject.path);
    if let Some(name) = path.as_os_str().as_bytes().strip_prefix(b"/memfd:") {
        return Ok(ContentForm::Memory {
            name: name.to_vec().into(),
            seals: fcntl_get_seals(&subject.copy).at("F_GET_SEALS")?.bits(),
        });
    }
    if !path.parent().is_some_and(Path::has_root) {
        return Err(Reason::Unreachable.into());
    }
    Ok(ContentForm::of_removed(
        path.as_os_str().as_bytes(),
        subject.info.inode,
    ))
}

/// Reads the data between holes. The file is reopened, because a search for holes moves the file position.
fn read(path: &str, size: u64) -> io::Result<BTreeMap<u64, Bytes>> {
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
            let mut chunk = vec![0; (CHUNK - at % CHUNK).min(end - at) as usize];
            file.read_exact_at(&mut chunk, at)?;
            let length = chunk.len() as u64;
            chunks.insert(at, Bytes(chunk));
            at += length;
        }
    }
    Ok(chunks)
}

/// Opens content, which is created at its first use.
pub fn make(
    stock: &mut Stock,
    id: FileId,
    content: ObjectId,
    flags: u32,
) -> Result<(), FilesError> {
    if !stock.keepers.contains_key(&content) {
        let value = stock.image.contents[&content].clone();
        let fd = match value.elsewhere {
            Some(identity) => {
                let memory = stock.memory.get(&identity);
                let memory = memory.ok_or(Refusal::ContentAbsent(content))?;
                memory.try_clone().at("dup")?
            }
            None => {
                let fd = create(&mut stock.opener, &value.form, value.access)?;
                write(&fd, &value, None)?;
                fd
            }
        };
        // A program's open file with write access is the one created here: a memory file opened for writing by a path
        // could not be executed.
        let first = stock.lift(fd.try_clone().at("dup")?)?;
        let writing = libc::O_RDWR as u32;
        stock.first_files.insert((content, writing), first);
        stock.keeper(content, fd)?;
    }
    let opened = flags & !(LATER as u32);
    if let Some(first) = stock.first_files.remove(&(content, opened)) {
        raw::set_status(first.as_fd(), flags & !(libc::O_ASYNC as u32)).at("F_SETFL")?;
        return stock.keep(id, first);
    }
    let path = format!("/proc/self/fd/{}", stock.keepers[&content].as_raw_fd());
    // The flags may still contain `O_TMPFILE` from the file's creation and `O_NOFOLLOW` from `shm_open`; this path is a
    // link.
    let opening = flags & !((libc::O_TMPFILE | libc::O_NOFOLLOW) as u32);
    let fd = named::open(&path, opening)?;
    stock.keep(id, fd)
}

/// Creates an empty file without a name.
pub(in crate::process) fn create(
    opener: &mut Opener,
    form: &ContentForm,
    access: Access,
) -> Result<OwnedFd, FilesError> {
    let (uid, gid, mode) = access;
    let fd = match form {
        ContentForm::Memory { name, .. } => {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            memfd_create(name.as_os_str(), flags).at("memfd_create")?
        }
        ContentForm::Deleted { path } if !opener.is_bounded() => create_deleted(path)?,
        ContentForm::Deleted { path } => {
            let made = opener.nameless(path, true, access);
            return allowed(opener, path, made);
        }
        ContentForm::Temporary { directory } if opener.is_bounded() => {
            let made = opener.nameless(directory, false, access);
            return allowed(opener, directory, made);
        }
        ContentForm::Temporary { directory } => {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            open(&**directory, flags, Mode::RUSR | Mode::WUSR).at(directory)?
        }
    };
    fchown(&fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).at("fchown")?;
    // Only root's rights allow the set-user-ID and set-group-ID bits.
    let plain = if opener.is_bounded() { 0o1777 } else { 0o7777 };
    fchmod(&fd, Mode::from_raw_mode(mode & plain)).at("fchmod")?;
    Ok(fd)
}

/// Creates a file under its former name, or under a similar one if that is in use, and unlinks it.
fn create_deleted(path: &FilePath) -> Result<OwnedFd, FilesError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let mut name = path.as_os_str().to_owned();
    for attempt in 0.. {
        match open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => {
                unlink(&name).at(path)?;
                return Ok(fd);
            }
            Err(rustix::io::Errno::EXIST) if attempt < 1000 => {
                name = path.as_os_str().to_owned();
                name.push(format!(".{attempt}"));
            }
            Err(error) => return Err(error).at(path),
        }
    }
    unreachable!("the loop ends by returning");
}

/// Writes changes that were made while the tree ran.
pub fn update(fd: &OwnedFd, before: &Content, now: &Content) -> Result<(), FilesError> {
    if before != now && now.elsewhere.is_none() {
        write(fd, now, Some(before))?;
    }
    Ok(())
}

/// Brings content to its final state: changes since its creation, then its times, then its seals.
pub fn finish(fd: &OwnedFd, before: Option<&Content>, now: &Content) -> Result<(), FilesError> {
    if before != Some(now) && now.elsewhere.is_none() {
        write(fd, now, before)?;
    }
    let (access, change) = now.times_ns;
    let time = |ns: i64| Timespec {
        tv_sec: ns.div_euclid(SECOND_NS),
        tv_nsec: ns.rem_euclid(SECOND_NS) as _,
    };
    let times = Timestamps {
        last_access: time(access),
        last_modification: time(change),
    };
    futimens(fd, &times).at("futimens")?;
    if let ContentForm::Memory { seals, .. } = &now.form {
        let seals = SealFlags::from_bits_retain(*seals);
        let there = fcntl_get_seals(fd).at("F_GET_SEALS")?;
        if !there.contains(seals) {
            fcntl_add_seals(fd, seals).at("F_ADD_SEALS")?;
        }
    }
    Ok(())
}

/// Writes the chunks that differ. Former data at their place is punched out first, so that holes stay holes.
fn write(fd: &OwnedFd, now: &Content, before: Option<&Content>) -> Result<(), FilesError> {
    let shown = shown(&now.form);
    ftruncate(fd, now.size).at(shown)?;
    let file = File::from(fd.try_clone().at(shown)?);
    let nothing = BTreeMap::new();
    let old = before.map_or(&nothing, |content| &content.chunks);
    let cell = |offset: &u64| offset / CHUNK;
    let differs = |offset: &&u64| old.get(*offset) != now.chunks.get(*offset);
    let all = old.keys().chain(now.chunks.keys());
    let changed: BTreeSet<u64> = all.filter(differs).map(cell).collect();
    for number in changed {
        let cell = number * CHUNK..(number + 1) * CHUNK;
        if old.range(cell.clone()).next().is_some() {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(fd, hole, cell.start, CHUNK).at(shown)?;
        }
        for (offset, chunk) in now.chunks.range(cell) {
            file.write_all_at(&chunk.0, *offset).at(shown)?;
        }
    }
    Ok(())
}

/// Returns the path that stands for content without a name in errors.
fn shown(form: &ContentForm) -> &FilePath {
    match form {
        ContentForm::Memory { name, .. } => name,
        ContentForm::Deleted { path } | ContentForm::Temporary { directory: path } => path,
    }
}
