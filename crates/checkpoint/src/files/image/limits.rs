//! Limits and consistency checks of an image. Images are sent by other nodes: nothing in them is trusted before these
//! checks.

use super::{
    ContentForm, FileId, FilesImage, LockHolder, OpenFile, OpenFileKind, UnixConnectionState,
    UnixName,
};
use holdfast_sys::socket_filter::{INSTRUCTIONS_MAX, SocketFilter};
use std::collections::BTreeMap;
use thiserror::Error;

/// Alignment of content chunks, bytes: no chunk extends across a multiple.
pub const CHUNK_BYTES_MAX: u64 = 64 * 1024;
/// Upper limit (exclusive) of descriptor numbers, which is the kernel's default limit of descriptors (`fs.nr_open`).
pub const DESCRIPTOR_NUMBERS_MAX: u32 = 1 << 20;
/// Most open files.
pub const FILES_MAX: usize = 1 << 20;
/// Longest path with its final NUL (`PATH_MAX`).
pub const PATH_BYTES_MAX: usize = 4096;
/// Most bytes of all contents without a name together.
pub const CONTENT_BYTES_MAX: u64 = 1 << 34;
/// Largest pipe, bytes.
pub const PIPE_BYTES_MAX: u32 = 1 << 30;
/// Highest watch descriptor of inotify: each lower number costs the acceptor a system call.
pub const WATCH_DESCRIPTOR_MAX: i32 = 1 << 20;
/// Most descriptors in one message (`SCM_MAX_FD`).
pub const MESSAGE_FILES_MAX: usize = 253;
/// Longest name of a Unix socket (`UNIX_PATH_MAX`).
const UNIX_NAME_BYTES_MAX: usize = 108;

/// Error: an image is invalid.
#[derive(Debug, Error)]
pub enum InvalidImage {
    /// The bytes do not encode an image.
    #[error("the descriptor image cannot be decoded: {0}")]
    Encoding(#[from] postcard::Error),
    /// Something in the image has a dangling reference, or exceeds a limit.
    #[error("the descriptor image is invalid: {0}")]
    Inconsistent(&'static str),
}

/// Checks that all references are valid, and that nothing exceeds its limit.
///
/// # Errors
/// [`InvalidImage::Inconsistent`] names the violated constraint.
pub fn check(image: &FilesImage) -> Result<(), InvalidImage> {
    require(image.files.len() <= FILES_MAX, "too many open files")?;
    for table in image.tables.values() {
        for (fd, slot) in &table.slots {
            require(
                *fd < DESCRIPTOR_NUMBERS_MAX,
                "a descriptor number is too high",
            )?;
            require_entry(&image.files, slot.file)?;
        }
    }
    for file in image.files.values() {
        check_file(image, file)?;
    }
    for (id, pipe) in &image.pipes {
        require(
            !image.contents.contains_key(id),
            "a pipe and a file have the same ID",
        )?;
        require(pipe.capacity <= PIPE_BYTES_MAX, "a pipe is too large")?;
        let bytes: usize = pipe.chunks.iter().map(|chunk| chunk.0.len()).sum();
        require(
            bytes <= pipe.capacity as usize,
            "a pipe's content exceeds its capacity",
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
    image: &FilesImage,
    changed: impl Iterator<Item = &'a FileId>,
) -> Result<(), InvalidImage> {
    let mut changed = changed.filter_map(|id| image.files.get(id));
    changed.try_for_each(|file| check_file(image, file))
}

fn check_contents(image: &FilesImage) -> Result<(), InvalidImage> {
    let mut total = 0u64;
    for content in image.contents.values() {
        total = total.saturating_add(content.size);
        let mut free_from = 0;
        for (offset, chunk) in &content.chunks {
            let length = chunk.0.len() as u64;
            require(*offset >= free_from, "chunks overlap")?;
            require(
                offset % CHUNK_BYTES_MAX + length <= CHUNK_BYTES_MAX,
                "a chunk is too long",
            )?;
            free_from = offset.saturating_add(length);
        }
        require(
            free_from <= content.size,
            "content lies past the file's end",
        )?;
        match &content.form {
            ContentForm::Memory { name, .. } => {
                let name = name.as_bytes();
                require(name.len() < 250 && !name.contains(&0), "invalid memfd name")?;
            }
            ContentForm::Deleted { path } | ContentForm::Temporary { directory: path } => {
                check_path(path.as_bytes())?;
            }
        }
    }
    require(
        total <= CONTENT_BYTES_MAX,
        "too much content of files without a name",
    )
}

fn check_file(image: &FilesImage, file: &OpenFile) -> Result<(), InvalidImage> {
    for lock in &file.locks {
        if let LockHolder::Table(table) = lock.holder {
            require_entry(&image.tables, table)?;
        }
        require(
            lock.end.is_none_or(|end| end >= lock.start) && lock.start <= i64::MAX as u64,
            "a lock ends before it begins",
        )?;
    }
    match &file.kind {
        OpenFileKind::Regular { path, offset, .. } | OpenFileKind::Directory { path, offset } => {
            require(*offset <= i64::MAX as u64, "a file offset is negative")?;
            check_path(path.as_bytes())
        }
        OpenFileKind::Path { path } | OpenFileKind::Device { path, .. } => {
            check_path(path.as_bytes())
        }
        OpenFileKind::Content { content, offset } => {
            require(*offset <= i64::MAX as u64, "a file offset is negative")?;
            require_entry(&image.contents, *content)
        }
        OpenFileKind::Pipe { pipe } => require_entry(&image.pipes, *pipe),
        OpenFileKind::TerminalMaster { terminal } | OpenFileKind::TerminalSlave { terminal } => {
            require_entry(&image.terminals, *terminal)
        }
        OpenFileKind::Epoll { watches } => watches.iter().try_for_each(|watch| {
            require(
                watch.fd < DESCRIPTOR_NUMBERS_MAX,
                "a watched descriptor number is too high",
            )?;
            require_entry(&image.files, watch.file)
        }),
        OpenFileKind::Inotify { watches } => watches.iter().try_for_each(|(id, watch)| {
            require(
                (1..=WATCH_DESCRIPTOR_MAX).contains(id),
                "a watch descriptor is out of range",
            )?;
            check_path(watch.path.as_bytes())
        }),
        OpenFileKind::Unix(socket) => check_unix(image, socket),
        OpenFileKind::Event { count, .. } => {
            require(*count != u64::MAX, "an eventfd's counter is out of range")
        }
        OpenFileKind::Timer(timer) => require(
            timer.value_ns <= i64::MAX as u64 && timer.interval_ns <= i64::MAX as u64,
            "a timer's time is out of range",
        ),
        OpenFileKind::Netlink(socket) => check_filter(&socket.filter),
        OpenFileKind::Signal { .. } | OpenFileKind::Inet { .. } | OpenFileKind::Pidfd { .. } => {
            Ok(())
        }
    }
}

fn check_unix(image: &FilesImage, socket: &super::UnixSocket) -> Result<(), InvalidImage> {
    let is_unix = |file: FileId| match image.files.get(&file).map(|file| &file.kind) {
        Some(OpenFileKind::Unix(_)) => Ok(()),
        _ => Err(InvalidImage::Inconsistent(
            "a socket's peer is not a Unix socket",
        )),
    };
    check_filter(&socket.filter)?;
    match &socket.link {
        UnixConnectionState::Peer(file) | UnixConnectionState::PendingAccept(file, _) => {
            is_unix(*file)?
        }
        UnixConnectionState::Service(path) => {
            require(
                path.len() < UNIX_NAME_BYTES_MAX,
                "a service's socket path is too long",
            )?;
            check_path(path.as_bytes())?;
        }
        UnixConnectionState::Unconnected
        | UnixConnectionState::PeerClosed
        | UnixConnectionState::Listening(_) => {}
    }
    match &socket.name {
        UnixName::None => {}
        UnixName::Abstract(name) => require(
            name.0.len() < UNIX_NAME_BYTES_MAX,
            "an abstract socket name is too long",
        )?,
        UnixName::Path { name, file, .. } => {
            require(
                name.len() <= UNIX_NAME_BYTES_MAX,
                "a socket's name is too long",
            )?;
            check_text_path(name.as_bytes())?;
            file.iter()
                .try_for_each(|file| check_path(file.as_bytes()))?;
        }
    }
    for message in &socket.queue {
        require(
            message.files.len() <= MESSAGE_FILES_MAX,
            "too many descriptors in a message",
        )?;
        require(
            message.sender_name.0.len() <= UNIX_NAME_BYTES_MAX,
            "a sender's socket name is too long",
        )?;
        for file in &message.files {
            require_entry(&image.files, *file)?;
        }
    }
    Ok(())
}

fn check_filter(filter: &SocketFilter) -> Result<(), InvalidImage> {
    require(
        filter.program.len() <= INSTRUCTIONS_MAX,
        "a filter is too long",
    )
}

fn check_path(path: &[u8]) -> Result<(), InvalidImage> {
    require(path.starts_with(b"/"), "a path is not absolute")?;
    check_text_path(path)
}

fn check_text_path(path: &[u8]) -> Result<(), InvalidImage> {
    require(
        path.len() < PATH_BYTES_MAX && !path.contains(&0),
        "a path is too long or contains a NUL byte",
    )
}

fn require_entry<T>(map: &BTreeMap<u32, T>, id: u32) -> Result<(), InvalidImage> {
    require(map.contains_key(&id), "a reference to a missing object")
}

fn require(holds: bool, what: &'static str) -> Result<(), InvalidImage> {
    if holds {
        Ok(())
    } else {
        Err(InvalidImage::Inconsistent(what))
    }
}
