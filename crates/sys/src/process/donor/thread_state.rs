//! State of a stopped thread.

use super::halt::{any_waits, portable};
use super::hidden;
use crate::priority::{processors, timer_slack_ns};
use crate::process::error::{Context, Result, check_long, unexpected};
use crate::process::image::{Credentials, FrozenThread, Rseq, Scheduling, SignalInfo};
use crate::process::procfs::{self, Status};
use crate::process::trace::{Batch, Call, Memory, Outcome, Registers, SCRATCH, Tracee};

/// Offsets of results in a thread's scratch area.
const CLEAR_TID: u64 = 0;
const STACK: u64 = 8;
const DEATH_SIGNAL: u64 = 40;
const TIME_STAMPS: u64 = 48;
/// Size of all results in bytes.
pub(super) const ANSWERS: usize = 56;
/// Offset in the stub of the space behind these results.
pub(super) const FREE: u64 = SCRATCH + 64;

/// Returns calls that a thread must make itself, for the beginning of a batch. Their results go to the address
/// `scratch`.
pub(super) fn questions(scratch: u64) -> Batch {
    let mut batch = Batch::default();
    let at = |place: u64| scratch + place;
    let prctl = |option: i32, argument: u64| Call::new(libc::SYS_prctl, &[option as u64, argument]);
    batch.push(prctl(libc::PR_GET_TID_ADDRESS, at(CLEAR_TID)));
    batch.push(Call::new(libc::SYS_sigaltstack, &[0, at(STACK)]));
    batch.push(prctl(libc::PR_GET_PDEATHSIG, at(DEATH_SIGNAL)));
    batch.push(prctl(libc::PR_GET_TIMERSLACK, 0));
    batch.push(prctl(libc::PR_GET_SECUREBITS, 0));
    batch.push(Call::new(libc::SYS_personality, &[0xffff_ffff]));
    batch.push(Call::new(libc::SYS_ioprio_get, &[1, 0]));
    batch.push(prctl(libc::PR_MCE_KILL_GET, 0));
    batch.push(prctl(libc::PR_GET_TSC, at(TIME_STAMPS)));
    batch
}

/// A thread that has just made the calls of [`questions`].
pub(super) struct Asked<'a> {
    pub tracee: Tracee,
    pub status: &'a Status,
    pub memory: &'a Memory,
    /// Address of the results.
    pub scratch: u64,
    pub outcome: Outcome,
    /// See [`HaltedThread::if_signalled`](super::halt::HaltedThread::if_signalled).
    pub if_signalled: Option<Registers>,
    /// Signals pending for the thread's process, in the kernel's format.
    pub shared: &'a [[u8; 128]],
    pub beside: Beside,
}

/// State of a stopped thread that can be read without tracing the thread.
pub(super) struct Beside {
    name: Vec<u8>,
    robust_list: (u64, u64),
    scheduling: Scheduling,
}

impl Beside {
    /// Reads the state. The thread must not run with lent priority, which would show in its scheduling.
    pub fn read(pid: i32, tid: i32) -> Result<Self> {
        Ok(Self {
            name: name(pid, tid)?,
            robust_list: robust_list(tid).context(|| format!("robust list of thread {tid}"))?,
            scheduling: scheduling(tid).context(|| format!("scheduling of thread {tid}"))?,
        })
    }
}

impl Asked<'_> {
    /// Reads the part of the thread's state that moves with it.
    pub fn read(self) -> Result<FrozenThread> {
        let mut answers = [0; ANSWERS];
        self.memory.read(self.scratch, &mut answers)?;
        let word = |at: u64| {
            let at = at as usize;
            u64::from_ne_bytes(answers[at..at + 8].try_into().unwrap_or_default())
        };
        let results = &self.outcome.results;
        let answer = |at: usize| results.get(at).copied().unwrap_or(0).max(0) as u64;
        let (tracee, status) = (self.tracee, self.status);
        let tid = tracee.tid;
        let missing = || unexpected("a thread without registers");
        let mut before = self.outcome.before.ok_or_else(missing)?;
        if before.extended.is_empty() {
            before.extended = tracee.extended()?;
        }
        let pending = tracee.pending(false)?;
        let waits = any_waits(pending.iter().chain(self.shared), before.mask);
        let ended = self.if_signalled.filter(|_| waits);
        let registers = ended.unwrap_or(before.registers);
        Ok(FrozenThread {
            registers: portable(registers.recall(self.memory)),
            extended: before.extended,
            mask: before.mask,
            pending: infos(pending),
            alternate_stack: (word(STACK), word(STACK + 8) as u32, word(STACK + 16)),
            robust_list: self.beside.robust_list,
            clear_tid: word(CLEAR_TID),
            rseq: rseq(tracee)?,
            name: self.beside.name,
            credentials: credentials(status, answer(4) as u32),
            scheduling: self.beside.scheduling,
            parent_death_signal: word(DEATH_SIGNAL) as i32,
            timer_slack_ns: slack_ns(tid, answer(3), self.outcome.slack_ns),
            personality: answer(5) as u32,
            io_priority: answer(6) as u32,
            machine_checks: answer(7) as u32,
            time_stamps: word(TIME_STAMPS) as u32,
            no_new_privileges: status.no_new_privileges,
            filters: filters(tracee, status)?,
        })
    }
}

pub(super) fn infos(pending: Vec<[u8; 128]>) -> Vec<SignalInfo> {
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
    let (address, bytes, signature) = tracee.rseq()?;
    Ok((address != 0).then_some(Rseq {
        address,
        bytes,
        signature,
    }))
}

/// Returns the timer slack. A thread with lent priority reports none.
fn slack_ns(tid: i32, said: u64, before: Option<u64>) -> u64 {
    let look = || timer_slack_ns(tid);
    if said == 0 {
        before.or_else(look).unwrap_or(0)
    } else {
        said
    }
}

fn name(pid: i32, tid: i32) -> Result<Vec<u8>> {
    let mut name = procfs::read_bytes(pid, &format!("task/{tid}/comm"))?;
    name.pop();
    name.truncate(15);
    Ok(name)
}

fn credentials(status: &Status, secure_bits: u32) -> Credentials {
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

fn filters(tracee: Tracee, status: &Status) -> Result<Vec<serde_bytes::ByteBuf>> {
    let mut found = Vec::new();
    if status.seccomp != 2 {
        return Ok(found);
    }
    hidden::check_filters(status.process_ids.first().copied().unwrap_or(0), tracee)?;
    while let Some(code) = tracee
        .filter(found.len())
        .context(|| "reading a seccomp filter".to_owned())?
    {
        found.push(serde_bytes::ByteBuf::from(code.concat()));
    }
    found.reverse();
    Ok(found)
}
