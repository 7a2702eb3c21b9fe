//! State of a stopped thread.

use super::halt::{any_unblocked, portable_registers};
use super::ptrace_checks;
use crate::error::{Context, Result, check_long, unexpected_text};
use crate::image::{Credentials, Rseq, Scheduling, SignalInfo, ThreadState};
use crate::procfs::{self, ProcStatus};
use crate::trace::{
    CallBatch, CallBatchOutcome, ProcessMemory, Registers, SCRATCH_OFFSET, SystemCall, Tracee,
};
use holdfast_sys::priority::{processors, timer_slack_ns};

/// Offsets of results in a thread's scratch area.
const CLEAR_TID_OFFSET: u64 = 0;
const STACK_OFFSET: u64 = 8;
const DEATH_SIGNAL_OFFSET: u64 = 40;
const TSC_MODE_OFFSET: u64 = 48;
/// Size of all results in bytes.
pub(super) const RESULTS_BYTES: usize = 56;
/// Offset in the stub of the space behind these results.
pub(super) const FREE_OFFSET: u64 = SCRATCH_OFFSET + 64;

/// Returns calls that a thread must make itself, for the beginning of a batch. Their results go to the address
/// `scratch`.
pub(super) fn query_calls(scratch: u64) -> CallBatch {
    let mut batch = CallBatch::default();
    let at = |offset: u64| scratch + offset;
    let prctl =
        |option: i32, argument: u64| SystemCall::new(libc::SYS_prctl, &[option as u64, argument]);
    batch.push(prctl(libc::PR_GET_TID_ADDRESS, at(CLEAR_TID_OFFSET)));
    batch.push(SystemCall::new(
        libc::SYS_sigaltstack,
        &[0, at(STACK_OFFSET)],
    ));
    batch.push(prctl(libc::PR_GET_PDEATHSIG, at(DEATH_SIGNAL_OFFSET)));
    batch.push(prctl(libc::PR_GET_TIMERSLACK, 0));
    batch.push(prctl(libc::PR_GET_SECUREBITS, 0));
    batch.push(SystemCall::new(libc::SYS_personality, &[0xffff_ffff]));
    batch.push(SystemCall::new(libc::SYS_ioprio_get, &[1, 0]));
    batch.push(prctl(libc::PR_MCE_KILL_GET, 0));
    batch.push(prctl(libc::PR_GET_TSC, at(TSC_MODE_OFFSET)));
    batch
}

/// A thread that has just made the calls of [`query_calls`].
pub(super) struct QueriedThread<'a> {
    pub tracee: Tracee,
    pub status: &'a ProcStatus,
    pub memory: &'a ProcessMemory,
    /// Address of the results.
    pub scratch: u64,
    pub outcome: CallBatchOutcome,
    /// See [`HaltedThread::if_signalled`](super::halt::HaltedThread::if_signalled).
    pub if_signalled: Option<Registers>,
    /// Signals pending for the thread's process, in the kernel's format.
    pub process_pending: &'a [[u8; 128]],
    pub untraced: UntracedThreadState,
}

/// State of a stopped thread that can be read without tracing the thread.
pub(super) struct UntracedThreadState {
    name: Vec<u8>,
    robust_list: (u64, u64),
    scheduling: Scheduling,
}

impl UntracedThreadState {
    /// Reads the state. The thread must not run with lent priority, which would show in its scheduling.
    pub fn read(pid: i32, tid: i32) -> Result<Self> {
        Ok(Self {
            name: name(pid, tid)?,
            robust_list: robust_list(tid)
                .context(|| format!("reading the robust list of thread {tid}"))?,
            scheduling: scheduling(tid)
                .context(|| format!("reading the scheduling of thread {tid}"))?,
        })
    }
}

impl QueriedThread<'_> {
    /// Reads the part of the thread's state that moves with it.
    pub fn read(self) -> Result<ThreadState> {
        let mut answers = [0; RESULTS_BYTES];
        self.memory.read(self.scratch, &mut answers)?;
        let word = |at: u64| {
            let at = at as usize;
            u64::from_ne_bytes(answers[at..at + 8].try_into().unwrap_or_default())
        };
        let results = &self.outcome.results;
        let result = |at: usize| results.get(at).copied().unwrap_or(0).max(0) as u64;
        let (tracee, status) = (self.tracee, self.status);
        let tid = tracee.tid;
        let missing = || unexpected_text("cannot read a thread's registers");
        let mut before = self.outcome.saved.ok_or_else(missing)?;
        if before.extended.is_empty() {
            before.extended = tracee.extended_registers()?;
        }
        let pending = tracee.pending_signals(false)?;
        let waits = any_unblocked(pending.iter().chain(self.process_pending), before.mask);
        let signalled_registers = self.if_signalled.filter(|_| waits);
        let registers = signalled_registers.unwrap_or(before.registers);
        Ok(ThreadState {
            registers: portable_registers(registers.with_call_number_recovered(self.memory)),
            extended_registers: before.extended,
            signal_mask: before.mask,
            pending: signal_infos(pending),
            alternate_stack: (
                word(STACK_OFFSET),
                word(STACK_OFFSET + 8) as u32,
                word(STACK_OFFSET + 16),
            ),
            robust_list: self.untraced.robust_list,
            clear_tid: word(CLEAR_TID_OFFSET),
            rseq: rseq(tracee)?,
            name: self.untraced.name,
            credentials: credentials(status, result(4) as u32),
            scheduling: self.untraced.scheduling,
            parent_death_signal: word(DEATH_SIGNAL_OFFSET) as i32,
            timer_slack_ns: slack_ns(tid, result(3), self.outcome.slack_ns),
            personality: result(5) as u32,
            io_priority: result(6) as u32,
            mce_policy: result(7) as u32,
            tsc_mode: word(TSC_MODE_OFFSET) as u32,
            no_new_privileges: status.no_new_privileges,
            seccomp_filters: seccomp_filters(tracee, status)?,
        })
    }
}

pub(super) fn signal_infos(pending: Vec<[u8; 128]>) -> Vec<SignalInfo> {
    pending
        .into_iter()
        .map(|info| SignalInfo(info.to_vec()))
        .collect()
}

fn robust_list(tid: i32) -> std::io::Result<(u64, u64)> {
    let (mut head, mut length) = (0u64, 0u64);
    // SAFETY: both results are writable words and outlive the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_get_robust_list,
            tid,
            &raw mut head,
            &raw mut length,
        )
    };
    check_long(outcome).map(|_| (head, length))
}

fn rseq(tracee: Tracee) -> Result<Option<Rseq>> {
    let (address, bytes, signature) = tracee.rseq_area()?;
    Ok((address != 0).then_some(Rseq {
        address,
        bytes,
        signature,
    }))
}

/// Returns the timer slack. A thread with lent priority reports none.
fn slack_ns(tid: i32, reported: u64, before: Option<u64>) -> u64 {
    let read_slack = || timer_slack_ns(tid);
    if reported == 0 {
        before.or_else(read_slack).unwrap_or(0)
    } else {
        reported
    }
}

fn name(pid: i32, tid: i32) -> Result<Vec<u8>> {
    let mut name = procfs::read_bytes(pid, &format!("task/{tid}/comm"))?;
    name.pop();
    name.truncate(15);
    Ok(name)
}

fn credentials(status: &ProcStatus, secure_bits: u32) -> Credentials {
    Credentials {
        uids: status.uids,
        gids: status.gids,
        groups: status.groups.clone(),
        capabilities: status.capabilities,
        secure_bits,
    }
}

/// `struct sched_attr`, first version.
#[repr(C)]
#[derive(Default)]
pub(crate) struct SchedulingAttributes {
    pub size: u32,
    pub policy: u32,
    pub flags: u64,
    pub nice: i32,
    pub priority: u32,
    pub times_ns: [u64; 3],
}

pub(super) fn scheduling(tid: i32) -> std::io::Result<Scheduling> {
    let mut attributes = SchedulingAttributes::default();
    let size = size_of::<SchedulingAttributes>();
    // SAFETY: `attributes` has `size` writable bytes and outlives the call.
    let outcome =
        unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attributes, size, 0) };
    check_long(outcome)?;
    let mut set = [0u64; 128];
    // SAFETY: `set` has as many writable bytes as the call is told, and outlives the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_sched_getaffinity,
            tid,
            size_of_val(&set),
            set.as_mut_ptr(),
        )
    };
    check_long(outcome)?;
    let has = |cpu: &u32| set[*cpu as usize / 64] & (1 << (cpu % 64)) != 0;
    let online = processors() as u32;
    let affinity: Vec<u32> = (0..8192).filter(has).collect();
    let all = affinity.len() as u32 >= online && online > 1;
    Ok(Scheduling {
        policy: attributes.policy,
        flags: attributes.flags,
        nice: attributes.nice,
        priority: attributes.priority,
        times_ns: attributes.times_ns,
        affinity: if all { Vec::new() } else { affinity },
    })
}

fn seccomp_filters(tracee: Tracee, status: &ProcStatus) -> Result<Vec<serde_bytes::ByteBuf>> {
    let mut found = Vec::new();
    if status.seccomp != 2 {
        return Ok(found);
    }
    ptrace_checks::refuse_supervised_filters(
        status.process_ids.first().copied().unwrap_or(0),
        tracee,
    )?;
    while let Some(code) = tracee
        .seccomp_filter(found.len())
        .context(|| "reading a seccomp filter".to_owned())?
    {
        found.push(serde_bytes::ByteBuf::from(code.concat()));
    }
    found.reverse();
    Ok(found)
}
