//! Memory files and files without a name: they move by value.

use crate::process::files::acceptor::Stock;
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason, Refusal};
use crate::process::files::image::limits::CHUNK;
use crate::process::files::image::{Bytes, Content, ContentForm, FileId, FilePath, Kind, ObjectId};
use crate::process::files::kinds::named::{self, allowed};
use crate::process::rights::Opener;
use rustix::fs::{
    Gid, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Stat, Uid, fchmod, fchown, fcntl_add_seals,
    fcntl_get_seals, fstatfs, ftruncate, memfd_create, open, unlink,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

/// `HUGETLBFS_MAGIC` (`linux/magic.h`).
const HUGETLBFS: i64 = 0x9584_58f6;

/// Reads an open file without a name, and its content when it is met for the first time.
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
            size,
            elsewhere,
            chunks,
        };
        saver.image.contents.insert(content, value);
    }
    let offset = subject.info.offset;
    Ok(Kind::Content { content, offset })
}

fn form(subject: &Subject) -> Saved<ContentForm> {
    let path = named::former_name(&subject.path);
    if let Some(name) = path.as_os_str().as_bytes().strip_prefix(b"/memfd:") {
        return Ok(ContentForm::Memory {
            name: name.to_vec().into(),
            seals: fcntl_get_seals(&subject.copy).at("F_GET_SEALS")?.bits(),
        });
    }
    let directory = path.parent().filter(|name| name.has_root());
    let directory = directory.ok_or(Reason::Unreachable)?;
    let made_without = format!("#{}", subject.info.inode);
    if path
        .file_name()
        .is_some_and(|name| name == made_without.as_str())
    {
        let directory = directory.to_path_buf().into();
        return Ok(ContentForm::Temporary { directory });
    }
    let path = path.to_path_buf().into();
    Ok(ContentForm::Deleted { path })
}

/// What is not a hole. The file is opened anew, since looking for holes moves the position.
fn read(path: &str, size: u64) -> io::Result<BTreeMap<u64, Bytes>> {
    let file = File::open(path)?;
    let mut chunks = BTreeMap::new();
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(data))?.min(size);
        at = data - data % CHUNK;
        while at < end {
            let mut chunk = vec![0; CHUNK.min(size - at) as usize];
            file.read_exact_at(&mut chunk, at)?;
            if chunk.iter().any(|byte| *byte != 0) {
                chunks.insert(at, Bytes(chunk));
            }
            at += CHUNK;
        }
    }
    Ok(chunks)
}

/// Opens content, which is made at the first time.
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
                let fd = create(&mut stock.opener, &value)?;
                write(&fd, &value, None)?;
                fd
            }
        };
        stock.keeper(content, fd)?;
    }
    let path = format!("/proc/self/fd/{}", stock.keepers[&content].as_raw_fd());
    // The flags that made a file without a name are still among them.
    let fd = named::open(&path, flags & !(libc::O_TMPFILE as u32))?;
    stock.keep(id, fd)
}

fn create(opener: &mut Opener, content: &Content) -> Result<OwnedFd, FilesError> {
    let (uid, gid, mode) = content.access;
    let fd = match &content.form {
        ContentForm::Memory { name, .. } => {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            memfd_create(name.as_os_str(), flags).at("memfd_create")?
        }
        ContentForm::Deleted { path } if !opener.is_bounded() => create_deleted(path)?,
        ContentForm::Deleted { path } => {
            let made = opener.nameless(path, true, content.access);
            return allowed(opener, path, made);
        }
        ContentForm::Temporary { directory } if opener.is_bounded() => {
            let made = opener.nameless(directory, false, content.access);
            return allowed(opener, directory, made);
        }
        ContentForm::Temporary { directory } => {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            open(&**directory, flags, Mode::RUSR | Mode::WUSR).at(directory)?
        }
    };
    fchown(&fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).at("fchown")?;
    // What makes a program somebody else's is root's alone to give.
    let plain = if opener.is_bounded() { 0o1777 } else { 0o7777 };
    fchmod(&fd, Mode::from_raw_mode(mode & plain)).at("fchmod")?;
    Ok(fd)
}

/// A file under its former name, or beside it where the name is in use, and the name removed.
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

/// Writes what changed while the tree ran.
pub fn update(fd: &OwnedFd, before: &Content, now: &Content) -> Result<(), FilesError> {
    if before != now && now.elsewhere.is_none() {
        write(fd, now, Some(before))?;
    }
    Ok(())
}

/// Brings content to its final state: what changed since it was made, then its seals.
pub fn finish(fd: &OwnedFd, before: Option<&Content>, now: &Content) -> Result<(), FilesError> {
    if before != Some(now) && now.elsewhere.is_none() {
        write(fd, now, before)?;
    }
    if let ContentForm::Memory { seals, .. } = &now.form {
        let seals = SealFlags::from_bits_retain(*seals);
        let there = fcntl_get_seals(fd).at("F_GET_SEALS")?;
        if !there.contains(seals) {
            fcntl_add_seals(fd, seals).at("F_ADD_SEALS")?;
        }
    }
    Ok(())
}

fn write(fd: &OwnedFd, now: &Content, before: Option<&Content>) -> Result<(), FilesError> {
    let shown = shown(&now.form);
    ftruncate(fd, now.size).at(shown)?;
    let file = File::from(fd.try_clone().at(shown)?);
    let nothing = BTreeMap::new();
    let old = before.map_or(&nothing, |content| &content.chunks);
    for (offset, chunk) in old {
        if !now.chunks.contains_key(offset) && *offset < now.size {
            let length = chunk.0.len().min((now.size - offset) as usize);
            file.write_all_at(&vec![0; length], *offset).at(shown)?;
        }
    }
    for (offset, chunk) in &now.chunks {
        if old.get(offset) != Some(chunk) {
            file.write_all_at(&chunk.0, *offset).at(shown)?;
        }
    }
    Ok(())
}

/// How what has no name is named where something is in its way.
fn shown(form: &ContentForm) -> &FilePath {
    match form {
        ContentForm::Memory { name, .. } => name,
        ContentForm::Deleted { path } | ContentForm::Temporary { directory: path } => path,
    }
}
