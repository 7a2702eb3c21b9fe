//! What open files are made of, sockets aside.

use super::{FileId, FilePath};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How a file is known again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Bytes.
    pub size: u64,
    /// Type and permissions.
    pub mode: u32,
    /// Last change of content, nanoseconds since 1970.
    pub modified_ns: i64,
    /// File system (`f_fsid`), inode and time of birth (nanoseconds): the very same file, if all agree.
    pub identity: (u64, u64, i64),
    /// SHA-256 of its content, or of its first and last mebibyte where it is large; none where it changed while the tree
    /// ran, so that only the very same file will do.
    pub digest: Option<[u8; 32]>,
}

/// A pipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// Of a FIFO.
    pub path: Option<FilePath>,
    /// `F_GETPIPE_SZ`, bytes; 0 in a draft of a tree that runs.
    pub capacity: u32,
    /// What was written and not read. In packet mode (`O_DIRECT`) a packet each.
    pub chunks: Vec<Bytes>,
    /// Packet mode.
    pub packets: bool,
    /// Owner, group and permissions; those of a FIFO are its file's.
    pub access: (u32, u32, u32),
}

/// A pseudo-terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// `struct termios2` in the kernel's layout.
    pub modes: Bytes,
    /// Rows, columns, and both in pixels.
    pub window: [u16; 4],
    /// The slave cannot be opened (`TIOCSPTLCK`).
    pub locked: bool,
    /// Packet mode of the master (`TIOCPKT`).
    pub packets: bool,
    /// `TIOCEXCL`.
    pub exclusive: bool,
    /// The session that it controls and its foreground group, as the tree sees them.
    pub session: Option<(i32, i32)>,
    /// Owner, group and permissions of `/dev/pts/N`.
    pub access: (u32, u32, u32),
}

/// Content without a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// What has it.
    pub form: ContentForm,
    /// Owner, group and permissions.
    pub access: (u32, u32, u32),
    /// Last access and last change of its bytes, nanoseconds since 1970.
    pub times_ns: (i64, i64),
    /// Bytes.
    pub size: u64,
    /// Device and inode at the donor of memory that moves elsewhere, with its mappings: it has no chunks here.
    pub elsewhere: Option<(u64, u64)>,
    /// What is not a hole, by offset; none reaches over a multiple of [`super::limits::CHUNK`].
    pub chunks: BTreeMap<u64, Bytes>,
}

/// Where content without a name is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContentForm {
    /// `memfd_create(2)`.
    Memory {
        /// Without `memfd:`.
        name: FilePath,
        /// `F_GET_SEALS`.
        seals: u32,
    },
    /// A file whose name was removed.
    Deleted {
        /// The name it had.
        path: FilePath,
    },
    /// Made by `O_TMPFILE`.
    Temporary {
        /// The directory it was made in.
        directory: FilePath,
    },
}

impl ContentForm {
    /// A file that had this path, and this inode; one that never had a path shows the inode in place of a name.
    pub(in crate::process) fn of_removed(path: &[u8], inode: u64) -> Self {
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
pub struct Watch {
    /// The number it was added by; may be closed meanwhile.
    pub fd: u32,
    /// The open file that is watched.
    pub file: FileId,
    /// As the kernel keeps them: `EPOLLET` and other modes included.
    pub events: u32,
    /// What the program gets back.
    pub data: u64,
}

/// A timerfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timer {
    /// `CLOCK_REALTIME`, `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME` or an alarm clock.
    pub clock: i32,
    /// `TFD_TIMER_ABSTIME`, `TFD_TIMER_CANCEL_ON_SET`.
    pub set_flags: u32,
    /// Until it expires, nanoseconds; 0 is disarmed. Since 1970 where it was set to an absolute time of day.
    pub value_ns: u64,
    /// Period, nanoseconds.
    pub interval_ns: u64,
    /// Expirations that were not read.
    pub ticks: u64,
}

/// A watch of inotify.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InotifyWatch {
    /// What is watched.
    pub path: FilePath,
    /// Events and modes.
    pub mask: u32,
}

/// Bytes; what is decoded is never longer than what came.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes(#[serde(with = "serde_bytes")] pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}
