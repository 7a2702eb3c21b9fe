//! What travels: the descriptors of a process tree as plain values.

pub mod changes;
pub mod limits;
mod objects;
mod path;
mod sockets;

pub use objects::{Bytes, Content, ContentForm, InotifyWatch, Pipe, Stamp, Terminal, Timer, Watch};
pub use path::FilePath;
pub use sockets::{NetlinkSocket, SocketOption, UnixLink, UnixMessage, UnixName, UnixSocket};

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Number of an open file (POSIX: open file description) in an [`Image`].
pub type FileId = u32;
/// Number of something that several open files share: a pipe, a terminal, content without a name.
pub type ObjectId = u32;

/// The descriptors of a process tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Descriptor tables; processes that share one (`CLONE_FILES`) have one here.
    pub tables: BTreeMap<u32, Table>,
    /// Open files, those in flight between sockets among them.
    pub files: BTreeMap<FileId, OpenFile>,
    /// Pipes and FIFOs.
    pub pipes: BTreeMap<ObjectId, Pipe>,
    /// Pairs of pseudo-terminals, by their number in `/dev/pts`.
    pub terminals: BTreeMap<ObjectId, Terminal>,
    /// Memory files and files without a name.
    pub contents: BTreeMap<ObjectId, Content>,
}

impl Image {
    /// Leaves out what refers to something that is not there: of a tree that runs, that was closed while it was read.
    pub(super) fn drop_dangling(&mut self) {
        loop {
            let here: BTreeSet<FileId> = self.files.keys().copied().collect();
            let of_unix = |file: &OpenFile| matches!(file.kind, Kind::Unix(_));
            let unix: BTreeSet<FileId> = (self.files.iter())
                .filter_map(|(id, file)| of_unix(file).then_some(*id))
                .collect();
            self.files.retain(|_, file| match &mut file.kind {
                Kind::Epoll { watches } => {
                    watches.retain(|watch| here.contains(&watch.file));
                    true
                }
                Kind::Unix(socket) => {
                    for message in &mut socket.queue {
                        message.files.retain(|file| here.contains(file));
                    }
                    match &socket.link {
                        UnixLink::To(peer) | UnixLink::Waiting(peer, _) => unix.contains(peer),
                        _ => true,
                    }
                }
                _ => true,
            });
            if self.files.len() == here.len() {
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
pub struct Table {
    /// Processes that have it, as they see themselves (innermost PID namespace).
    pub pids: BTreeSet<i32>,
    /// Descriptors by number.
    pub slots: BTreeMap<u32, Slot>,
    /// `RLIMIT_NOFILE` of its first process, soft and hard.
    pub descriptors_max: (u64, u64),
}

/// A descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// What it refers to.
    pub file: FileId,
    /// `FD_CLOEXEC`.
    pub close_on_exec: bool,
}

/// An open file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// Access mode and status flags (`F_GETFL`).
    pub flags: u32,
    /// Who gets its signals (`O_ASYNC`).
    pub owner: Option<Owner>,
    /// Locks that were taken through it.
    pub locks: Vec<Lock>,
    /// What it is.
    pub kind: Kind,
}

/// Who is told by signal about an open file (`F_SETOWN_EX`, `F_SETSIG`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    pub kind: i32,
    /// Thread, process or group, as the tree sees it.
    pub pid: i32,
    /// The signal; 0 is `SIGIO`.
    pub signal: i32,
}

/// A lock on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Who has it.
    pub holder: LockHolder,
    /// Exclusive.
    pub write: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `None` is the end of the file, wherever it will be.
    pub end: Option<u64>,
}

/// What a lock belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockHolder {
    /// `flock(2)`: the open file, the whole file.
    Flock,
    /// `F_OFD_SETLK`: the open file, a range.
    OpenFile,
    /// `F_SETLK`: a descriptor table, a range.
    Table(u32),
}

/// What an open file is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A file with a name.
    Regular {
        /// Absolute.
        path: FilePath,
        /// Position.
        offset: u64,
        /// What the file at the acceptor must look like; none where content is the kernel's own (`/proc`, `/sys`).
        stamp: Option<Stamp>,
    },
    /// A file without a name, or memory.
    Content {
        /// Its content.
        content: ObjectId,
        /// Position.
        offset: u64,
    },
    /// A directory.
    Directory {
        /// Absolute.
        path: FilePath,
        /// Position of `getdents64`.
        offset: u64,
    },
    /// Opened with `O_PATH`.
    Path {
        /// Absolute.
        path: FilePath,
    },
    /// An end of a pipe or FIFO; which one, the flags say.
    Pipe {
        /// Which.
        pipe: ObjectId,
    },
    /// A device that is the same everywhere, such as `/dev/null`.
    Device {
        /// Absolute.
        path: FilePath,
        /// Major and minor number.
        device: (u32, u32),
    },
    /// The master of a pseudo-terminal.
    TerminalMaster {
        /// Which.
        terminal: ObjectId,
    },
    /// The terminal itself.
    TerminalSlave {
        /// Which.
        terminal: ObjectId,
    },
    /// An epoll set.
    Epoll {
        /// In the kernel's order.
        watches: Vec<Watch>,
    },
    /// An eventfd.
    Event {
        /// Its counter.
        count: u64,
        /// `EFD_SEMAPHORE`.
        semaphore: bool,
    },
    /// A timerfd.
    Timer(Timer),
    /// A signalfd.
    Signal {
        /// Signal N is bit N - 1.
        mask: u64,
    },
    /// An inotify instance.
    Inotify {
        /// By watch descriptor.
        watches: BTreeMap<i32, InotifyWatch>,
    },
    /// A Unix socket.
    Unix(Box<UnixSocket>),
    /// A route netlink socket with nothing to read.
    Netlink(NetlinkSocket),
    /// A TCP or UDP socket, which is saved and restored elsewhere ([`crate::tcp_repair`], [`crate::udp`]).
    Inet {
        /// `AF_INET` or `AF_INET6`.
        family: i32,
        /// `SOCK_STREAM` or `SOCK_DGRAM`.
        socket: i32,
        /// `IPPROTO_TCP` or `IPPROTO_UDP`.
        protocol: i32,
        /// At the donor; changes when the number stands for another socket.
        inode: u64,
    },
    /// A pidfd of a process of the tree.
    Pidfd {
        /// As the tree sees it.
        pid: i32,
    },
}

impl Image {
    /// Numbers at and above this one are used by no descriptor of the tree.
    #[must_use]
    pub fn ceiling(&self) -> u32 {
        let last = |table: &Table| table.slots.keys().next_back().map_or(0, |fd| fd + 1);
        self.tables.values().map(last).max().unwrap_or(0)
    }

    /// Reads an image that came from another node.
    ///
    /// # Errors
    /// [`limits::Malformed`] for bytes that are no image, contradict themselves or exceed the limits.
    pub fn decode(bytes: &[u8]) -> Result<Self, limits::Malformed> {
        let image: Self = postcard::from_bytes(bytes)?;
        limits::check(&image)?;
        Ok(image)
    }
}
