//! State of a stopped process as a whole.

use super::attach::{Attachment, exit_for, value};
use super::halt::{Halted, HaltedThread};
use super::thread_state::{self, Asked, Beside, FREE, infos};
use crate::priority::{is_realtime, share_out};
use crate::process::error::{Context, Result, unexpected};
use crate::process::image::{
    Action, FrozenProcess, IntervalTimer, Limit, MemoryFields, PAGE, PosixTimer, SignalInfo,
};
use crate::process::procfs::{self, Stat, Status};
use crate::process::trace::{Batch, Call, Job, Outcome, SCRATCH, Slots, Stub, run_together};
use std::collections::VecDeque;
use std::os::unix::ffi::OsStringExt;

const ACTIONS: u64 = FREE;
const ACTION_BYTES: u64 = 32;
const INTERVALS: u64 = ACTIONS + 64 * ACTION_BYTES;
const SUBREAPER: u64 = INTERVALS + 3 * 32;
const LIMITS: u64 = SUBREAPER + 32;
const TIMERS: u64 = LIMITS + RESOURCES * 16;
const PROBE: u64 = TIMERS + TIMERS_MAX as u64 * 32;
/// Number of the exit code's field in `/proc/PID/stat`.
const EXIT_CODE: usize = 52;
/// `MCL_ONFAULT`.
const MCL_ONFAULT: i32 = 4;
/// Most POSIX timers of a process, limited by the stub's space for results.
pub(crate) const TIMERS_MAX: usize = 1024;
/// `PR_GET_MDWE` (Linux 6.3).
const GET_MDWE: u64 = 66;
/// `PR_GET_MEMORY_MERGE` (Linux 6.4).
const GET_MERGE: u64 = 68;
/// `MEMBARRIER_CMD_GET_REGISTRATIONS` (Linux 6.3).
const REGISTRATIONS: u64 = 1 << 9;
/// Number of resources (`RLIM_NLIMITS`).
const RESOURCES: u64 = 16;

/// Reads stopped processes, each with the tracker's attachment to it. Calls that threads must make themselves run at
/// the same time.
pub(super) fn read_all(stopped: &[(&Halted, &Attachment)]) -> Result<Vec<FrozenProcess>> {
    let hurries = is_realtime();
    let asking: Result<Vec<Asking<'_>>> = stopped.iter().map(|of| Asking::new(*of)).collect();
    let mut asking = asking?;
    let jobs = asking.iter_mut().map(|of| of.job().in_hurry(hurries));
    let outcomes = run_together(jobs.collect())?;
    let mut processes = Vec::with_capacity(stopped.len());
    for (of, outcome) in asking.iter().zip(outcomes) {
        processes.push(of.process(outcome)?);
    }
    let mut others: VecDeque<(usize, usize)> = (asking.iter().enumerate())
        .flat_map(|(process, of)| (1..of.halted.threads.len()).map(move |at| (process, at)))
        .collect();
    while !others.is_empty() {
        ask_threads(&asking, &mut others, hurries, &mut processes)?;
    }
    processes.iter_mut().for_each(forget_stop_signals);
    Ok(processes)
}

/// Queries as many threads, given by process and index, as their processes' stubs can hold, and reads their state.
fn ask_threads(
    asking: &[Asking<'_>],
    waiting: &mut VecDeque<(usize, usize)>,
    hurries: bool,
    processes: &mut [FrozenProcess],
) -> Result<()> {
    let mut slots: Vec<Slots> = asking.iter().map(|_| Slots::new()).collect();
    let (mut jobs, mut asked) = (Vec::new(), Vec::new());
    while let Some(&(process, at)) = waiting.front() {
        let of = &asking[process];
        let tracee = of.halted.threads[at].tracee;
        let extended = tracee.extended()?;
        let calls = thread_state::questions(0).len();
        let room = slots[process].take(calls, extended.len(), thread_state::ANSWERS);
        let Some(slot) = room else {
            if jobs.is_empty() {
                return Err(unexpected("a stub without room for one thread"));
            }
            break;
        };
        waiting.pop_front();
        let status = &of.halted.statuses()?[at];
        let exit = exit_for(of.halted.pid, status);
        let stub = Stub { exit, ..of.stub };
        let scratch = stub.address + slot.scratch;
        let questions = thread_state::questions(scratch);
        let job = Job::new(stub, tracee, &of.halted.memory, questions);
        jobs.push(job.in_slot(slot, extended).in_hurry(hurries));
        asked.push((process, &of.halted.threads[at], status, scratch));
    }
    let outcomes = run_together(jobs)?;
    let ids = |of: &(usize, &HaltedThread, _, _)| (asking[of.0].halted.pid, of.1.tracee.tid);
    let ids: Vec<(i32, i32)> = asked.iter().map(ids).collect();
    let beside = share_out(&ids, |(pid, tid)| Beside::read(*pid, *tid));
    for ((asked, outcome), beside) in asked.into_iter().zip(outcomes).zip(beside) {
        let (process, thread, status, scratch) = asked;
        let of = &asking[process];
        let asked = Asked {
            tracee: thread.tracee,
            status,
            memory: &of.halted.memory,
            scratch,
            outcome,
            if_signalled: thread.if_signalled,
            shared: &of.shared,
            beside: beside?,
        };
        processes[process].threads.push(asked.read()?);
    }
    Ok(())
}

/// A process that is queried for its state.
struct Asking<'a> {
    halted: &'a Halted,
    stub: Stub,
    timers: Vec<PosixTimer>,
    /// Signals pending for the process.
    shared: Vec<[u8; 128]>,
    /// Calls that the first thread makes; empty once they run.
    batch: Batch,
    /// Index of the first result about the process, and of the first result of [`probe_locks`].
    rest: usize,
    probe: usize,
}

impl<'a> Asking<'a> {
    fn new((halted, attachment): (&'a Halted, &Attachment)) -> Result<Self> {
        let (pid, statuses) = (halted.pid, halted.statuses()?);
        let mut timers = posix_timers(&procfs::read(pid, "timers")?);
        for timer in timers.iter_mut().filter(|timer| timer.thread != 0) {
            timer.thread = Status::read(pid, timer.thread)?.own_id();
        }
        if timers.len() > TIMERS_MAX {
            return Err(unexpected("more than 1,024 POSIX timers"));
        }
        let stub = Stub {
            address: attachment.stub.address,
            exit: exit_for(pid, &statuses[0]),
        };
        let mut batch = thread_state::questions(stub.address + SCRATCH);
        let rest = questions(&stub, &mut batch, &timers);
        let probe = probe_locks(&stub, &mut batch);
        let shared = halted.first().pending(true)?;
        Ok(Self {
            halted,
            stub,
            timers,
            shared,
            batch,
            rest,
            probe,
        })
    }

    fn job(&mut self) -> Job<'a> {
        let batch = std::mem::take(&mut self.batch);
        Job::new(self.stub, self.halted.first(), &self.halted.memory, batch)
    }

    /// Returns the process's state with its first thread's.
    fn process(&self, outcome: Outcome) -> Result<FrozenProcess> {
        let (halted, stub) = (self.halted, &self.stub);
        let results = &outcome.results;
        let answers = Answers {
            halted,
            stub: stub.address,
            results: &results[self.rest..self.probe],
        };
        let mut process = answers.process(&self.shared)?;
        let mut timers = self.timers.clone();
        answers.timers(&mut timers)?;
        process.posix_timers = timers;
        process.locks = lock_default(&results[self.probe..], stub, halted)?;
        process.stopped = halted.threads[0].group_stop;
        // The kernel reports the signal as exit code until the parent has waited for the stop.
        process.stop_untold =
            process.stopped.is_some() && Stat::read(halted.pid)?.field(EXIT_CODE) != 0;
        let first = Asked {
            tracee: halted.first(),
            status: &halted.statuses()?[0],
            memory: &halted.memory,
            scratch: stub.address + SCRATCH,
            outcome,
            if_signalled: halted.threads[0].if_signalled,
            shared: &self.shared,
            beside: Beside::read(halted.pid, halted.pid)?,
        };
        process.threads = vec![first.read()?];
        Ok(process)
    }
}

/// Replaces a pending `SIGSTOP` by a stop of the process, since the signal cannot stay pending in a process that is
/// being restored. Resuming the process would discard such signals anyway.
fn forget_stop_signals(process: &mut FrozenProcess) {
    let mut found = false;
    let mut filter = |pending: &mut Vec<SignalInfo>| {
        pending.retain(|info| {
            let stops = info.number() == libc::SIGSTOP;
            found |= stops;
            !stops
        });
    };
    filter(&mut process.pending);
    for thread in &mut process.threads {
        filter(&mut thread.pending);
    }
    if found && process.stopped.is_none() {
        process.stopped = Some(libc::SIGSTOP);
        process.stop_untold = true;
    }
}

/// Adds calls that reveal the `mlockall` setting for future mappings, by means of a new mapping. Returns the index of
/// the first call's result.
fn probe_locks(stub: &Stub, batch: &mut Batch) -> usize {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let map = [0, PAGE, protection, flags, u64::MAX, 0];
    let first = batch.push(Call::new(libc::SYS_mmap, &map).keep());
    let on_page = |number, last| Call::new(number, &[0, PAGE, last]).kept_first();
    batch.push(on_page(libc::SYS_mincore, stub.address + PROBE));
    // Fails for locked memory.
    batch.push(on_page(libc::SYS_madvise, libc::MADV_DONTNEED as u64));
    batch.push(on_page(libc::SYS_munmap, 0));
    first
}

/// Evaluates the results of the calls of [`probe_locks`].
fn lock_default(results: &[i64], stub: &Stub, halted: &Halted) -> Result<u64> {
    let errno = |at: usize| -results.get(at).copied().unwrap_or(0) as i32;
    let mut resident = [0; 1];
    halted.memory.read(stub.address + PROBE, &mut resident)?;
    Ok(match (errno(0), errno(2)) {
        // The new mapping would exceed the limit of locked memory.
        (libc::EAGAIN, _) => libc::MCL_FUTURE as u64,
        (1..=4095, _) | (_, 0) => 0,
        _ if resident[0] & 1 == 1 => libc::MCL_FUTURE as u64,
        _ => (libc::MCL_FUTURE | MCL_ONFAULT) as u64,
    })
}

/// Adds the calls about the process. Returns the index of the first call's result.
fn questions(stub: &Stub, batch: &mut Batch, timers: &[PosixTimer]) -> usize {
    let at = |place: u64| stub.address + place;
    let first = batch.push(Call::new(libc::SYS_brk, &[0]));
    batch.push(Call::new(libc::SYS_prctl, &[libc::PR_GET_DUMPABLE as u64]));
    batch.push(Call::new(
        libc::SYS_prctl,
        &[libc::PR_GET_THP_DISABLE as u64],
    ));
    batch.push(Call::new(libc::SYS_prctl, &[GET_MDWE]));
    batch.push(Call::new(libc::SYS_prctl, &[GET_MERGE]));
    batch.push(Call::new(libc::SYS_membarrier, &[REGISTRATIONS, 0, 0]));
    batch.push(Call::new(
        libc::SYS_prctl,
        &[libc::PR_GET_CHILD_SUBREAPER as u64, at(SUBREAPER)],
    ));
    for signal in 1..=64 {
        let place = at(ACTIONS + (signal - 1) * ACTION_BYTES);
        batch.push(Call::new(libc::SYS_rt_sigaction, &[signal, 0, place, 8]));
    }
    for which in 0..3 {
        batch.push(Call::new(
            libc::SYS_getitimer,
            &[which, at(INTERVALS + which * 32)],
        ));
    }
    for resource in 0..RESOURCES {
        let place = at(LIMITS + resource * 16);
        batch.push(Call::new(libc::SYS_prlimit64, &[0, resource, 0, place]));
    }
    for (number, timer) in timers.iter().enumerate() {
        let place = at(TIMERS + number as u64 * 32);
        batch.push(Call::new(
            libc::SYS_timer_gettime,
            &[timer.id as u64, place],
        ));
    }
    first
}

/// Results of the calls of [`questions`].
struct Answers<'a> {
    halted: &'a Halted,
    stub: u64,
    results: &'a [i64],
}

impl Answers<'_> {
    fn process(&self, shared: &[[u8; 128]]) -> Result<FrozenProcess> {
        let pid = self.halted.pid;
        let answer = |at: usize| self.results.get(at).copied().unwrap_or(0);
        // Older kernels do not know these queries.
        let younger = [3, 4, 5];
        let must = |(at, _): &(usize, &i64)| !younger.contains(at);
        for (_, result) in self.results.iter().enumerate().filter(must) {
            value(*result).context(|| format!("asking process {pid} for its state"))?;
        }
        let status = &self.halted.statuses()?[0];
        let score = procfs::read(pid, "oom_score_adj")?;
        let filter = procfs::read(pid, "coredump_filter")?;
        Ok(FrozenProcess {
            actions: self.actions()?,
            pending: infos(shared.to_vec()),
            interval_timers: self.interval_timers()?,
            memory: memory_fields(pid, answer(0) as u64)?,
            limits: self.limits()?,
            umask: status.umask,
            directory: procfs::link_target(pid, "cwd")?.into_os_string().into_vec(),
            dumpable: answer(1) as u64,
            child_subreaper: self.words(SUBREAPER, 1)?[0] as u32 != 0,
            huge_pages_off: answer(2) as u64,
            no_new_code: answer(3).max(0) as u64,
            merges: answer(4) > 0,
            barriers: answer(5).max(0) as u64,
            oom_score_adjustment: score.trim().parse().unwrap_or(0),
            dump_filter: u32::from_str_radix(filter.trim(), 16).unwrap_or(0x33),
            ..FrozenProcess::default()
        })
    }

    fn actions(&self) -> Result<Vec<Action>> {
        let words = self.words(ACTIONS, 64 * 4)?;
        let action = |four: &[u64]| Action {
            handler: four[0],
            flags: four[1],
            restorer: four[2],
            mask: four[3],
        };
        Ok(words.chunks_exact(4).map(action).collect())
    }

    fn limits(&self) -> Result<Vec<Limit>> {
        let words = self.words(LIMITS, RESOURCES as usize * 2)?;
        let limit = |two: &[u64]| Limit {
            soft: two[0],
            hard: two[1],
        };
        Ok(words.chunks_exact(2).map(limit).collect())
    }

    fn interval_timers(&self) -> Result<[IntervalTimer; 3]> {
        let words = self.words(INTERVALS, 3 * 4)?;
        let mut found = [IntervalTimer::default(); 3];
        for (timer, four) in found.iter_mut().zip(words.chunks_exact(4)) {
            timer.interval_us = four[0] * 1_000_000 + four[1];
            timer.left_us = four[2] * 1_000_000 + four[3];
            // The timer's signal is pending, and the timer restarts only when that signal is taken.
            if timer.left_us == 0 {
                timer.left_us = timer.interval_us;
            }
        }
        Ok(found)
    }

    fn timers(&self, timers: &mut [PosixTimer]) -> Result<()> {
        let words = self.words(TIMERS, timers.len() * 4)?;
        for (timer, four) in timers.iter_mut().zip(words.chunks_exact(4)) {
            timer.interval_ns = four[0] * 1_000_000_000 + four[1];
            timer.left_ns = four[2] * 1_000_000_000 + four[3];
            if timer.left_ns == 0 {
                timer.left_ns = timer.interval_ns;
            }
        }
        Ok(())
    }

    fn words(&self, place: u64, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        self.halted.memory.read(self.stub + place, &mut bytes)?;
        let word = |eight: &[u8]| u64::from_ne_bytes(eight.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(8).map(word).collect())
    }
}

/// Parses `/proc/PID/timers`.
pub(super) fn posix_timers(text: &str) -> Vec<PosixTimer> {
    let mut found: Vec<PosixTimer> = Vec::new();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once(':') else {
            continue;
        };
        let rest = rest.trim();
        if name == "ID" {
            found.push(PosixTimer {
                id: rest.parse().unwrap_or(-1),
                ..PosixTimer::default()
            });
            continue;
        }
        let Some(timer) = found.last_mut() else {
            continue;
        };
        match name {
            "signal" => {
                let (signal, value) = rest.split_once('/').unwrap_or((rest, "0"));
                timer.signal = signal.parse().unwrap_or(0);
                timer.value = u64::from_str_radix(value, 16).unwrap_or(0);
            }
            "notify" => {
                let (kind, whom) = rest.split_once('/').unwrap_or((rest, ""));
                timer.thread = whom
                    .strip_prefix("tid.")
                    .and_then(|tid| tid.parse().ok())
                    .unwrap_or(0);
                timer.notify = match kind {
                    "none" => libc::SIGEV_NONE,
                    "thread" => libc::SIGEV_THREAD,
                    _ if timer.thread != 0 => libc::SIGEV_THREAD_ID,
                    _ => libc::SIGEV_SIGNAL,
                };
            }
            "ClockID" => timer.clock = rest.parse().unwrap_or(0),
            _ => {}
        }
    }
    found.retain(|timer| timer.id >= 0);
    found.sort_by_key(|timer| timer.id);
    found
}

fn memory_fields(pid: i32, brk: u64) -> Result<MemoryFields> {
    let stat = Stat::read(pid)?;
    let field = |number| stat.field(number);
    let addresses = [
        field(26),
        field(27),
        field(45),
        field(46),
        field(47),
        brk,
        field(28),
        field(48),
        field(49),
        field(50),
        field(51),
    ];
    let auxiliary = procfs::read_bytes(pid, "auxv")?;
    Ok(MemoryFields {
        addresses,
        auxiliary,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_timers() {
        let text = "ID: 1\nsignal: 60/00007fff86e452a8\nnotify: signal/tid.2634\nClockID: 1\nID: 0\nsignal: 14/0000000000000007\n\
            notify: none/pid.2\nClockID: 0\n";
        let timers = posix_timers(text);
        assert_eq!(timers.len(), 2);
        assert_eq!(
            (timers[0].id, timers[0].notify, timers[0].value),
            (0, libc::SIGEV_NONE, 7)
        );
        assert_eq!(
            (timers[1].thread, timers[1].notify, timers[1].clock),
            (2634, libc::SIGEV_THREAD_ID, 1)
        );
        assert_eq!(posix_timers("x\nsignal: 1\n"), vec![]);
    }
}
