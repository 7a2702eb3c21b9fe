//! Reasons why a tree cannot move.

use crate::files;
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Something in a process that cannot move, found before anything is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocker {
    /// PID of the process, in the PID namespace of the caller.
    pub pid: i32,
    /// Obstacle to the move.
    pub obstacle: Obstacle,
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}: {}", self.pid, self.obstacle)
    }
}

/// Obstacle to a move; each text says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum Obstacle {
    /// Processes cannot move on this machine.
    #[error("{0}")]
    UnsupportedMachine(String),
    /// The caller may not inspect the process.
    #[error("it cannot be inspected ({0}): run this as root")]
    NotInspectable(String),
    /// The control group of the process is frozen.
    #[error(
        "its control group {0} is frozen: thaw it (cgroup.freeze, systemctl thaw, docker unpause)"
    )]
    FrozenGroup(String),
    /// A debugger is attached to the process.
    #[error("it is traced by process {0}: detach that debugger")]
    Traced(i32),
    /// The process lives in a namespace of its own.
    #[error(
        "it has a {0} namespace of its own: move it together with the process that created the namespace"
    )]
    Namespace(String),
    /// The process is the first one of its PID namespace, or part of Holdfast.
    #[error("it is the first process of its PID namespace: move its children")]
    Init,
    /// The process has another root directory (`chroot(2)`).
    #[error("its root directory is {0}: processes with another root directory do not move")]
    RootDirectory(String),
    /// The process runs under strict seccomp (`SECCOMP_MODE_STRICT`).
    #[error(
        "it runs in strict seccomp mode, in which its state cannot be read: use seccomp filters"
    )]
    StrictSeccomp,
    /// The process has a user shadow stack.
    #[error(
        "it runs with a shadow stack, which cannot be restored: start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
    )]
    ShadowStack,
    /// The main thread has ended, other threads run.
    #[error("its main thread has ended while others run, which cannot be recreated")]
    FirstThreadEnded,
    /// The process shares its memory with another one (`vfork(2)`, or `clone(2)` with `CLONE_VM`).
    #[error(
        "it shares its memory with process {0} (vfork or CLONE_VM): wait until it has called exec"
    )]
    SharesMemory(i32),
    /// The process shares its working directory with another one (`clone(2)` with `CLONE_FS`).
    #[error("it shares its working directory with process {0} (CLONE_FS)")]
    SharesWorkingDirectory(i32),
    /// The working directory was deleted.
    #[error("its working directory {0} was deleted: change to another")]
    DeletedDirectory(String),
    /// A thread has a working directory of its own (`unshare(2)`).
    #[error("its thread {0} has a working directory separate from its other threads")]
    ThreadDirectory(i32),
    /// A POSIX timer runs on a thread's own clock (`CLOCK_THREAD_CPUTIME_ID`).
    #[error(
        "it has a timer of CLOCK_THREAD_CPUTIME_ID, and the kernel does not report which thread's: use \
         pthread_getcpuclockid"
    )]
    ThreadClock,
    /// The process has forbidden speculation (`PR_SET_SPECULATION_CTRL`).
    #[error("it has disabled CPU speculation (PR_SET_SPECULATION_CTRL), which would be lost")]
    Speculation,
    /// More POSIX timers than a freeze can read.
    #[error(
        "it has {0} POSIX timers, more than {max}: use timerfds, or a single timer for the next deadline",
        max = crate::donor::TIMERS_MAX
    )]
    TooManyTimers(usize),
    /// A zombie has a core dump flag in its wait status (`WCOREDUMP`).
    #[error("it has ended with a core dump and was not reaped: call wait in its parent")]
    ZombieCoreDumped,
    /// The process handles its own system calls (`PR_SET_SYSCALL_USER_DISPATCH`).
    #[error("it handles its system calls itself (PR_SET_SYSCALL_USER_DISPATCH)")]
    SyscallDispatch,
    /// The process has memory segments of its own (`modify_ldt(2)`).
    #[error("it has memory segments of its own (modify_ldt)")]
    LdtSegments,
    /// A supervisor decides about system calls (`SECCOMP_RET_USER_NOTIF`).
    #[error("another process supervises its system calls (SECCOMP_RET_USER_NOTIF)")]
    SeccompSupervised,
    /// The program is not a 64-bit one.
    #[error("it is not a 64-bit program")]
    NotA64BitProgram,
    /// The executable cannot be read.
    #[error("its executable cannot be read: {0}")]
    Executable(String),
    /// A mapped file was deleted or replaced.
    #[error(
        "it maps {0}, which was deleted or replaced: restart it, so that it uses the current file"
    )]
    DeletedFile(String),
    /// A mapping of a device.
    #[error("it maps the device {0}, whose state is not in memory")]
    Device(String),
    /// A mapping of huge pages (`hugetlbfs`).
    #[error("it maps huge pages of hugetlbfs ({0}): use transparent huge pages")]
    HugeTlb(String),
    /// Page faults are handled by userfaultfd.
    #[error(
        "its page faults are handled by userfaultfd: if it arrived by post-copy, wait until all pages have arrived"
    )]
    UserFault,
    /// More guard pages (`MADV_GUARD_INSTALL`) than can be created again.
    #[error(
        "it has {0} ranges of guard pages (MADV_GUARD_INSTALL) of {1} bytes in total, more than can be recreated"
    )]
    GuardPages(u64, u64),
    /// A mapping that cannot be made again: sealed (`mseal(2)`), a private one of a memfd, or a part of a System V
    /// segment.
    #[error(
        "it maps {0} in a way that cannot be recreated (sealed, partial, or a private mapping of a memfd)"
    )]
    UnrestorableMapping(String),
    /// Memory is protected by keys (`pkey_mprotect(2)`).
    #[error("it uses memory protection keys (pkey_mprotect), which cannot be recreated")]
    ProtectionKey,
    /// A mapping above 47 bits of address.
    #[error("it maps memory above 128 TiB")]
    HighMemory,
    /// System V shared memory, semaphores or messages.
    #[error("it uses System V shared memory, semaphores or messages ({0}): use the POSIX ones")]
    SystemV(String),
    /// A context of asynchronous I/O (`io_setup(2)`).
    #[error("it has an asynchronous I/O context (io_setup): use threads")]
    AsyncIo,
    /// A mapping of an object of the kernel: io_uring, perf, a packet ring.
    #[error("it maps {0}, an object of this kernel")]
    KernelObject(String),
    /// A job in a session with a controlling terminal of the tree.
    #[error(
        "it shares the controlling terminal of its session leader, process {0}, and a terminal can only be restored \
         to a leader: end it, or start it in a new session (setsid)"
    )]
    SharesTerminal(i32),
    /// A session with a leader that has ended, or is no ancestor.
    #[error(
        "it is in session {0}, which it cannot rejoin from its position in the tree: start it in a new session (setsid)"
    )]
    UnrestorableSession(i32),
    /// A descriptor that cannot move.
    #[error("{}: {reason}", describe_descriptor(*.fd, path))]
    Descriptor {
        /// Descriptor number; `None` for a descriptor in flight between sockets.
        fd: Option<u32>,
        /// Target of the link `/proc/PID/fd/N`.
        path: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// A process outside the tree shares the memory.
    #[error("it shares memory ({name}) with process {outsider}, which is outside the tree")]
    SharedOutside {
        /// Name of the shared memory.
        name: String,
        /// PID of the other process.
        outsider: i32,
    },
}

fn describe_descriptor(fd: Option<u32>, path: &str) -> String {
    match fd {
        Some(fd) => format!("descriptor {fd} ({path})"),
        None => format!("a descriptor in flight ({path})"),
    }
}

impl From<files::DescriptorBlocker> for Blocker {
    fn from(blocker: files::DescriptorBlocker) -> Self {
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
