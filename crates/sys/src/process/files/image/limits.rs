//! Limits and consistency checks of an image. Images are sent by other nodes: nothing in them is trusted before these
//! checks.

use super::{ContentForm, FileId, Image, Kind, LockHolder, OpenFile, UnixLink, UnixName};
use crate::socket_filter::{INSTRUCTIONS, SocketFilter};
use std::collections::BTreeMap;
use thiserror::Error;

/// Alignment of content chunks, bytes: no chunk extends across a multiple.
pub const CHUNK: u64 = 64 * 1024;
/// Upper limit (exclusive) of descriptor numbers, which is the kernel's default limit of descriptors (`fs.nr_open`).
pub const DESCRIPTORS: u32 = 1 << 20;
/// Most open files.
pub const FILES: usize = 1 << 20;
/// Longest path with its final NUL (`PATH_MAX`).
pub const PATH: usize = 4096;
/// Most bytes of all contents without a name together.
pub const CONTENT_BYTES: u64 = 1 << 34;
/// Largest pipe, bytes.
pub const PIPE: u32 = 1 << 30;
/// Highest watch descriptor of inotify: each lower number costs the acceptor a system call.
pub const WATCH_DESCRIPTOR: i32 = 1 << 20;
/// Most descriptors in one message (`SCM_MAX_FD`).
pub const MESSAGE_FILES: usize = 253;
/// Longest name of a Unix socket (`UNIX_PATH_MAX`).
const UNIX_NAME: usize = 108;

/// Error: an image is invalid.
#[derive(Debug, Error)]
pub enum Malformed {
    /// The bytes do not encode an image.
    #[error("the image of descriptors cannot be read: {0}")]
    Encoding(#[from] postcard::Error),
    /// Something in the image has a dangling reference, or exceeds a limit.
    #[error("the image of descriptors contradicts itself: {0}")]
    Inconsistent(&'static str),
}

/// Checks that all references are valid, and that nothing exceeds its limit.
///
/// # Errors
/// [`Malformed::Inconsistent`] names the violated constraint.
pub fn check(image: &Image) -> Result<(), Malformed> {
    require(image.files.len() <= FILES, "too many open files")?;
    for table in image.tables.values() {
        for (fd, slot) in &table.slots {
            require(*fd < DESCRIPTORS, "a descriptor is too high")?;
            refers(&image.files, slot.file)?;
        }
    }
    for file in image.files.values() {
        check_file(image, file)?;
    }
    for (id, pipe) in &image.pipes {
        require(
            !image.contents.contains_key(id),
            "a pipe has the number of a file",
        )?;
        require(pipe.capacity <= PIPE, "a pipe is too large")?;
        let bytes: usize = pipe.chunks.iter().map(|chunk| chunk.0.len()).sum();
        require(
            bytes <= pipe.capacity as usize,
            "a pipe has more than it can hold",
        )?;
        pipe.path
            .iter()
            .try_for_each(|path| check_path(path.as_bytes()))?;
    }
    check_contents(image)
}

/// Checks an image in which only the open files in `changed` differ from the last check.
///
/// # Errors
/// Same as [`check`].
pub(super) fn check_files<'a>(
    image: &Image,
    changed: impl Iterator<Item = &'a FileId>,
) -> Result<(), Malformed> {
    let mut changed = changed.filter_map(|id| image.files.get(id));
    changed.try_for_each(|file| check_file(image, file))
}

fn check_contents(image: &Image) -> Result<(), Malformed> {
    let mut total = 0u64;
    for content in image.contents.values() {
        total = total.saturating_add(content.size);
        let mut free_from = 0;
        for (offset, chunk) in &content.chunks {
            let length = chunk.0.len() as u64;
            require(*offset >= free_from, "chunks overlap")?;
            require(offset % CHUNK + length <= CHUNK, "a chunk is too long")?;
            free_from = offset.saturating_add(length);
        }
        require(
            free_from <= content.size,
            "content lies behind a file's end",
        )?;
        match &content.form {
            ContentForm::Memory { name, .. } => {
                let name = name.as_bytes();
                require(name.len() < 250 && !name.contains(&0), "a memfd's name")?;
            }
            ContentForm::Deleted { path } | ContentForm::Temporary { directory: path } => {
                check_path(path.as_bytes())?;
            }
        }
    }
    require(total <= CONTENT_BYTES, "too much content without a name")
}

fn check_file(image: &Image, file: &OpenFile) -> Result<(), Malformed> {
    for lock in &file.locks {
        if let LockHolder::Table(table) = lock.holder {
            refers(&image.tables, table)?;
        }
        require(
            lock.end.is_none_or(|end| end >= lock.start) && lock.start <= i64::MAX as u64,
            "a lock ends before it begins",
        )?;
    }
    match &file.kind {
        Kind::Regular { path, offset, .. } | Kind::Directory { path, offset } => {
            require(*offset <= i64::MAX as u64, "a position is negative")?;
            check_path(path.as_bytes())
        }
        Kind::Path { path } | Kind::Device { path, .. } => check_path(path.as_bytes()),
        Kind::Content { content, offset } => {
            require(*offset <= i64::MAX as u64, "a position is negative")?;
            refers(&image.contents, *content)
        }
        Kind::Pipe { pipe } => refers(&image.pipes, *pipe),
        Kind::TerminalMaster { terminal } | Kind::TerminalSlave { terminal } => {
            refers(&image.terminals, *terminal)
        }
        Kind::Epoll { watches } => watches.iter().try_for_each(|watch| {
            require(watch.fd < DESCRIPTORS, "a watched descriptor is too high")?;
            refers(&image.files, watch.file)
        }),
        Kind::Inotify { watches } => watches.iter().try_for_each(|(id, watch)| {
            require(
                (1..=WATCH_DESCRIPTOR).contains(id),
                "a watch descriptor is out of range",
            )?;
            check_path(watch.path.as_bytes())
        }),
        Kind::Unix(socket) => check_unix(image, socket),
        Kind::Event { count, .. } => require(*count != u64::MAX, "an eventfd counts too far"),
        Kind::Timer(timer) => require(
            timer.value_ns <= i64::MAX as u64 && timer.interval_ns <= i64::MAX as u64,
            "a timer never expires",
        ),
        Kind::Netlink(socket) => check_filter(&socket.filter),
        Kind::Signal { .. } | Kind::Inet { .. } | Kind::Pidfd { .. } => Ok(()),
    }
}

fn check_unix(image: &Image, socket: &super::UnixSocket) -> Result<(), Malformed> {
    let is_unix = |file: FileId| match image.files.get(&file).map(|file| &file.kind) {
        Some(Kind::Unix(_)) => Ok(()),
        _ => Err(Malformed::Inconsistent("a socket's peer is none")),
    };
    check_filter(&socket.filter)?;
    match &socket.link {
        UnixLink::To(file) | UnixLink::Waiting(file, _) => is_unix(*file)?,
        UnixLink::Service(path) => {
            require(path.len() < UNIX_NAME, "a service's name is too long")?;
            check_path(path.as_bytes())?;
        }
        UnixLink::Alone | UnixLink::Gone | UnixLink::Listening(_) => {}
    }
    match &socket.name {
        UnixName::None => {}
        UnixName::Abstract(name) => require(name.0.len() < UNIX_NAME, "a socket's name")?,
        UnixName::Path { name, file, .. } => {
            require(name.len() <= UNIX_NAME, "a socket's name is too long")?;
            check_text(name.as_bytes())?;
            file.iter()
                .try_for_each(|file| check_path(file.as_bytes()))?;
        }
    }
    for message in &socket.queue {
        require(
            message.files.len() <= MESSAGE_FILES,
            "too many descriptors in a message",
        )?;
        require(message.from.0.len() <= UNIX_NAME, "a sender's name")?;
        for file in &message.files {
            refers(&image.files, *file)?;
        }
    }
    Ok(())
}

fn check_filter(filter: &SocketFilter) -> Result<(), Malformed> {
    require(filter.program.len() <= INSTRUCTIONS, "a filter is too long")
}

fn check_path(path: &[u8]) -> Result<(), Malformed> {
    require(path.starts_with(b"/"), "a path is not absolute")?;
    check_text(path)
}

fn check_text(path: &[u8]) -> Result<(), Malformed> {
    require(
        path.len() < PATH && !path.contains(&0),
        "a path is too long, or no path",
    )
}

fn refers<T>(map: &BTreeMap<u32, T>, id: u32) -> Result<(), Malformed> {
    require(
        map.contains_key(&id),
        "something refers to what is not there",
    )
}

fn require(holds: bool, what: &'static str) -> Result<(), Malformed> {
    if holds {
        Ok(())
    } else {
        Err(Malformed::Inconsistent(what))
    }
}
