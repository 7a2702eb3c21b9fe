//! State of each kind of open file, except sockets: pipes, pseudo-terminals, files without a name, epoll, timers,
//! inotify.

use super::{FileId, FilePath};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Properties by which the acceptor recognises a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFingerprint {
    /// Size, bytes.
    pub size: u64,
    /// Type and permissions.
    pub mode: u32,
    /// Last change of the content, nanoseconds since 1970.
    pub modified_ns: i64,
    /// File system (`f_fsid`), inode and birth time (nanoseconds): if all three agree, the acceptor's file is the
    /// donor's.
    pub identity: (u64, u64, i64),
    /// SHA-256 of the content, or of its first and last mebibyte if the file is large; `None` if the file changed while
    /// the tree ran, so that only the donor's very file is accepted.
    pub digest: Option<[u8; 32]>,
}

/// A pipe or FIFO, with the data in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// Path of a FIFO; `None` for a pipe.
    pub path: Option<FilePath>,
    /// Capacity (`F_GETPIPE_SZ`), bytes; 0 in a files snapshot of a running tree.
    pub capacity: u32,
    /// Unread data; in packet mode (`O_DIRECT`), one chunk for each packet.
    pub chunks: Vec<ByteString>,
    /// True in packet mode.
    pub packet_mode: bool,
    /// Owner, group and permissions; of a FIFO, its file's.
    pub access: (u32, u32, u32),
}

/// A pseudo-terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PseudoTerminal {
    /// Modes of the terminal: a `struct termios2` in the kernel's layout.
    pub modes: ByteString,
    /// Rows, columns, and width and height in pixels.
    pub window: [u16; 4],
    /// True if the slave cannot be opened (`TIOCSPTLCK`).
    pub locked: bool,
    /// True if the master is in packet mode (`TIOCPKT`).
    pub packet_mode: bool,
    /// True if the terminal is in exclusive mode (`TIOCEXCL`).
    pub exclusive: bool,
    /// Session that the terminal controls, and its foreground process group, as the tree sees them.
    pub session: Option<(i32, i32)>,
    /// Owner, group and permissions of `/dev/pts/N`.
    pub access: (u32, u32, u32),
}

/// Content without a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamelessContent {
    /// Kind of file that has the content.
    pub form: ContentForm,
    /// Owner, group and permissions.
    pub access: (u32, u32, u32),
    /// Last access and last change of the content, nanoseconds since 1970.
    pub times_ns: (i64, i64),
    /// Size, bytes.
    pub size: u64,
    /// Device and inode at the donor, if the content is memory that moves with its mappings: such content has no chunks
    /// here.
    pub mapped_memory: Option<(u64, u64)>,
    /// Data between holes, by offset; no chunk extends across a multiple of [`super::limits::CHUNK_BYTES_MAX`].
    pub chunks: BTreeMap<u64, ByteString>,
}

/// Kind of file that has content without a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContentForm {
    /// Memory file (`memfd_create(2)`).
    Memory {
        /// Name without the prefix `memfd:`.
        name: FilePath,
        /// Seals of the memory file (`F_GET_SEALS`).
        seals: u32,
    },
    /// A file that was unlinked.
    Deleted {
        /// Former path.
        path: FilePath,
    },
    /// A file made by `O_TMPFILE`.
    Temporary {
        /// Directory in which the file was made.
        directory: FilePath,
    },
}

impl ContentForm {
    /// Returns the form of a file with this former path and this inode; a file that never had a path shows the inode in
    /// place of a name.
    pub(crate) fn from_removed_path(path: &[u8], inode: u64) -> Self {
        let name_at = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        if path.get(name_at + 1..) == Some(format!("#{inode}").as_bytes()) {
            let directory = path[..name_at.max(1)].to_vec().into();
            return Self::Temporary { directory };
        }
        let path = path.to_vec().into();
        Self::Deleted { path }
    }
}

/// An entry of an epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EpollWatch {
    /// Descriptor number by which the file was added; the descriptor may have been closed since.
    pub fd: u32,
    /// The open file that is watched.
    pub file: FileId,
    /// Event mask as the kernel keeps it: `EPOLLET` and other modes included.
    pub events: u32,
    /// Data word that the program attached (`epoll_data`).
    pub data: u64,
}

/// State of a timerfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimerFdState {
    /// Clock: `CLOCK_REALTIME`, `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME` or an alarm clock.
    pub clock: i32,
    /// Flags with which the timer was set: `TFD_TIMER_ABSTIME`, `TFD_TIMER_CANCEL_ON_SET`.
    pub set_flags: u32,
    /// Time until expiry, nanoseconds; 0 if disarmed. For a timer set to an absolute time of day, nanoseconds
    /// since 1970.
    pub value_ns: u64,
    /// Period, nanoseconds.
    pub interval_ns: u64,
    /// Number of expirations that were not read.
    pub ticks: u64,
}

/// A watch of inotify.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InotifyWatch {
    /// Path of the watched file.
    pub path: FilePath,
    /// Event mask and mode flags.
    pub mask: u32,
}

/// Byte string; a decoded one is never longer than the message.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteString(#[serde(with = "serde_bytes")] pub Vec<u8>);

impl std::fmt::Debug for ByteString {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}
