//! Pipes and FIFOs.

use super::named;
use crate::process::files::acceptor::Stock;
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason};
use crate::process::files::image::{Bytes, FileId, FilePath, Kind, ObjectId, OpenFile, Pipe};
use crate::process::files::raw;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, open};
use rustix::io::{Errno, ioctl_fionread};
use rustix::pipe::{
    PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, tee,
};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Saves an end of a pipe, and the pipe itself at the first encounter.
pub fn save(saver: &mut Saver<'_>, subject: &Subject, stat: &Stat) -> Saved<Kind> {
    let pipe = saver.object(&subject.info);
    let path = fifo_path(subject, stat)?;
    refuse_strangers(saver, subject, path.is_some())?;
    if !saver.image.pipes.contains_key(&pipe) {
        let packets = ends(saver, subject).any(|flags| flags & libc::O_DIRECT as u32 != 0);
        // A thread that waits in splice(2) holds the pipe's lock, and any query of the pipe waits as long.
        let (capacity, chunks) = if saver.frozen {
            let capacity = fcntl_getpipe_size(&subject.copy).at("F_GETPIPE_SZ")?;
            (capacity, content(&subject.reopen_path()).at("tee")?)
        } else {
            (0, Vec::new())
        };
        let value = Pipe {
            path,
            capacity: capacity as u32,
            chunks,
            packets,
            access: (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777),
        };
        saver.image.pipes.insert(pipe, value);
    }
    Ok(Kind::Pipe { pipe })
}

fn fifo_path(subject: &Subject, stat: &Stat) -> Saved<Option<FilePath>> {
    if subject.link.starts_with("pipe:") {
        return Ok(None);
    }
    let present = fs::metadata(&subject.path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (stat.st_dev, stat.st_ino));
    if present {
        Ok(Some(subject.path.clone()))
    } else {
        Err(Reason::OtherName.into())
    }
}

/// Returns the flags of all ends in the tree.
fn ends<'a>(saver: &'a Saver<'_>, subject: &Subject) -> impl Iterator<Item = u32> + 'a {
    let alike = saver.pool.alike(&subject.info).iter();
    alike.map(|class| saver.pool.classes[*class].info.flags)
}

/// Refuses a pipe that a process outside the tree has open. Such a process is found among the host's processes, or
/// concluded from an end that is open but missing in the tree, unless that end is in flight.
fn refuse_strangers(saver: &mut Saver<'_>, subject: &Subject, fifo: bool) -> Saved<()> {
    if let Some(pid) = saver.outside.holder(&subject.link) {
        return Err(Reason::OtherEndOutside(Some(pid)).into());
    }
    let access = libc::O_ACCMODE as u32;
    let has = |mode: i32| {
        ends(saver, subject)
            .any(|flags| flags & access == mode as u32 || flags & access == libc::O_RDWR as u32)
    };
    let mut ask = [PollFd::new(&subject.copy, PollFlags::empty())];
    poll(&mut ask, Some(&Timespec::default())).at("poll")?;
    let gone = ask[0].revents();
    let mine = subject.info.flags & access;
    let reader_alone = mine == libc::O_RDONLY as u32 && !has(libc::O_WRONLY);
    let writer_alone = mine == libc::O_WRONLY as u32 && !has(libc::O_RDONLY);
    // A FIFO that was never opened for writing shows no hangup.
    if reader_alone && !fifo && !gone.contains(PollFlags::HUP)
        || writer_alone && !gone.contains(PollFlags::ERR)
    {
        saver.half_pipes.push((subject.class, subject.link.clone()));
    }
    Ok(())
}

/// Returns the pipes with another end that is open, but not in the tree. While the tree runs, the files in flight
/// between sockets are unknown.
pub fn half(saver: &Saver<'_>) -> Vec<(usize, String)> {
    let is_unix = |file: &OpenFile| matches!(file.kind, Kind::Unix(_));
    if !saver.frozen && saver.image.files.values().any(is_unix) {
        return Vec::new();
    }
    let access = |class: usize| saver.pool.classes[class].info.flags & libc::O_ACCMODE as u32;
    let is_whole = |class: usize| {
        let mut ends = saver.pool.alike(&saver.pool.classes[class].info).iter();
        ends.any(|end| access(*end) != access(class))
    };
    let half = saver
        .half_pipes
        .iter()
        .filter(|(class, _)| !is_whole(*class));
    half.cloned().collect()
}

/// Reads the content of the pipe at this path. The content stays in the pipe: `tee` copies it into a temporary pipe.
pub fn content(path: &str) -> std::io::Result<Vec<Bytes>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let from = open(path, flags, Mode::empty())?;
    let waiting = ioctl_fionread(&from)? as usize;
    if waiting == 0 {
        return Ok(Vec::new());
    }
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let capacity = fcntl_getpipe_size(&from)?;
    fcntl_setpipe_size(&writer, capacity)?;
    tee(&from, &writer, capacity, SpliceFlags::NONBLOCK)?;
    drop(writer);
    let mut chunks = Vec::new();
    let mut buffer = vec![0; waiting];
    loop {
        match rustix::io::read(&reader, &mut buffer) {
            // A child that another thread is just starting may still have the other end.
            Ok(0) | Err(Errno::AGAIN) => break,
            // In packet mode, a read ends with the packet.
            Ok(length) => chunks.push(Bytes(buffer[..length].to_vec())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(chunks)
}

/// Makes an end of a pipe. The pipe is created at the first use, and kept open in both directions until its content is
/// in it.
pub fn make(stock: &mut Stock, id: FileId, pipe: ObjectId, flags: u32) -> Result<(), FilesError> {
    if !stock.keepers.contains_key(&pipe) {
        let value = &stock.image.pipes[&pipe];
        let capacity = value.capacity as usize;
        let keeper = match &value.path {
            Some(path) => {
                named::verify_type(path, rustix::fs::FileType::Fifo, "type")?;
                let both = (libc::O_RDWR | libc::O_NONBLOCK) as u32;
                named::open_for(&mut stock.opener, path, both)?
            }
            None => {
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).at("pipe2")?;
                let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
                let keeper = named::open(&path, (libc::O_RDWR | libc::O_NONBLOCK) as u32)?;
                let (reader, writer) = (stock.lift(reader)?, stock.lift(writer)?);
                stock
                    .first_files
                    .insert((pipe, libc::O_RDONLY as u32), reader);
                stock
                    .first_files
                    .insert((pipe, libc::O_WRONLY as u32), writer);
                keeper
            }
        };
        if capacity > 0 {
            fcntl_setpipe_size(&keeper, capacity).at("F_SETPIPE_SZ")?;
        }
        stock.keeper(pipe, keeper)?;
    }
    // The ends from `pipe2` have exactly the flags that a program sees; other ends are opened.
    let fd = match stock
        .first_files
        .remove(&(pipe, flags & libc::O_ACCMODE as u32))
    {
        Some(end) => end,
        None => {
            let path = format!("/proc/self/fd/{}", stock.keepers[&pipe].as_raw_fd());
            named::open(&path, flags & !(libc::O_DIRECT as u32))?
        }
    };
    raw::set_status(fd.as_fd(), flags & !(libc::O_ASYNC as u32)).at("F_SETFL")?;
    stock.keep(id, fd)
}

/// Writes the content, and sets the owner of the pipe. A FIFO of the same host has both already.
pub fn fill(keeper: &OwnedFd, pipe: &Pipe) -> Result<(), FilesError> {
    if pipe.path.is_none() {
        let (uid, gid, mode) = pipe.access;
        fchown(keeper, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).at("fchown")?;
        fchmod(keeper, Mode::from_raw_mode(mode)).at("fchmod")?;
    }
    let bytes: usize = pipe.chunks.iter().map(|chunk| chunk.0.len()).sum();
    let there = ioctl_fionread(keeper).at("FIONREAD")? as usize;
    match (&pipe.path, there) {
        (_, 0) => {}
        (Some(_), there) if there == bytes => return Ok(()),
        (path, _) => {
            return Err(named::differs(
                path.as_deref().unwrap_or(Path::new("pipe")),
                "unread content",
            ));
        }
    }
    fcntl_setpipe_size(keeper, pipe.capacity as usize).at("F_SETPIPE_SZ")?;
    let mode = OFlags::RDWR | OFlags::NONBLOCK;
    if pipe.packets {
        rustix::fs::fcntl_setfl(keeper, mode | OFlags::DIRECT).at("F_SETFL")?;
    }
    for chunk in &pipe.chunks {
        let mut rest = chunk.0.as_slice();
        while !rest.is_empty() {
            let written = rustix::io::write(keeper, rest).at("pipe")?;
            rest = &rest[written..];
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Children have copies of all descriptors until they call `exec`.
    #[test]
    fn content_is_read_while_programs_are_started() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        rustix::io::write(&writer, b"content").expect("written");
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    Command::new("true").status().expect("it starts");
                }
            });
            for _ in 0..3000 {
                let found = content(&path);
                if !matches!(&found, Ok(chunks) if chunks.len() == 1 && chunks[0].0 == b"content") {
                    over.store(true, Ordering::Relaxed);
                    panic!("{found:?}");
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
