//! State that is read while the tree is stopped.

use crate::trace::Registers;
use serde::{Deserialize, Serialize};

/// The state of all processes, in the order of [`TreeLayout::processes`](super::TreeLayout::processes).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessTreeState {
    /// One entry for each process; `None` for a zombie.
    pub processes: Vec<Option<ProcessState>>,
}

/// State of a process without its pages and descriptors, as dumped in the freeze or previewed while the process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessState {
    /// Threads in the order of [`ProcessLayout::threads`](super::ProcessLayout::threads).
    pub threads: Vec<ThreadState>,
    /// Actions of signals 1 to 64.
    pub signal_actions: Vec<SignalAction>,
    /// Signals pending for the process as a whole.
    pub pending: Vec<SignalInfo>,
    /// State of the timers `ITIMER_REAL`, `ITIMER_VIRTUAL` and `ITIMER_PROF`.
    pub interval_timers: [IntervalTimer; 3],
    /// Timers of `timer_create(2)`.
    pub posix_timers: Vec<PosixTimer>,
    /// Fields of the kernel's memory descriptor.
    pub memory: PrctlMmMap,
    /// Limits by number of resource.
    pub limits: Vec<ResourceLimit>,
    /// File mode creation mask.
    pub umask: u32,
    /// Working directory.
    #[serde(with = "serde_bytes")]
    pub directory: Vec<u8>,
    /// Signal of job control that stopped the process, if the process is stopped.
    pub group_stop: Option<i32>,
    /// True if `wait(2)` has not reported that stop to the parent.
    pub is_stop_unreported: bool,
    /// Dumpable attribute (`PR_GET_DUMPABLE`).
    pub dumpable: u64,
    /// True if the process adopts orphaned descendants (`PR_GET_CHILD_SUBREAPER`).
    pub child_subreaper: bool,
    /// Setting that disables transparent huge pages (`PR_GET_THP_DISABLE`).
    pub thp_disable: u64,
    /// Setting that forbids new executable memory (`PR_GET_MDWE`).
    pub mdwe: u64,
    /// True if the kernel may merge equal pages (`PR_GET_MEMORY_MERGE`).
    pub is_merging: bool,
    /// Flags `MCL_FUTURE` and `MCL_ONFAULT` of `mlockall(2)`.
    pub mlockall_flags: u64,
    /// Registrations for `membarrier(2)` (`MEMBARRIER_CMD_GET_REGISTRATIONS`).
    pub membarrier_registrations: u64,
    /// Adjustment of the out-of-memory score (`/proc/PID/oom_score_adj`).
    pub oom_score_adjustment: i32,
    /// Filter of mappings for core dumps (`/proc/PID/coredump_filter`).
    pub dump_filter: u32,
}

/// State of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadState {
    /// General registers, prepared for resumption: an interrupted system call is made again.
    pub registers: Registers,
    /// Extended registers in the format of XSAVE.
    #[serde(with = "serde_bytes")]
    pub extended_registers: Vec<u8>,
    /// Blocked signals.
    pub signal_mask: u64,
    /// Signals pending for this thread.
    pub pending: Vec<SignalInfo>,
    /// Alternate signal stack (`sigaltstack(2)`): address, flags, size in bytes.
    pub alternate_stack: (u64, u32, u64),
    /// Head of the robust futex list (`set_robust_list(2)`): address, size in bytes.
    pub robust_list: (u64, u64),
    /// Address that is cleared when the thread ends (`set_tid_address(2)`).
    pub clear_tid: u64,
    /// Area of restartable sequences, if registered (`rseq(2)`).
    pub rseq: Option<Rseq>,
    /// Name of the thread (`comm`).
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// User and group IDs, capabilities.
    pub credentials: Credentials,
    /// Scheduling policy and its parameters.
    pub scheduling: Scheduling,
    /// Signal sent to the thread when its parent ends (`PR_GET_PDEATHSIG`), 0 for none.
    pub parent_death_signal: i32,
    /// Timer slack (`PR_GET_TIMERSLACK`), nanoseconds.
    pub timer_slack_ns: u64,
    /// Execution domain (`personality(2)`).
    pub personality: u32,
    /// I/O priority (`ioprio_get(2)`).
    pub io_priority: u32,
    /// Permission to read the time stamp counter (`PR_GET_TSC`).
    pub tsc_mode: u32,
    /// Policy for memory errors (`PR_MCE_KILL_GET`).
    pub mce_policy: u32,
    /// True if `execve(2)` grants no privileges (`no_new_privs`).
    pub no_new_privileges: bool,
    /// Seccomp filters, the oldest first, as instructions of 8 bytes.
    pub seccomp_filters: Vec<serde_bytes::ByteBuf>,
}

/// A `siginfo_t`, 128 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalInfo(#[serde(with = "serde_bytes")] pub Vec<u8>);

impl SignalInfo {
    /// Returns the signal's number.
    #[must_use]
    pub fn number(&self) -> i32 {
        let first = self.0.get(..4).and_then(|bytes| bytes.try_into().ok());
        first.map_or(0, i32::from_ne_bytes)
    }
}

/// Action of a signal (`rt_sigaction(2)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalAction {
    /// `SIG_DFL`, `SIG_IGN` or an address.
    pub handler: u64,
    /// Flags (`SA_*`).
    pub flags: u64,
    /// Return address of the handler.
    pub restorer: u64,
    /// Signals blocked while the handler runs.
    pub mask: u64,
}

/// An interval timer (`setitimer(2)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntervalTimer {
    /// Time between expiries, microseconds.
    pub interval_us: u64,
    /// Time to the next expiry, microseconds; 0 if the timer is off.
    pub remaining_us: u64,
}

/// A timer of `timer_create(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PosixTimer {
    /// Number of the timer in the process.
    pub id: i32,
    /// Clock ID (`CLOCK_*`).
    pub clock: i32,
    /// Kind of notification (`SIGEV_*`).
    pub notify: i32,
    /// Signal number.
    pub signal: i32,
    /// Value delivered with the signal (`sigev_value`).
    pub value: u64,
    /// Target thread for `SIGEV_THREAD_ID`.
    pub thread: i32,
    /// Time between expiries, nanoseconds.
    pub interval_ns: u64,
    /// Time to the next expiry, nanoseconds; 0 if the timer is off.
    pub remaining_ns: u64,
}

/// Addresses and auxiliary vector of a process (`struct prctl_mm_map`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrctlMmMap {
    /// Code, data, heap, stack, arguments and environment: `start_code`, `end_code`, `start_data`, `end_data`,
    /// `start_brk`, `brk`, `start_stack`, `arg_start`, `arg_end`, `env_start`, `env_end`.
    pub addresses: [u64; 11],
    /// The auxiliary vector.
    #[serde(with = "serde_bytes")]
    pub auxiliary: Vec<u8>,
}

/// Limit of a resource (`prlimit(2)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimit {
    /// Limit in force.
    pub soft: u64,
    /// Highest value to which the soft limit may be raised.
    pub hard: u64,
}

/// Area of restartable sequences of a thread (`rseq(2)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rseq {
    /// Address of the thread's area.
    pub address: u64,
    /// Size of the area, bytes.
    pub bytes: u32,
    /// Signature in front of each abort handler.
    pub signature: u32,
}

/// Credentials of a thread (`credentials(7)`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// User IDs: real, effective, saved, filesystem.
    pub uids: [u32; 4],
    /// Group IDs: real, effective, saved, filesystem.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Capability sets: inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// Securebits (`PR_GET_SECUREBITS`).
    pub secure_bits: u32,
}

/// Scheduling attributes of a thread (`sched(7)`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduling {
    /// Policy (`SCHED_*`).
    pub policy: u32,
    /// Flags (`SCHED_FLAG_*`).
    pub flags: u64,
    /// Nice value, for ordinary policies.
    pub nice: i32,
    /// Priority, for real-time policies.
    pub priority: u32,
    /// Runtime, deadline and period in nanoseconds for `SCHED_DEADLINE`; of other policies the slice.
    pub times_ns: [u64; 3],
    /// Processors that the thread may use; empty for all.
    pub affinity: Vec<u32>,
}
