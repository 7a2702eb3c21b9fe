//! The descriptors of a process tree as plain values, which are sent to the acceptor.

pub mod changes;
mod file_kind_state;
pub mod limits;
mod path;
mod sockets;

pub use file_kind_state::{
    ByteString, ContentForm, EpollWatch, FileFingerprint, InotifyWatch, NamelessContent, Pipe,
    PseudoTerminal, TimerFdState,
};
pub use path::FilePath;
pub use sockets::{
    NetlinkSocket, SocketOption, UnixConnectionState, UnixMessage, UnixName, UnixSocket,
};

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Number of an open file (in POSIX: open file description) in an [`FilesImage`].
pub type FileId = u32;
/// Number of an object that several open files share: a pipe, a terminal, content without a name.
pub type ObjectId = u32;

/// The descriptors of a process tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesImage {
    /// Descriptor tables; processes that share a table (`CLONE_FILES`) have one entry.
    pub tables: BTreeMap<u32, DescriptorTable>,
    /// Open files, including files in flight between sockets.
    pub files: BTreeMap<FileId, OpenFile>,
    /// Pipes and FIFOs.
    pub pipes: BTreeMap<ObjectId, Pipe>,
    /// Pairs of pseudo-terminals, by their number in `/dev/pts`.
    pub terminals: BTreeMap<ObjectId, PseudoTerminal>,
    /// Memory files and files without a name.
    pub contents: BTreeMap<ObjectId, NamelessContent>,
}

impl FilesImage {
    /// Removes entries with dangling references: in a running tree, files may be closed while the tree is read.
    pub(super) fn drop_dangling(&mut self) {
        loop {
            let file_ids: BTreeSet<FileId> = self.files.keys().copied().collect();
            let is_unix_alive = |file: &OpenFile| matches!(file.kind, OpenFileKind::Unix(_));
            let unix: BTreeSet<FileId> = (self.files.iter())
                .filter_map(|(id, file)| is_unix_alive(file).then_some(*id))
                .collect();
            self.files.retain(|_, file| match &mut file.kind {
                OpenFileKind::Epoll { watches } => {
                    watches.retain(|watch| file_ids.contains(&watch.file));
                    true
                }
                OpenFileKind::Unix(socket) => {
                    for message in &mut socket.queue {
                        message.files.retain(|file| file_ids.contains(file));
                    }
                    match &socket.link {
                        UnixConnectionState::Peer(peer)
                        | UnixConnectionState::PendingAccept(peer, _) => unix.contains(peer),
                        _ => true,
                    }
                }
                _ => true,
            });
            if self.files.len() == file_ids.len() {
                break;
            }
        }
        for table in self.tables.values_mut() {
            table
                .slots
                .retain(|_, slot| self.files.contains_key(&slot.file));
        }
        let tables: BTreeSet<u32> = self.tables.keys().copied().collect();
        for file in self.files.values_mut().filter(|_| !tables.is_empty()) {
            file.locks.retain(|lock| match lock.holder {
                LockHolder::Table(table) => tables.contains(&table),
                _ => true,
            });
        }
    }
}

/// A descriptor table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorTable {
    /// Processes that have the table, by their PIDs in the innermost PID namespace.
    pub pids: BTreeSet<i32>,
    /// Descriptors by number.
    pub slots: BTreeMap<u32, DescriptorSlot>,
    /// `RLIMIT_NOFILE` of the table's first process, soft and hard.
    pub descriptors_max: (u64, u64),
}

/// A descriptor of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorSlot {
    /// Open file that the descriptor refers to.
    pub file: FileId,
    /// Close-on-exec flag (`FD_CLOEXEC`).
    pub close_on_exec: bool,
}

/// An open file (in POSIX: open file description).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// Access mode and status flags (`F_GETFL`).
    pub flags: u32,
    /// Receiver of the file's signals (`O_ASYNC`).
    pub owner: Option<SignalOwner>,
    /// Locks taken through this open file.
    pub locks: Vec<FileLock>,
    /// Kind of file, with the state of that kind.
    pub kind: OpenFileKind,
}

/// Receiver of the signals of an open file (`F_SETOWN_EX`, `F_SETSIG`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalOwner {
    /// Kind of receiver: `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    pub kind: i32,
    /// ID of the thread, process or group, as the tree sees it.
    pub pid: i32,
    /// Signal number; 0 is `SIGIO`.
    pub signal: i32,
}

/// A lock on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileLock {
    /// Owner of the lock.
    pub holder: LockHolder,
    /// True for an exclusive lock.
    pub write: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `None` is the end of the file, however the file grows.
    pub end: Option<u64>,
}

/// Owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockHolder {
    /// The open file; the lock is on the whole file (`flock(2)`).
    Flock,
    /// The open file; the lock is on a range (`F_OFD_SETLK`).
    OpenFile,
    /// A descriptor table; the lock is on a range (`F_SETLK`).
    Table(u32),
}

/// Kind of an open file, with the state of that kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenFileKind {
    /// A file with a name.
    Regular {
        /// Absolute path.
        path: FilePath,
        /// File position.
        offset: u64,
        /// Expected properties of the file at the acceptor; `None` if the kernel generates the content (`/proc`,
        /// `/sys`).
        fingerprint: Option<FileFingerprint>,
    },
    /// A file without a name, or a memory file.
    Content {
        /// Number of the content.
        content: ObjectId,
        /// File position.
        offset: u64,
    },
    /// An open directory.
    Directory {
        /// Absolute path.
        path: FilePath,
        /// Position in the directory, as `getdents64` counts it.
        offset: u64,
    },
    /// A file opened with `O_PATH`.
    Path {
        /// Absolute path.
        path: FilePath,
    },
    /// An end of a pipe or FIFO; the access mode in the flags tells which end.
    Pipe {
        /// Number of the pipe.
        pipe: ObjectId,
    },
    /// A device that is the same on every host, such as `/dev/null`.
    Device {
        /// Absolute path.
        path: FilePath,
        /// Major and minor number.
        device: (u32, u32),
    },
    /// The master of a pseudo-terminal.
    TerminalMaster {
        /// Number of the terminal.
        terminal: ObjectId,
    },
    /// The slave of a pseudo-terminal.
    TerminalSlave {
        /// Number of the terminal.
        terminal: ObjectId,
    },
    /// An epoll set.
    Epoll {
        /// Watched files in the kernel's order.
        watches: Vec<EpollWatch>,
    },
    /// An eventfd with its counter.
    Event {
        /// Value of the counter.
        count: u64,
        /// True for a semaphore (`EFD_SEMAPHORE`).
        semaphore: bool,
    },
    /// A timerfd with its clock and times.
    Timer(TimerFdState),
    /// A signalfd with its mask.
    Signal {
        /// Signal mask: bit N - 1 for signal N.
        mask: u64,
    },
    /// An inotify instance.
    Inotify {
        /// Watches by watch descriptor.
        watches: BTreeMap<i32, InotifyWatch>,
    },
    /// A Unix socket.
    Unix(Box<UnixSocket>),
    /// A route netlink socket with nothing to read.
    Netlink(NetlinkSocket),
    /// A TCP or UDP socket, which is saved and restored elsewhere ([`holdfast_tcp_repair`], [`holdfast_tcp_repair::udp`]).
    Inet {
        /// `AF_INET` or `AF_INET6`.
        family: i32,
        /// `SOCK_STREAM` or `SOCK_DGRAM`.
        socket: i32,
        /// `IPPROTO_TCP` or `IPPROTO_UDP`.
        protocol: i32,
        /// Inode number at the donor; a different inode means that the file number stands for another socket.
        inode: u64,
    },
    /// A pidfd of a process of the tree.
    Pidfd {
        /// PID as the tree sees it.
        pid: i32,
    },
}

impl FilesImage {
    /// Returns the lowest number such that no descriptor of the tree has it or a higher one.
    #[must_use]
    pub fn descriptor_ceiling(&self) -> u32 {
        let last = |table: &DescriptorTable| table.slots.keys().next_back().map_or(0, |fd| fd + 1);
        self.tables.values().map(last).max().unwrap_or(0)
    }

    /// Decodes an image that another node sent.
    ///
    /// # Errors
    /// [`limits::InvalidImage`] for bytes that do not encode an image, contradict themselves or exceed the limits.
    pub fn decode(bytes: &[u8]) -> Result<Self, limits::InvalidImage> {
        let image: Self = postcard::from_bytes(bytes)?;
        limits::check(&image)?;
        Ok(image)
    }
}
