//! Pipes and FIFOs.

use super::named_file;
use crate::files::acceptor::FdStore;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, StepContext};
use crate::files::image::{ByteString, FileId, FilePath, ObjectId, OpenFile, OpenFileKind, Pipe};
use crate::files::syscalls;
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
pub fn save(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let pipe = saver.object_id(&source.info);
    let path = fifo_path(source, stat)?;
    refuse_outside_holders(saver, source, path.is_some())?;
    if !saver.image.pipes.contains_key(&pipe) {
        let packets = end_flags(saver, source).any(|flags| flags & libc::O_DIRECT as u32 != 0);
        // A thread that waits in splice(2) holds the pipe's lock, and any query of the pipe waits as long.
        let (capacity, chunks) = if saver.frozen {
            let capacity = fcntl_getpipe_size(&source.copy).with_step("F_GETPIPE_SZ")?;
            (
                capacity,
                read_content(&source.reopen_path()).with_step("tee")?,
            )
        } else {
            (0, Vec::new())
        };
        let value = Pipe {
            path,
            capacity: capacity as u32,
            chunks,
            packet_mode: packets,
            access: (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777),
        };
        saver.image.pipes.insert(pipe, value);
    }
    Ok(OpenFileKind::Pipe { pipe })
}

fn fifo_path(source: &FileBeingSaved, stat: &Stat) -> SaveResult<Option<FilePath>> {
    if source.link.starts_with("pipe:") {
        return Ok(None);
    }
    let present = fs::metadata(&source.path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (stat.st_dev, stat.st_ino));
    if present {
        Ok(Some(source.path.clone()))
    } else {
        Err(BlockReason::OtherName.into())
    }
}

/// Returns the flags of all ends in the tree.
fn end_flags<'a>(
    saver: &'a OpenFileSaver<'_>,
    source: &FileBeingSaved,
) -> impl Iterator<Item = u32> + 'a {
    let same_pipe = saver.open_files.with_same_key(&source.info).iter();
    same_pipe.map(|index| saver.open_files.list[*index].info.flags)
}

/// Refuses a pipe that a process outside the tree has open. Such a process is found among the host's processes, or
/// concluded from an end that is open but missing in the tree, unless that end is in flight.
fn refuse_outside_holders(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    fifo: bool,
) -> SaveResult<()> {
    if let Some(pid) = saver.outside_holders.holder_of_link(&source.link) {
        return Err(BlockReason::OtherEndOutside(Some(pid)).into());
    }
    let access = libc::O_ACCMODE as u32;
    let tree_has_end = |mode: i32| {
        end_flags(saver, source)
            .any(|flags| flags & access == mode as u32 || flags & access == libc::O_RDWR as u32)
    };
    let mut has_end = [PollFd::new(&source.copy, PollFlags::empty())];
    poll(&mut has_end, Some(&Timespec::default())).with_step("poll")?;
    let is_closed = has_end[0].revents();
    let access_mode = source.info.flags & access;
    let reader_alone = access_mode == libc::O_RDONLY as u32 && !tree_has_end(libc::O_WRONLY);
    let writer_alone = access_mode == libc::O_WRONLY as u32 && !tree_has_end(libc::O_RDONLY);
    // A FIFO that was never opened for writing shows no hangup.
    if reader_alone && !fifo && !is_closed.contains(PollFlags::HUP)
        || writer_alone && !is_closed.contains(PollFlags::ERR)
    {
        saver
            .unpaired_pipes
            .push((source.open_file_index, source.link.clone()));
    }
    Ok(())
}

/// Returns the pipes with another end that is open, but not in the tree. While the tree runs, the files in flight
/// between sockets are unknown.
pub fn pipes_open_outside(saver: &OpenFileSaver<'_>) -> Vec<(usize, String)> {
    let is_unix = |file: &OpenFile| matches!(file.kind, OpenFileKind::Unix(_));
    if !saver.frozen && saver.image.files.values().any(is_unix) {
        return Vec::new();
    }
    let access = |index: usize| saver.open_files.list[index].info.flags & libc::O_ACCMODE as u32;
    let is_whole = |index: usize| {
        let mut ends = saver
            .open_files
            .with_same_key(&saver.open_files.list[index].info)
            .iter();
        ends.any(|end| access(*end) != access(index))
    };
    let half = saver
        .unpaired_pipes
        .iter()
        .filter(|(index, _)| !is_whole(*index));
    half.cloned().collect()
}

/// Reads the content of the pipe at this path. The content stays in the pipe: `tee` copies it into a temporary pipe.
pub fn read_content(path: &str) -> std::io::Result<Vec<ByteString>> {
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
            Ok(length) => chunks.push(ByteString(buffer[..length].to_vec())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(chunks)
}

/// Makes an end of a pipe. The pipe is created at the first use, and kept open in both directions until its content is
/// in it.
pub fn make(store: &mut FdStore, id: FileId, pipe: ObjectId, flags: u32) -> Result<(), FilesError> {
    if !store.object_fds.contains_key(&pipe) {
        let value = &store.image.pipes[&pipe];
        let capacity = value.capacity as usize;
        let keeper = match &value.path {
            Some(path) => {
                named_file::verify_type(path, rustix::fs::FileType::Fifo, "type")?;
                let read_write_flags = (libc::O_RDWR | libc::O_NONBLOCK) as u32;
                named_file::open_with_rights(&mut store.opener, path, read_write_flags)?
            }
            None => {
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).with_step("pipe2")?;
                let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
                let keeper = named_file::open(&path, (libc::O_RDWR | libc::O_NONBLOCK) as u32)?;
                let (reader, writer) = (
                    store.move_above_tree(reader)?,
                    store.move_above_tree(writer)?,
                );
                store
                    .unclaimed_ends
                    .insert((pipe, libc::O_RDONLY as u32), reader);
                store
                    .unclaimed_ends
                    .insert((pipe, libc::O_WRONLY as u32), writer);
                keeper
            }
        };
        if capacity > 0 {
            fcntl_setpipe_size(&keeper, capacity).with_step("F_SETPIPE_SZ")?;
        }
        store.insert_object_fd(pipe, keeper)?;
    }
    // The ends from `pipe2` have exactly the flags that a program sees; other ends are opened.
    let fd = match store
        .unclaimed_ends
        .remove(&(pipe, flags & libc::O_ACCMODE as u32))
    {
        Some(end) => end,
        None => {
            let path = format!("/proc/self/fd/{}", store.object_fds[&pipe].as_raw_fd());
            named_file::open(&path, flags & !(libc::O_DIRECT as u32))?
        }
    };
    syscalls::set_status(fd.as_fd(), flags & !(libc::O_ASYNC as u32)).with_step("F_SETFL")?;
    store.insert(id, fd)
}

/// Writes the content, and sets the owner of the pipe. A FIFO of the same host has both already.
pub fn fill(keeper: &OwnedFd, pipe: &Pipe) -> Result<(), FilesError> {
    if pipe.path.is_none() {
        let (uid, gid, mode) = pipe.access;
        fchown(keeper, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).with_step("fchown")?;
        fchmod(keeper, Mode::from_raw_mode(mode)).with_step("fchmod")?;
    }
    let bytes: usize = pipe.chunks.iter().map(|chunk| chunk.0.len()).sum();
    let unread_bytes = ioctl_fionread(keeper).with_step("FIONREAD")? as usize;
    match (&pipe.path, unread_bytes) {
        (_, 0) => {}
        (Some(_), there) if there == bytes => return Ok(()),
        (path, _) => {
            return Err(named_file::differs_refusal(
                path.as_deref().unwrap_or(Path::new("pipe")),
                "unread content",
            ));
        }
    }
    fcntl_setpipe_size(keeper, pipe.capacity as usize).with_step("F_SETPIPE_SZ")?;
    let mode = OFlags::RDWR | OFlags::NONBLOCK;
    if pipe.packet_mode {
        rustix::fs::fcntl_setfl(keeper, mode | OFlags::DIRECT).with_step("F_SETFL")?;
    }
    for chunk in &pipe.chunks {
        let mut rest = chunk.0.as_slice();
        while !rest.is_empty() {
            let written = rustix::io::write(keeper, rest).with_step("pipe")?;
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
    fn content_is_read_while_children_start() {
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
                let found = read_content(&path);
                if !matches!(&found, Ok(chunks) if chunks.len() == 1 && chunks[0].0 == b"content") {
                    over.store(true, Ordering::Relaxed);
                    panic!("{found:?}");
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
