//! What cannot move, and what went wrong.

use super::image::FilePath;
use super::image::limits::Malformed;
use std::fmt;
use std::io;
use thiserror::Error;

/// A descriptor that cannot move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// Whose, as the caller sees it.
    pub pid: i32,
    /// Its number; none for a descriptor that is in flight between sockets.
    pub fd: Option<u32>,
    /// What `/proc/PID/fd` shows.
    pub path: String,
    /// Why.
    pub reason: Reason,
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fd {
            Some(fd) => write!(f, "process {}, descriptor {fd}", self.pid)?,
            None => write!(f, "process {}, a descriptor in flight", self.pid)?,
        }
        write!(f, " ({}): {}", self.path, self.reason)
    }
}

/// Why a descriptor cannot move, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Reason {
    /// A device with state of its own.
    #[error("device {0}:{1} has state that only this host knows: close it")]
    Device(u32, u32),
    /// io_uring.
    #[error(
        "io_uring is shared with the kernel while it runs: use epoll (most programs have an option)"
    )]
    IoUring,
    /// A socket family that is bound to this host.
    #[error("sockets of family {0} cannot move")]
    Family(i32),
    /// A protocol that is bound to this host.
    #[error("protocol {0} of family {1} cannot move")]
    Protocol(i32, i32),
    /// Multipath TCP.
    #[error("Multipath TCP cannot move: listen with IPPROTO_TCP instead of IPPROTO_MPTCP")]
    Mptcp,
    /// Netlink with messages to read.
    #[error("a netlink socket has messages that were not read: try again")]
    NetlinkUnread,
    /// A pidfd of a stranger.
    #[error("it stands for a process that does not move: move both, or close it")]
    PidfdOutside,
    /// A pidfd of a process that somebody has waited for.
    #[error("it stands for a process that has ended: close it")]
    PidfdEnded,
    /// `PIDFD_THREAD`.
    #[error("it stands for a single thread (PIDFD_THREAD): close it, or open one of the process")]
    PidfdOfThread,
    /// fanotify.
    #[error("fanotify cannot move: use inotify")]
    Fanotify,
    /// perf.
    #[error("performance counters are this host's: close them")]
    Perf,
    /// A BPF program, map or link.
    #[error("objects of eBPF are this host's: close them")]
    Bpf,
    /// userfaultfd.
    #[error("userfaultfd cannot move: close it")]
    Userfaultfd,
    /// A namespace.
    #[error("it stands for a namespace of this host: close it")]
    Namespace,
    /// Something the kernel made that is not known here.
    #[error("this kind of file is not known, so it cannot move")]
    Unknown,
    /// The other end belongs to a process that stays.
    #[error("its other end is held outside the tree{}: move that process too, or redirect to a file", by(*.0))]
    OtherEndOutside(Option<i32>),
    /// A process that stays has the same eventfd, timer, memory file and the like.
    #[error("process {0}, which stays, has it too: move both, or have one of them close it")]
    HeldOutside(i32),
    /// Signals about the file go to a process or group outside the tree (`F_SETOWN`).
    #[error(
        "its signals go to process or group {0}, which stays (F_SETOWN): name a process of the tree, or none"
    )]
    OwnerOutside(i32),
    /// A file that has no path here.
    #[error("its mount is not present for this daemon: run in the host's mount namespace")]
    Unreachable,
    /// The path stands for another file now, and the old one has a name elsewhere that was not found.
    #[error("the file was replaced, and its other name was not found: open it by its present name")]
    OtherName,
    /// `mq_open`.
    #[error("a POSIX message queue is this host's: close it, and use a Unix socket")]
    MessageQueue,
    /// A directory with somebody to be told about it: nothing but `F_NOTIFY` does that.
    #[error(
        "a signal tells of changes in this directory (F_NOTIFY), and the kernel does not say of which: use inotify"
    )]
    DirectoryNotify,
    /// Content without a name is moved by value, up to a limit.
    #[error("its file has no name and {size} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Bytes.
        size: u64,
        /// Bytes.
        limit: u64,
    },
    /// A lease.
    #[error("it has a lease (F_SETLEASE): give it up")]
    Lease,
    /// An exclusive lock that would be free for a moment on its way.
    #[error("it {0}")]
    Lock(&'static str),
    /// A name that is no text.
    #[error("its path is not UTF-8: rename it")]
    NotUtf8,
    /// The master or the other side of a terminal stays behind.
    #[error(
        "the terminal's master is held outside the tree: start the program without a terminal (setsid, or a service)"
    )]
    TerminalOutside,
    /// What waits in a terminal whose slave cannot be opened is not to be seen.
    #[error("the terminal's slave is locked: call unlockpt, or close the terminal")]
    TerminalLocked,
    /// What a terminal holds cannot be copied without taking it.
    #[error("the terminal has input or output that was not read: try again")]
    TerminalUnread,
    /// inotify has events to read.
    #[error("inotify has events that were not read, or of a file that was removed: try again")]
    InotifyUnread,
    /// What inotify watches cannot be found.
    #[error(
        "the file system of a file that inotify watches cannot find it by its handle (as overlayfs), or the file was removed: remove the watch"
    )]
    InotifyHidden,
    /// A watch descriptor of inotify that the acceptor would have to count up to.
    #[error(
        "inotify has watch descriptor {0}, too high to be made again: make a new inotify instance"
    )]
    InotifyNumber(i32),
    /// An epoll set watches what the tree has not open.
    #[error(
        "it watches descriptor {0}, whose file is not open in the tree any more: remove it from the set first"
    )]
    WatchesStranger(u32),
    /// A connection waits to be accepted and has data already, or comes from outside.
    #[error("a connection waits to be accepted from outside the tree, or with data: try again")]
    Unaccepted,
    /// A thread has descriptors of its own.
    #[error("thread {0} has a descriptor table of its own")]
    ThreadTable(i32),
    /// Memory in huge pages.
    #[error("a memory file in huge pages cannot move: make it without MFD_HUGETLB")]
    HugePages,
    /// A socket that belongs to another network namespace.
    #[error("the socket belongs to another network namespace")]
    OtherNamespace,
    /// A TCP or UDP socket with something that cannot move.
    #[error("{0}")]
    Socket(String),
    /// An eBPF program at a Unix or netlink socket.
    #[error(
        "an eBPF program is attached to the socket (SO_ATTACH_BPF), which the kernel does not give out: attach a classic filter (SO_ATTACH_FILTER), or detach it"
    )]
    ExtendedFilter,
    /// A Unix stream with out-of-band data.
    #[error("out-of-band data is waiting: read it")]
    OutOfBand,
}

fn by(pid: Option<i32>) -> String {
    pid.map_or(String::new(), |pid| format!(" by process {pid}"))
}

/// What went wrong with a tree's descriptors.
#[derive(Debug, Error)]
pub enum FilesError {
    /// These cannot move; nothing was touched.
    #[error("{}", list(.0))]
    Blocked(Vec<Blocker>),
    /// The acceptor has not what the tree needs; the donor goes on.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The image was not usable.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn list(blockers: &[Blocker]) -> String {
    let lines: Vec<_> = blockers.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// What the acceptor lacks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// No such file.
    #[error("{0} does not exist at the acceptor")]
    Missing(String),
    /// Another type, size, permission or content.
    #[error("{path} differs at the acceptor: its {what}")]
    Differs {
        /// Which.
        path: String,
        /// What differs.
        what: &'static str,
    },
    /// Nobody whose processes come with the tree may open it.
    #[error(
        "{0}: the acceptor's policy does not let it be opened so: neither the users of the process may, nor is it below [migration] files"
    )]
    NotAllowed(String),
    /// A Unix socket's name is in use.
    #[error("the socket name {0} is in use at the acceptor")]
    NameTaken(String),
    /// A terminal's number is in use.
    #[error(
        "/dev/pts/{0} is in use at the acceptor: restore in a mount namespace with a devpts of its own"
    )]
    TerminalTaken(u32),
    /// More descriptors than this process may have.
    #[error("the tree needs {0} descriptors at once, more than RLIMIT_NOFILE allows the restorer")]
    TooMany(u64),
    /// Memory that moves with its mappings was not handed in.
    #[error("memory {0} of the image was not restored")]
    ContentAbsent(u32),
    /// A socket was not handed in.
    #[error("socket {0} of the image was not restored")]
    SocketAbsent(u32),
}

/// Names the step that an IO error comes from.
pub(super) trait At<T> {
    /// `step` is what was tried.
    fn at(self, step: impl Into<String>) -> Result<T, FilesError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, step: impl Into<String>) -> Result<T, FilesError> {
        self.map_err(|source| FilesError::Kernel {
            step: step.into(),
            source: source.into(),
        })
    }
}

impl From<&FilePath> for String {
    fn from(path: &FilePath) -> Self {
        path.to_string()
    }
}
