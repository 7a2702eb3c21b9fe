//! Descriptors that cannot move, and errors of saving and restoring descriptors.

use super::image::FilePath;
use super::image::limits::InvalidImage;
use std::fmt;
use std::io;
use thiserror::Error;

/// A descriptor that cannot move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorBlocker {
    /// Process that has the descriptor, as the caller sees it.
    pub pid: i32,
    /// Descriptor number; `None` for a descriptor in flight between sockets.
    pub fd: Option<u32>,
    /// Target of the link `/proc/PID/fd/N`.
    pub path: String,
    /// Reason why the descriptor cannot move.
    pub reason: BlockReason,
}

impl fmt::Display for DescriptorBlocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fd {
            Some(fd) => write!(f, "process {}, descriptor {fd}", self.pid)?,
            None => write!(f, "process {}, a descriptor in flight", self.pid)?,
        }
        write!(f, " ({}): {}", self.path, self.reason)
    }
}

/// Reason why a descriptor cannot move, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BlockReason {
    /// A device with state of its own.
    #[error("device {0}:{1} has state that exists only on this host: close it")]
    Device(u32, u32),
    /// An io_uring instance.
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
    /// A socket of Multipath TCP.
    #[error("Multipath TCP cannot move: listen with IPPROTO_TCP instead of IPPROTO_MPTCP")]
    Mptcp,
    /// A netlink socket with unread messages.
    #[error("the netlink socket has unread messages: try again")]
    NetlinkUnread,
    /// A pidfd of a process outside the tree.
    #[error("the pidfd refers to a process outside the tree: move both, or close it")]
    PidfdOutside,
    /// A pidfd of a process that has ended and been waited for.
    #[error("the pidfd refers to a process that has ended: close it")]
    PidfdEnded,
    /// A pidfd of a single thread (`PIDFD_THREAD`).
    #[error(
        "the pidfd refers to a single thread (PIDFD_THREAD): close it, or open one of the process"
    )]
    PidfdOfThread,
    /// A fanotify group.
    #[error("fanotify cannot move: use inotify")]
    Fanotify,
    /// A performance counter (`perf_event_open(2)`).
    #[error("performance counters belong to this host: close them")]
    Perf,
    /// A BPF program, map or link.
    #[error("eBPF objects belong to this host: close them")]
    Bpf,
    /// A userfaultfd, by which the program handles its own page faults.
    #[error("userfaultfd cannot move: close it")]
    Userfaultfd,
    /// A namespace, such as an open `/proc/PID/ns/net`.
    #[error("it refers to a namespace of this host: close it")]
    Namespace,
    /// A file of a kind that this program does not know.
    #[error("this kind of file is unknown and cannot move")]
    Unknown,
    /// A file with another end that belongs to a process that stays.
    #[error("its other end is held outside the tree{}: move that process too, or redirect to a file", holder_suffix(*.0))]
    OtherEndOutside(Option<i32>),
    /// An eventfd, timer, memory file or the like that a process outside the tree has too.
    #[error("process {0} outside the tree has it open too: move both, or close it in one of them")]
    HeldOutside(i32),
    /// Signals about the file go to a process or group outside the tree (`F_SETOWN`).
    #[error(
        "its signals go to process or group {0} outside the tree (F_SETOWN): set a process of the tree, or none"
    )]
    OwnerOutside(i32),
    /// A file that has no path in the daemon's mount namespace.
    #[error(
        "its mount is not visible to this daemon: run the daemon in the host's mount namespace"
    )]
    Unreachable,
    /// A path that leads to another file; another name of the original file was not found.
    #[error(
        "the path names another file, and no other name of the original was found: open it by its current name"
    )]
    OtherName,
    /// A POSIX message queue (`mq_open(3)`).
    #[error("a POSIX message queue cannot move: close it, and use a Unix socket")]
    MessageQueue,
    /// A directory with a change notification: only `F_NOTIFY` sets one.
    #[error(
        "the directory has a change notification (F_NOTIFY), which cannot be read from the kernel: use inotify"
    )]
    DirectoryNotify,
    /// Content without a name, larger than the limit: such content is moved by value.
    #[error(
        "its file was deleted or has no name, and has {size} bytes, more than the limit of {limit}"
    )]
    TooLarge {
        /// Size of the content, bytes.
        size: u64,
        /// Most bytes allowed.
        limit: u64,
    },
    /// A lease on a file (`F_SETLEASE`).
    #[error("it has a lease (F_SETLEASE): release the lease")]
    Lease,
    /// An exclusive lock that would be free for a moment during the move.
    #[error("it {0}")]
    Lock(&'static str),
    /// A name that is not UTF-8.
    #[error("its path is not UTF-8: rename it")]
    NotUtf8,
    /// A terminal with another end (master or slave) that stays behind.
    #[error(
        "the terminal's master is held outside the tree: start the program without a terminal (setsid, or a service)"
    )]
    TerminalOutside,
    /// A terminal with a slave that cannot be opened, so that unread data cannot be read.
    #[error("the terminal's slave is locked: call unlockpt, or close the terminal")]
    TerminalLocked,
    /// A terminal with unread data: reading the data would remove it.
    #[error("the terminal has unread input or output: try again")]
    TerminalUnread,
    /// An inotify instance with unread events.
    #[error("inotify has unread events, or watches a removed file: try again")]
    InotifyUnread,
    /// A file that inotify watches and that cannot be found.
    #[error(
        "a file that inotify watches cannot be found by its handle, because it was removed or its file system does \
         not support that (overlayfs): remove the watch"
    )]
    InotifyFileNotFound,
    /// A watch descriptor of inotify that is too high for the acceptor to count up to.
    #[error(
        "inotify's watch descriptor {0} is too high to be recreated: create a new inotify instance"
    )]
    InotifyWatchTooHigh(i32),
    /// An epoll set that watches a file not open in the tree.
    #[error(
        "the epoll set watches descriptor {0}, whose file is not open in the tree: remove it from the set first"
    )]
    WatchedFileClosed(u32),
    /// A connection that waits to be accepted and has data already, or comes from outside the tree.
    #[error(
        "a connection that waits to be accepted comes from outside the tree or has data: try again"
    )]
    Unaccepted,
    /// A thread with a descriptor table of its own.
    #[error("thread {0} has a descriptor table of its own")]
    ThreadTable(i32),
    /// A memory file in huge pages.
    #[error("a memfd of huge pages cannot move: create it without MFD_HUGETLB")]
    HugePages,
    /// A socket that belongs to another network namespace.
    #[error("the socket belongs to another network namespace")]
    OtherNamespace,
    /// A TCP or UDP socket with state that cannot move.
    #[error("{0}")]
    Socket(String),
    /// An eBPF program attached to a Unix or netlink socket.
    #[error(
        "an eBPF program is attached to the socket (SO_ATTACH_BPF), which cannot be read from the kernel: attach a \
         classic filter (SO_ATTACH_FILTER), or detach it"
    )]
    ExtendedFilter,
    /// A Unix stream with out-of-band data.
    #[error("out-of-band data is waiting: read it")]
    OutOfBand,
}

fn holder_suffix(pid: Option<i32>) -> String {
    pid.map_or(String::new(), |pid| format!(" by process {pid}"))
}

/// Error of saving or restoring a tree's descriptors.
#[derive(Debug, Error)]
pub enum FilesError {
    /// Descriptors that cannot move; nothing was changed.
    #[error("{}", join_blockers(.0))]
    Blocked(Vec<DescriptorBlocker>),
    /// The acceptor lacks something that the tree needs; the process keeps running on the donor.
    #[error("{0}")]
    Refused(#[from] FilesRefusal),
    /// The image is malformed.
    #[error("{0}")]
    Malformed(#[from] InvalidImage),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// The step that failed.
        step: String,
        /// The kernel's error.
        source: io::Error,
    },
}

fn join_blockers(blockers: &[DescriptorBlocker]) -> String {
    let lines: Vec<_> = blockers.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// A resource that the acceptor lacks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FilesRefusal {
    /// A file that does not exist.
    #[error("{0} does not exist at the acceptor")]
    Missing(String),
    /// A file with another type, size, permission or content.
    #[error("{path} differs at the acceptor: its {property}")]
    Differs {
        /// Path of the file.
        path: String,
        /// Property that differs.
        property: &'static str,
    },
    /// A file that no user of the tree's processes may open.
    #[error(
        "{0}: the acceptor's policy does not allow this access: the process's users have no permission, and the file \
         is not below a directory in [migration] files"
    )]
    NotAllowed(String),
    /// A Unix socket's name that is in use.
    #[error("the socket name {0} is in use at the acceptor")]
    NameTaken(String),
    /// A terminal number that is in use.
    #[error(
        "/dev/pts/{0} is in use at the acceptor: restore in a mount namespace with a private devpts"
    )]
    TerminalTaken(u32),
    /// More descriptors than the restorer may have open.
    #[error("the tree needs {0} descriptors at once, more than RLIMIT_NOFILE allows the restorer")]
    TooMany(u64),
    /// Memory that moves with its mappings, and was not handed in.
    #[error("memory {0} of the image was not restored")]
    ContentMissing(u32),
    /// A socket that was not handed in.
    #[error("socket {0} of the image was not restored")]
    SocketMissing(u32),
}

/// Adds the name of the failed step to an I/O error.
pub(super) trait StepContext<T> {
    /// Converts the error; `step` names the operation that failed.
    fn with_step(self, step: impl Into<String>) -> Result<T, FilesError>;
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn with_step(self, step: impl Into<String>) -> Result<T, FilesError> {
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
