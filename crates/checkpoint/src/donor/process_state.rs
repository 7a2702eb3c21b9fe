//! State of a stopped process as a whole.

use super::halt::{HaltedProcess, HaltedThread};
use super::thread_state::{self, FREE_OFFSET, QueriedThread, UntracedThreadState, signal_infos};
use super::tracker_attachment::{TrackerAttachment, stub_exit_signal};
use crate::error::{Context, Result, unexpected_text};
use crate::image::{
    IntervalTimer, PAGE, PosixTimer, PrctlMmMap, ProcessState, ResourceLimit, SignalAction,
    SignalInfo,
};
use crate::procfs::{self, ProcStat, ProcStatus};
use crate::trace::{
    CallBatch, CallBatchOutcome, SCRATCH_OFFSET, Stub, SystemCall, ThreadCallBatch,
    ThreadStubSlotAllocator, call_result, run_batches,
};
use holdfast_sys::priority::{is_realtime, run_parallel};
use std::collections::VecDeque;
use std::os::unix::ffi::OsStringExt;

const ACTIONS_OFFSET: u64 = FREE_OFFSET;
const ACTION_BYTES: u64 = 32;
const INTERVAL_TIMERS_OFFSET: u64 = ACTIONS_OFFSET + 64 * ACTION_BYTES;
const SUBREAPER_OFFSET: u64 = INTERVAL_TIMERS_OFFSET + 3 * 32;
const LIMITS_OFFSET: u64 = SUBREAPER_OFFSET + 32;
const POSIX_TIMERS_OFFSET: u64 = LIMITS_OFFSET + RESOURCE_COUNT * 16;
const PROBE_OFFSET: u64 = POSIX_TIMERS_OFFSET + TIMERS_MAX as u64 * 32;
/// Number of the exit code's field in `/proc/PID/stat`.
const EXIT_CODE: usize = 52;
/// `MCL_ONFAULT`.
const MCL_ONFAULT: i32 = 4;
/// Most POSIX timers of a process, limited by the stub's space for results.
pub(crate) const TIMERS_MAX: usize = 1024;
/// `PR_GET_MDWE` (Linux 6.3).
const PR_GET_MDWE: u64 = 66;
/// `PR_GET_MEMORY_MERGE` (Linux 6.4).
const PR_GET_MEMORY_MERGE: u64 = 68;
/// `MEMBARRIER_CMD_GET_REGISTRATIONS` (Linux 6.3).
const MEMBARRIER_GET_REGISTRATIONS: u64 = 1 << 9;
/// Number of resources (`RLIM_NLIMITS`).
const RESOURCE_COUNT: u64 = 16;

/// Reads stopped processes, each with the tracker's attachment to it. Calls that threads must make themselves run at
/// the same time.
pub(super) fn read_processes(
    stopped: &[(&HaltedProcess, &TrackerAttachment)],
) -> Result<Vec<ProcessState>> {
    let is_urgent = is_realtime();
    let queries: Result<Vec<ProcessQuery<'_>>> = stopped
        .iter()
        .map(|pair| ProcessQuery::new(*pair))
        .collect();
    let mut asking = queries?;
    let jobs = asking
        .iter_mut()
        .map(|query| query.first_thread_job().with_boost(is_urgent));
    let outcomes = run_batches(jobs.collect())?;
    let mut processes = Vec::with_capacity(stopped.len());
    for (query, outcome) in asking.iter().zip(outcomes) {
        processes.push(query.read_process(outcome)?);
    }
    let mut other_threads: VecDeque<(usize, usize)> = (asking.iter().enumerate())
        .flat_map(|(process, query)| (1..query.halted.threads.len()).map(move |at| (process, at)))
        .collect();
    while !other_threads.is_empty() {
        query_threads(&asking, &mut other_threads, is_urgent, &mut processes)?;
    }
    processes.iter_mut().for_each(replace_pending_sigstop);
    Ok(processes)
}

/// Queries as many threads, given by process and index, as their processes' stubs can hold, and reads their state.
fn query_threads(
    queries: &[ProcessQuery<'_>],
    waiting: &mut VecDeque<(usize, usize)>,
    is_urgent: bool,
    processes: &mut [ProcessState],
) -> Result<()> {
    let mut slots: Vec<ThreadStubSlotAllocator> = queries
        .iter()
        .map(|_| ThreadStubSlotAllocator::new())
        .collect();
    let (mut jobs, mut queried) = (Vec::new(), Vec::new());
    while let Some(&(process, at)) = waiting.front() {
        let query = &queries[process];
        let tracee = query.halted.threads[at].tracee;
        let extended = tracee.extended_registers()?;
        let calls = thread_state::query_calls(0).len();
        let room = slots[process].allocate(calls, extended.len(), thread_state::RESULTS_BYTES);
        let Some(slot) = room else {
            if jobs.is_empty() {
                return Err(unexpected_text("the stub has no room for a thread's state"));
            }
            break;
        };
        waiting.pop_front();
        let status = &query.halted.statuses()?[at];
        let exit = stub_exit_signal(query.halted.pid, status);
        let stub = Stub { exit, ..query.stub };
        let scratch = stub.address + slot.scratch;
        let questions = thread_state::query_calls(scratch);
        let job = ThreadCallBatch::new(stub, tracee, &query.halted.memory, questions);
        jobs.push(job.in_slot(slot, extended).with_boost(is_urgent));
        queried.push((process, &query.halted.threads[at], status, scratch));
    }
    let outcomes = run_batches(jobs)?;
    let id_pair =
        |entry: &(usize, &HaltedThread, _, _)| (queries[entry.0].halted.pid, entry.1.tracee.tid);
    let ids: Vec<(i32, i32)> = queried.iter().map(id_pair).collect();
    let untraced = run_parallel(&ids, |(pid, tid)| UntracedThreadState::read(*pid, *tid));
    for ((asked, outcome), beside) in queried.into_iter().zip(outcomes).zip(untraced) {
        let (process, thread, status, scratch) = asked;
        let query = &queries[process];
        let asked = QueriedThread {
            tracee: thread.tracee,
            status,
            memory: &query.halted.memory,
            scratch,
            outcome,
            if_signalled: thread.if_signalled,
            process_pending: &query.process_pending,
            untraced: beside?,
        };
        processes[process].threads.push(asked.read()?);
    }
    Ok(())
}

/// A process that is queried for its state.
struct ProcessQuery<'a> {
    halted: &'a HaltedProcess,
    stub: Stub,
    timers: Vec<PosixTimer>,
    /// Signals pending for the process.
    process_pending: Vec<[u8; 128]>,
    /// Calls that the first thread makes; empty once they run.
    batch: CallBatch,
    /// Index of the first result about the process, and of the first result of [`probe_mlockall`].
    process_results: usize,
    probe_results: usize,
}

impl<'a> ProcessQuery<'a> {
    fn new((halted, attachment): (&'a HaltedProcess, &TrackerAttachment)) -> Result<Self> {
        let (pid, statuses) = (halted.pid, halted.statuses()?);
        let mut timers = parse_posix_timers(&procfs::read(pid, "timers")?);
        for timer in timers.iter_mut().filter(|timer| timer.thread != 0) {
            timer.thread = ProcStatus::read(pid, timer.thread)?.innermost_id();
        }
        if timers.len() > TIMERS_MAX {
            return Err(unexpected_text("more than 1,024 POSIX timers"));
        }
        let stub = Stub {
            address: attachment.stub.address,
            exit: stub_exit_signal(pid, &statuses[0]),
        };
        let mut batch = thread_state::query_calls(stub.address + SCRATCH_OFFSET);
        let rest = add_process_queries(&stub, &mut batch, &timers);
        let probe = probe_mlockall(&stub, &mut batch);
        let shared = halted.first_thread().pending_signals(true)?;
        Ok(Self {
            halted,
            stub,
            timers,
            process_pending: shared,
            batch,
            process_results: rest,
            probe_results: probe,
        })
    }

    fn first_thread_job(&mut self) -> ThreadCallBatch<'a> {
        let batch = std::mem::take(&mut self.batch);
        ThreadCallBatch::new(
            self.stub,
            self.halted.first_thread(),
            &self.halted.memory,
            batch,
        )
    }

    /// Returns the process's state with its first thread's.
    fn read_process(&self, outcome: CallBatchOutcome) -> Result<ProcessState> {
        let (halted, stub) = (self.halted, &self.stub);
        let results = &outcome.results;
        let answers = QueryResults {
            halted,
            stub: stub.address,
            results: &results[self.process_results..self.probe_results],
        };
        let mut process = answers.read_process(&self.process_pending)?;
        let mut timers = self.timers.clone();
        answers.read_timers(&mut timers)?;
        process.posix_timers = timers;
        process.mlockall_flags = future_lock_flags(&results[self.probe_results..], stub, halted)?;
        process.group_stop = halted.threads[0].group_stop;
        // The kernel reports the signal as exit code until the parent has waited for the stop.
        process.is_stop_unreported =
            process.group_stop.is_some() && ProcStat::read(halted.pid)?.field(EXIT_CODE) != 0;
        let first = QueriedThread {
            tracee: halted.first_thread(),
            status: &halted.statuses()?[0],
            memory: &halted.memory,
            scratch: stub.address + SCRATCH_OFFSET,
            outcome,
            if_signalled: halted.threads[0].if_signalled,
            process_pending: &self.process_pending,
            untraced: UntracedThreadState::read(halted.pid, halted.pid)?,
        };
        process.threads = vec![first.read()?];
        Ok(process)
    }
}

/// Replaces a pending `SIGSTOP` by a stop of the process, since the signal cannot stay pending in a process that is
/// being restored. Resuming the process would discard such signals anyway.
fn replace_pending_sigstop(process: &mut ProcessState) {
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
    if found && process.group_stop.is_none() {
        process.group_stop = Some(libc::SIGSTOP);
        process.is_stop_unreported = true;
    }
}

/// Adds calls that reveal the `mlockall` setting for future mappings, by means of a new mapping. Returns the index of
/// the first call's result.
fn probe_mlockall(stub: &Stub, batch: &mut CallBatch) -> usize {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let map = [0, PAGE, protection, flags, u64::MAX, 0];
    let first = batch.push(SystemCall::new(libc::SYS_mmap, &map).keep_result());
    let page_call = |number, last| SystemCall::new(number, &[0, PAGE, last]).pass_kept_first();
    batch.push(page_call(libc::SYS_mincore, stub.address + PROBE_OFFSET));
    // Fails for locked memory.
    batch.push(page_call(libc::SYS_madvise, libc::MADV_DONTNEED as u64));
    batch.push(page_call(libc::SYS_munmap, 0));
    first
}

/// Evaluates the results of the calls of [`probe_mlockall`].
fn future_lock_flags(results: &[i64], stub: &Stub, halted: &HaltedProcess) -> Result<u64> {
    let errno = |at: usize| -results.get(at).copied().unwrap_or(0) as i32;
    let mut resident = [0; 1];
    halted
        .memory
        .read(stub.address + PROBE_OFFSET, &mut resident)?;
    Ok(match (errno(0), errno(2)) {
        // The new mapping would exceed the limit of locked memory.
        (libc::EAGAIN, _) => libc::MCL_FUTURE as u64,
        (1..=4095, _) | (_, 0) => 0,
        _ if resident[0] & 1 == 1 => libc::MCL_FUTURE as u64,
        _ => (libc::MCL_FUTURE | MCL_ONFAULT) as u64,
    })
}

/// Adds the calls about the process. Returns the index of the first call's result.
fn add_process_queries(stub: &Stub, batch: &mut CallBatch, timers: &[PosixTimer]) -> usize {
    let at = |offset: u64| stub.address + offset;
    let first = batch.push(SystemCall::new(libc::SYS_brk, &[0]));
    batch.push(SystemCall::new(
        libc::SYS_prctl,
        &[libc::PR_GET_DUMPABLE as u64],
    ));
    batch.push(SystemCall::new(
        libc::SYS_prctl,
        &[libc::PR_GET_THP_DISABLE as u64],
    ));
    batch.push(SystemCall::new(libc::SYS_prctl, &[PR_GET_MDWE]));
    batch.push(SystemCall::new(libc::SYS_prctl, &[PR_GET_MEMORY_MERGE]));
    batch.push(SystemCall::new(
        libc::SYS_membarrier,
        &[MEMBARRIER_GET_REGISTRATIONS, 0, 0],
    ));
    batch.push(SystemCall::new(
        libc::SYS_prctl,
        &[libc::PR_GET_CHILD_SUBREAPER as u64, at(SUBREAPER_OFFSET)],
    ));
    for signal in 1..=64 {
        let place = at(ACTIONS_OFFSET + (signal - 1) * ACTION_BYTES);
        batch.push(SystemCall::new(
            libc::SYS_rt_sigaction,
            &[signal, 0, place, 8],
        ));
    }
    for which in 0..3 {
        batch.push(SystemCall::new(
            libc::SYS_getitimer,
            &[which, at(INTERVAL_TIMERS_OFFSET + which * 32)],
        ));
    }
    for resource in 0..RESOURCE_COUNT {
        let place = at(LIMITS_OFFSET + resource * 16);
        batch.push(SystemCall::new(
            libc::SYS_prlimit64,
            &[0, resource, 0, place],
        ));
    }
    for (number, timer) in timers.iter().enumerate() {
        let place = at(POSIX_TIMERS_OFFSET + number as u64 * 32);
        batch.push(SystemCall::new(
            libc::SYS_timer_gettime,
            &[timer.id as u64, place],
        ));
    }
    first
}

/// Results of the calls of [`questions`].
struct QueryResults<'a> {
    halted: &'a HaltedProcess,
    stub: u64,
    results: &'a [i64],
}

impl QueryResults<'_> {
    fn read_process(&self, shared: &[[u8; 128]]) -> Result<ProcessState> {
        let pid = self.halted.pid;
        let result_at = |at: usize| self.results.get(at).copied().unwrap_or(0);
        // Older kernels do not know these queries.
        let optional_queries = [3, 4, 5];
        let is_required = |(at, _): &(usize, &i64)| !optional_queries.contains(at);
        for (_, result) in self.results.iter().enumerate().filter(is_required) {
            call_result(*result).context(|| format!("reading the state of process {pid}"))?;
        }
        let status = &self.halted.statuses()?[0];
        let score = procfs::read(pid, "oom_score_adj")?;
        let filter = procfs::read(pid, "coredump_filter")?;
        Ok(ProcessState {
            signal_actions: self.read_actions()?,
            pending: signal_infos(shared.to_vec()),
            interval_timers: self.read_interval_timers()?,
            memory: read_memory_fields(pid, result_at(0) as u64)?,
            limits: self.read_limits()?,
            umask: status.umask,
            directory: procfs::link_target(pid, "cwd")?.into_os_string().into_vec(),
            dumpable: result_at(1) as u64,
            child_subreaper: self.read_words(SUBREAPER_OFFSET, 1)?[0] as u32 != 0,
            thp_disable: result_at(2) as u64,
            mdwe: result_at(3).max(0) as u64,
            is_merging: result_at(4) > 0,
            membarrier_registrations: result_at(5).max(0) as u64,
            oom_score_adjustment: score.trim().parse().unwrap_or(0),
            dump_filter: u32::from_str_radix(filter.trim(), 16).unwrap_or(0x33),
            ..ProcessState::default()
        })
    }

    fn read_actions(&self) -> Result<Vec<SignalAction>> {
        let words = self.read_words(ACTIONS_OFFSET, 64 * 4)?;
        let action = |four: &[u64]| SignalAction {
            handler: four[0],
            flags: four[1],
            restorer: four[2],
            mask: four[3],
        };
        Ok(words.chunks_exact(4).map(action).collect())
    }

    fn read_limits(&self) -> Result<Vec<ResourceLimit>> {
        let words = self.read_words(LIMITS_OFFSET, RESOURCE_COUNT as usize * 2)?;
        let limit = |two: &[u64]| ResourceLimit {
            soft: two[0],
            hard: two[1],
        };
        Ok(words.chunks_exact(2).map(limit).collect())
    }

    fn read_interval_timers(&self) -> Result<[IntervalTimer; 3]> {
        let words = self.read_words(INTERVAL_TIMERS_OFFSET, 3 * 4)?;
        let mut found = [IntervalTimer::default(); 3];
        for (timer, four) in found.iter_mut().zip(words.chunks_exact(4)) {
            timer.interval_us = four[0] * 1_000_000 + four[1];
            timer.remaining_us = four[2] * 1_000_000 + four[3];
            // The timer's signal is pending, and the timer restarts only when that signal is taken.
            if timer.remaining_us == 0 {
                timer.remaining_us = timer.interval_us;
            }
        }
        Ok(found)
    }

    fn read_timers(&self, timers: &mut [PosixTimer]) -> Result<()> {
        let words = self.read_words(POSIX_TIMERS_OFFSET, timers.len() * 4)?;
        for (timer, four) in timers.iter_mut().zip(words.chunks_exact(4)) {
            timer.interval_ns = four[0] * 1_000_000_000 + four[1];
            timer.remaining_ns = four[2] * 1_000_000_000 + four[3];
            if timer.remaining_ns == 0 {
                timer.remaining_ns = timer.interval_ns;
            }
        }
        Ok(())
    }

    fn read_words(&self, place: u64, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        self.halted.memory.read(self.stub + place, &mut bytes)?;
        let word = |eight: &[u8]| u64::from_ne_bytes(eight.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(8).map(word).collect())
    }
}

/// Parses `/proc/PID/timers`.
pub(super) fn parse_posix_timers(text: &str) -> Vec<PosixTimer> {
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
                let (kind, target) = rest.split_once('/').unwrap_or((rest, ""));
                timer.thread = target
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

fn read_memory_fields(pid: i32, brk: u64) -> Result<PrctlMmMap> {
    let stat = ProcStat::read(pid)?;
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
    Ok(PrctlMmMap {
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
        let timers = parse_posix_timers(text);
        assert_eq!(timers.len(), 2);
        assert_eq!(
            (timers[0].id, timers[0].notify, timers[0].value),
            (0, libc::SIGEV_NONE, 7)
        );
        assert_eq!(
            (timers[1].thread, timers[1].notify, timers[1].clock),
            (2634, libc::SIGEV_THREAD_ID, 1)
        );
        assert_eq!(parse_posix_timers("x\nsignal: 1\n"), vec![]);
    }
}
