//! What is read of a tree that stands still.

use crate::process::trace::Registers;
use serde::{Deserialize, Serialize};

/// The state of all processes, in the order of [`Tree::processes`](super::Tree::processes).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// One for each process; nothing for a zombie.
    pub processes: Vec<Option<FrozenProcess>>,
}

/// State of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenProcess {
    /// In the order of [`Process::threads`](super::Process::threads).
    pub threads: Vec<FrozenThread>,
    /// For signals 1 to 64.
    pub actions: Vec<Action>,
    /// Signals that wait for any thread.
    pub pending: Vec<SignalInfo>,
    /// `ITIMER_REAL`, `ITIMER_VIRTUAL`, `ITIMER_PROF`.
    pub interval_timers: [IntervalTimer; 3],
    /// `timer_create(2)`.
    pub posix_timers: Vec<PosixTimer>,
    /// What the kernel remembers of the memory's uses.
    pub memory: MemoryFields,
    /// By number of resource.
    pub limits: Vec<Limit>,
    /// File mode creation mask.
    pub umask: u32,
    /// Working directory.
    #[serde(with = "serde_bytes")]
    pub directory: Vec<u8>,
    /// Stopped by a signal of job control, this one.
    pub stopped: Option<i32>,
    /// `wait(2)` of its parent has not told of that stop.
    pub stop_untold: bool,
    /// `PR_GET_DUMPABLE`.
    pub dumpable: u64,
    /// `PR_GET_CHILD_SUBREAPER`.
    pub child_subreaper: bool,
    /// `PR_GET_THP_DISABLE`.
    pub huge_pages_off: u64,
    /// `PR_GET_MDWE`.
    pub no_new_code: u64,
    /// `PR_GET_MEMORY_MERGE`.
    pub merges: bool,
    /// `MCL_FUTURE` and `MCL_ONFAULT` of `mlockall(2)`.
    pub locks: u64,
    /// `MEMBARRIER_CMD_GET_REGISTRATIONS`.
    pub barriers: u64,
    /// `/proc/PID/oom_score_adj`.
    pub oom_score_adjustment: i32,
    /// `/proc/PID/coredump_filter`.
    pub dump_filter: u32,
}

/// State of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrozenThread {
    /// General registers, ready to go on: an interrupted call is made again.
    pub registers: Registers,
    /// The others, in the format of XSAVE.
    #[serde(with = "serde_bytes")]
    pub extended: Vec<u8>,
    /// Blocked signals.
    pub mask: u64,
    /// Signals that wait for this thread.
    pub pending: Vec<SignalInfo>,
    /// `sigaltstack(2)`: address, flags, bytes.
    pub alternate_stack: (u64, u32, u64),
    /// `set_robust_list(2)`: address, bytes.
    pub robust_list: (u64, u64),
    /// `set_tid_address(2)`.
    pub clear_tid: u64,
    /// `rseq(2)`.
    pub rseq: Option<Rseq>,
    /// `comm`.
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// Who it is.
    pub credentials: Credentials,
    /// When it runs.
    pub scheduling: Scheduling,
    /// `PR_GET_PDEATHSIG`.
    pub parent_death_signal: i32,
    /// `PR_GET_TIMERSLACK`, nanoseconds.
    pub timer_slack_ns: u64,
    /// `personality(2)`.
    pub personality: u32,
    /// `ioprio_get(2)`.
    pub io_priority: u32,
    /// `PR_GET_TSC`.
    pub time_stamps: u32,
    /// `PR_MCE_KILL_GET`.
    pub machine_checks: u32,
    /// `no_new_privs`.
    pub no_new_privileges: bool,
    /// Seccomp filters, the oldest first, as instructions of 8 bytes.
    pub filters: Vec<serde_bytes::ByteBuf>,
}

/// A `siginfo_t`, 128 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalInfo(#[serde(with = "serde_bytes")] pub Vec<u8>);

impl SignalInfo {
    /// Which signal.
    #[must_use]
    pub fn number(&self) -> i32 {
        let first = self.0.get(..4).and_then(|bytes| bytes.try_into().ok());
        first.map_or(0, i32::from_ne_bytes)
    }
}

/// `rt_sigaction(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// `SIG_DFL`, `SIG_IGN` or an address.
    pub handler: u64,
    /// `SA_*`.
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: u64,
    /// Blocked while it runs.
    pub mask: u64,
}

/// `setitimer(2)`, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntervalTimer {
    /// Time between expiries.
    pub interval_us: u64,
    /// Time to the next one, 0 if it is off.
    pub left_us: u64,
}

/// A timer of `timer_create(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PosixTimer {
    /// Its number in the process.
    pub id: i32,
    /// Which clock.
    pub clock: i32,
    /// `SIGEV_*`.
    pub notify: i32,
    /// Which signal.
    pub signal: i32,
    /// What goes with the signal.
    pub value: u64,
    /// For `SIGEV_THREAD_ID`.
    pub thread: i32,
    /// Time between expiries, nanoseconds.
    pub interval_ns: u64,
    /// Time to the next one, 0 if it is off.
    pub left_ns: u64,
}

/// `struct prctl_mm_map`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFields {
    /// Code, data, heap, stack, arguments and environment: `start_code`, `end_code`, `start_data`, `end_data`,
    /// `start_brk`, `brk`, `start_stack`, `arg_start`, `arg_end`, `env_start`, `env_end`.
    pub addresses: [u64; 11],
    /// The auxiliary vector.
    #[serde(with = "serde_bytes")]
    pub auxiliary: Vec<u8>,
}

/// `prlimit(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// What applies.
    pub soft: u64,
    /// How far it may be raised.
    pub hard: u64,
}

/// `rseq(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rseq {
    /// The thread's area.
    pub address: u64,
    /// Its bytes.
    pub bytes: u32,
    /// What stands before an abort handler.
    pub signature: u32,
}

/// `credentials(7)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Real, effective, saved, filesystem.
    pub uids: [u32; 4],
    /// Real, effective, saved, filesystem.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// `PR_GET_SECUREBITS`.
    pub secure_bits: u32,
}

/// `sched(7)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduling {
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    pub flags: u64,
    /// For ordinary policies.
    pub nice: i32,
    /// For real-time policies.
    pub priority: u32,
    /// For `SCHED_DEADLINE` (and the slice of others): runtime, deadline, period, nanoseconds.
    pub times_ns: [u64; 3],
    /// Processors it may use; empty for all.
    pub affinity: Vec<u32>,
}
