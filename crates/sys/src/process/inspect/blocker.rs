//! Why a tree cannot move.

use crate::process::files;
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Something of a process that cannot move. Found before anything is touched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocker {
    /// The process, in the PID namespace of who asked.
    pub pid: i32,
    /// What stands in the way.
    pub obstacle: Obstacle,
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}: {}", self.pid, self.obstacle)
    }
}

/// What stands in the way. Each text says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum Obstacle {
    /// This machine cannot do it.
    #[error("{0}")]
    Machine(String),
    /// The caller may not look at it.
    #[error("it cannot be looked at ({0}): run this as root")]
    Hidden(String),
    /// The freezer of control groups holds it.
    #[error(
        "its control group {0} is frozen: thaw it (cgroup.freeze, systemctl thaw, docker unpause)"
    )]
    FrozenGroup(String),
    /// A debugger is attached.
    #[error("it is traced by process {0}: detach that debugger")]
    Traced(i32),
    /// It lives in a namespace of its own.
    #[error("it has a {0} namespace of its own: move it with what made the namespace")]
    Namespace(String),
    /// The process is init of its PID namespace or part of Holdfast.
    #[error("it is the first process of its PID namespace: move its children")]
    Init,
    /// `chroot`.
    #[error("its root directory is {0}: processes with another root directory do not move")]
    RootDirectory(String),
    /// `SECCOMP_MODE_STRICT`.
    #[error("it runs under strict seccomp, in which nothing can be read out: use filters")]
    StrictSeccomp,
    /// User shadow stacks.
    #[error(
        "it runs with a shadow stack, which cannot be rebuilt: start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
    )]
    ShadowStack,
    /// The first thread has ended, others run.
    #[error("its first thread has ended while others run: nothing can be made like that again")]
    FirstThreadEnded,
    /// `vfork`, or `clone` with shared memory.
    #[error(
        "it uses the memory of process {0} too (vfork or CLONE_VM): wait until it has called exec"
    )]
    MemoryOf(i32),
    /// `clone` with `CLONE_FS`.
    #[error("it has its working directory in common with process {0} (CLONE_FS)")]
    DirectoryOf(i32),
    /// The working directory is gone.
    #[error("its working directory {0} was deleted: let it change to another")]
    DeletedDirectory(String),
    /// `unshare` in a thread.
    #[error("its thread {0} has a working directory of its own, apart from its other threads")]
    ThreadDirectory(i32),
    /// A timer of `CLOCK_THREAD_CPUTIME_ID`.
    #[error(
        "it has a timer of a thread's own clock (CLOCK_THREAD_CPUTIME_ID), and nothing tells of which: use pthread_getcpuclockid"
    )]
    ThreadClock,
    /// `PR_SET_SPECULATION_CTRL`.
    #[error(
        "it has forbidden the processor to speculate (PR_SET_SPECULATION_CTRL), which would be lost"
    )]
    Speculation,
    /// More POSIX timers than are read in a freeze.
    #[error(
        "it has {0} POSIX timers, more than {max}: use timerfds, or one timer for the next of all",
        max = crate::process::donor::TIMERS_MAX
    )]
    ManyTimers(usize),
    /// A zombie with `WCOREDUMP`.
    #[error("it has ended with a core dump, and its parent does not know yet: wait for it there")]
    DumpedCore,
    /// `PR_SET_SYSCALL_USER_DISPATCH`.
    #[error("it handles its system calls itself (PR_SET_SYSCALL_USER_DISPATCH)")]
    CallDispatch,
    /// `modify_ldt`.
    #[error("it has memory segments of its own (modify_ldt)")]
    Segments,
    /// `SECCOMP_RET_USER_NOTIF`.
    #[error("another process decides about its system calls (SECCOMP_RET_USER_NOTIF)")]
    Supervised,
    /// 32-bit.
    #[error("it is not a 64-bit program")]
    NotA64BitProgram,
    /// The executable is gone.
    #[error("its executable cannot be read: {0}")]
    Executable(String),
    /// A mapped file is gone.
    #[error(
        "it maps {0}, which was deleted or replaced: restart it, so that it uses the present file"
    )]
    DeletedFile(String),
    /// Memory of a device.
    #[error("it maps the device {0}, whose state is not in memory")]
    Device(String),
    /// `hugetlbfs`.
    #[error("it maps huge pages of hugetlbfs ({0}): use transparent huge pages")]
    HugeTlb(String),
    /// `userfaultfd`.
    #[error(
        "its page faults are handled by userfaultfd: where it came by post-copy, wait until all its memory has come"
    )]
    UserFault,
    /// `MADV_GUARD_INSTALL`.
    #[error(
        "it has {0} ranges of guard pages (MADV_GUARD_INSTALL) of {1} bytes together, more than can be made again"
    )]
    GuardPages(u64, u64),
    /// `mseal`.
    #[error("it maps {0} in a way that cannot be made again (sealed, or copied from a memfd)")]
    OddMapping(String),
    /// `pkey_mprotect`.
    #[error("it protects memory by keys (pkey_mprotect), which cannot be made again")]
    ProtectionKey,
    /// Addresses above 47 bits.
    #[error("it maps memory above 128 TiB")]
    HighMemory,
    /// System V shared memory.
    #[error("it uses System V shared memory, semaphores or messages ({0}): use those of POSIX")]
    SystemV(String),
    /// Asynchronous IO.
    #[error("it has a context of asynchronous IO (io_setup): use io_submit's successor or threads")]
    AsyncIo,
    /// A mapping of an object of the kernel: io_uring, perf, a packet ring.
    #[error("it maps {0}, an object of this kernel")]
    KernelObject(String),
    /// A job of a session that a terminal of the tree controls.
    #[error(
        "it shares the controlling terminal of process {0}, which leads its session, and only a leader can get one back: end it, or start it in a session of its own (setsid)"
    )]
    TerminalOf(i32),
    /// A session whose leader has ended, or is no ancestor.
    #[error(
        "it is in session {0}, into which nothing can put it again where it is in the tree: start it in a session of its own (setsid)"
    )]
    SessionOf(i32),
    /// A descriptor.
    #[error("{}: {reason}", descriptor(*.fd, path))]
    Descriptor {
        /// Its number; none for one that is in flight between sockets.
        fd: Option<u32>,
        /// What `/proc/PID/fd` shows.
        path: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Somebody else shares the memory.
    #[error("it shares memory ({name}) with process {outsider}, which would stay behind")]
    SharedOutside {
        /// What is shared.
        name: String,
        /// Who else maps it.
        outsider: i32,
    },
}

fn descriptor(fd: Option<u32>, path: &str) -> String {
    match fd {
        Some(fd) => format!("descriptor {fd} ({path})"),
        None => format!("a descriptor in flight ({path})"),
    }
}

impl From<files::Blocker> for Blocker {
    fn from(blocker: files::Blocker) -> Self {
        Self {
            pid: blocker.pid,
            obstacle: Obstacle::Descriptor {
                fd: blocker.fd,
                path: blocker.path,
                reason: blocker.reason.to_string(),
            },
        }
    }
}
