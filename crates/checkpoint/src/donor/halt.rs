//! Stop of all threads of a process, and a resume that hides the stop from the program.

use super::interrupted_calls;
use crate::error::{Error, Result};
use crate::procfs::{self, ProcStatus};
use crate::trace::{
    ProcessMemory, RESTART_BLOCK, Registers, STOP_LIMIT, StopReason, StopWait, Tracee, poll_stop,
};
use holdfast_sys::priority::run_parallel;
use std::cell::OnceCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// `PTRACE_O_SUSPEND_SECCOMP`: filters do not apply to the calls that the tracer makes in the thread.
const PTRACE_O_SUSPEND_SECCOMP: i32 = 1 << 21;
/// `PTRACE_O_EXITKILL`.
const PTRACE_O_EXITKILL: i32 = 1 << 20;

/// A process with all threads stopped. Dropping it resumes the threads.
#[derive(Debug)]
pub(crate) struct HaltedProcess {
    pub pid: i32,
    pub memory: ProcessMemory,
    pub threads: Vec<HaltedThread>,
    statuses: OnceCell<Vec<ProcStatus>>,
    /// True if a `SIGSTOP` of the tracer is pending, which keeps the process stopped if the tracer dies.
    pub has_pending_stop: bool,
    /// True if a `SIGCONT` of the tracer is pending, which has cancelled that `SIGSTOP`.
    has_pending_continue: bool,
    is_released: bool,
}

/// A stopped thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HaltedThread {
    pub tracee: Tracee,
    /// Job control signal that stopped the thread's process.
    pub group_stop: Option<i32>,
    /// Registers to set if a signal has come since the stop: a call that would otherwise continue as if there had
    /// been no stop ends with them.
    pub if_signalled: Option<Registers>,
    is_stopped: bool,
}

/// Time limit between the stops of two threads, when several processes are stopped together.
const GROUP_STOP_LIMIT: Duration = Duration::from_millis(100);
/// Pause in which an ending thread can use the caller's processor.
const ENDING_INTERVAL: Duration = Duration::from_micros(50);

impl HaltedProcess {
    /// Stops every thread of a process.
    pub fn stop(pid: i32) -> Result<Self> {
        let mut stopped = stop_in_parallel(&[pid], STOP_LIMIT);
        stopped.pop().unwrap_or(Err(Error::ProcessEnded(pid)))
    }

    /// Stops every thread of several processes, given parents before children. All threads are interrupted before the
    /// first wait, so that the duration of the stop is the slowest thread's and not the sum of all.
    pub fn stop_processes(pids: &[i32]) -> Vec<Result<Self>> {
        if pids.len() > 1 {
            let stopped = stop_in_parallel(pids, GROUP_STOP_LIMIT);
            let did_not_stop = |one: &Result<Self>| matches!(one, Err(Error::StopTimeout(_)));
            if !stopped.iter().any(did_not_stop) {
                return stopped;
            }
        }
        // A parent in vfork(2) stops only after its child has gone on, so stop one process after the other while the
        // child runs.
        pids.iter().map(|pid| Self::stop(*pid)).collect()
    }

    fn new(pid: i32) -> Result<Self> {
        Ok(Self {
            pid,
            memory: ProcessMemory::open(pid)?,
            threads: Vec::new(),
            statuses: OnceCell::new(),
            has_pending_stop: false,
            has_pending_continue: false,
            is_released: false,
        })
    }

    /// Returns true if no thread is missing. A list of threads does not tell: a thread that ends while the kernel lists
    /// it can hide others.
    fn has_all_threads(&self) -> Result<bool> {
        Ok(procfs::thread_count(self.pid)? == self.threads.len())
    }

    /// Attaches to threads that are not known yet and interrupts them. Returns false if there are none.
    fn seize_new(&mut self) -> Result<bool> {
        let known: HashSet<i32> = self
            .threads
            .iter()
            .map(|thread| thread.tracee.tid)
            .collect();
        for tid in procfs::list_threads_once(self.pid)? {
            if known.contains(&tid) {
                continue;
            }
            match Tracee::seize(tid, 0) {
                Ok(tracee) => self.threads.push(HaltedThread {
                    tracee,
                    group_stop: None,
                    if_signalled: None,
                    is_stopped: false,
                }),
                Err(Error::ProcessEnded(_)) if tid != self.pid => {}
                // A thread cannot be attached to between its end and its disappearance.
                Err(_) if tid != self.pid && has_ended(self.pid, tid) => {}
                Err(_) if is_dead(self.pid) => return Err(Error::ProcessEnded(tid)),
                Err(error) => return Err(error),
            }
        }
        let new = &self.threads[known.len()..];
        for thread in new {
            // The wait detects a thread that ends meanwhile.
            let _ = thread.tracee.interrupt();
        }
        Ok(!new.is_empty())
    }

    /// Polls each thread that has not stopped yet, the first thread last: the kernel reports the end of a process's
    /// first thread only after the others'. Returns one thread that has not stopped yet, and true if any thread
    /// stopped or ended.
    fn poll_threads(&mut self, stop_wait: &mut StopWait) -> Result<(Option<i32>, bool)> {
        let (mut waiting, mut progressed) = (None, false);
        for at in (0..self.threads.len()).rev() {
            let thread = &mut self.threads[at];
            if thread.is_stopped {
                continue;
            }
            let tid = thread.tracee.tid;
            let stopped = match thread.poll_stop() {
                // Other threads stop meanwhile.
                Ok(false) if stop_wait.wait_briefly(tid) => thread.poll_stop(),
                other => other,
            };
            match stopped {
                Ok(stopped) => {
                    progressed |= stopped;
                    waiting = waiting.or((!stopped).then_some(tid));
                }
                Err(Error::ProcessEnded(tid)) if tid != self.pid => {
                    progressed = true;
                    self.threads.remove(at);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((waiting, progressed))
    }

    /// Prepares a process with all threads stopped for calls.
    fn prepare_for_calls(mut self) -> Result<Self> {
        // The process may have replaced its memory by `exec` before it stopped.
        self.memory = ProcessMemory::open(self.pid)?;
        for thread in &self.threads {
            let registers = thread.tracee.registers()?;
            let rewound = registers.with_restart_undone(&self.memory);
            if rewound != registers {
                thread.tracee.set_registers(&rewound)?;
            }
            abort_rseq(thread.tracee, rewound, &self.memory)?;
        }
        match self.threads.first() {
            Some(first) if first.tracee.tid == self.pid => {}
            _ => return Err(Error::ProcessEnded(self.pid)),
        }
        interrupted_calls::continue_calls(self.pid, &self.memory, &mut self.threads)?;
        Ok(self)
    }

    /// Returns the threads' IDs in their own PID namespace.
    pub fn namespace_tids(&self) -> Result<Vec<i32>> {
        Ok(self
            .statuses()?
            .iter()
            .map(ProcStatus::innermost_id)
            .collect())
    }

    /// Returns the procfs status of each thread, read once per stop: the fields in use do not change while all
    /// threads are stopped.
    pub fn statuses(&self) -> Result<&[ProcStatus]> {
        if self.statuses.get().is_none() {
            let pid = self.pid;
            let found = run_parallel(&self.threads, |thread| {
                ProcStatus::read(pid, thread.tracee.tid)
            });
            let found: Result<Vec<ProcStatus>> = found.into_iter().collect();
            let _ = self.statuses.set(found?);
        }
        Ok(self.statuses.get().map_or(&[], Vec::as_slice))
    }

    /// Returns the first thread.
    pub fn first_thread(&self) -> Tracee {
        Tracee { tid: self.pid }
    }

    /// Selects the fate of the process if the caller dies: with `ends` the kernel kills the process, without it the
    /// kernel resumes the process.
    pub fn set_kill_on_tracer_exit(&self, ends: bool) -> Result<()> {
        let exit_kill = if ends { PTRACE_O_EXITKILL } else { 0 };
        let first = self.first_thread();
        match first.set_options(PTRACE_O_SUSPEND_SECCOMP | exit_kill) {
            // The caller may not be allowed to suspend filters, see `suspend_filters`.
            Err(Error::Kernel { .. }) => first.set_options(exit_kill),
            other => other,
        }
    }

    /// Resumes all threads as if there had been no stop.
    pub fn thaw(mut self) -> Result<()> {
        self.resume_and_detach()
    }

    /// Detaches without restoring anything, as the process is about to be ended.
    pub fn detach(mut self) {
        self.is_released = true;
        for thread in &self.threads {
            let _ = thread.tracee.detach();
        }
    }

    /// Cancels the pending signal that would stop the process when it is resumed.
    pub fn cancel_pending_sigstop(&mut self) {
        if std::mem::take(&mut self.has_pending_stop) {
            // A process that was killed meanwhile needs no signal.
            let _ = super::stop_without_tracer::signal(self.pid, libc::SIGCONT);
            self.has_pending_continue = true;
        }
    }

    fn resume_and_detach(&mut self) -> Result<()> {
        let outcome = self.resume_stopped();
        self.is_released = true;
        // A thread that did not stop in time can be detached only when it stops at last.
        for thread in self.threads.drain(..) {
            let _ = thread
                .tracee
                .wait_stopped()
                .and_then(|_| thread.tracee.detach());
        }
        outcome
    }

    /// Resumes the threads that have stopped, and forgets them.
    fn resume_stopped(&mut self) -> Result<()> {
        self.cancel_pending_sigstop();
        let own_signals = if self.has_pending_continue {
            signal_bit(libc::SIGCONT)
        } else {
            0
        };
        let mut outcome = Ok(());
        for thread in self.threads.extract_if(.., |thread| thread.is_stopped) {
            let resumed = conceal_stop(&thread, &self.memory, own_signals)
                .and_then(|()| thread.tracee.detach());
            if !matches!(resumed, Err(Error::ProcessEnded(_))) {
                outcome = outcome.and(resumed);
            }
        }
        outcome
    }
}

/// A process that is being stopped.
struct HaltInProgress {
    outcome: Result<HaltedProcess>,
    /// True if all threads have stopped, so that none can make another.
    is_complete: bool,
}

/// Stops processes. Each wait covers all of them.
fn stop_in_parallel(pids: &[i32], limit: Duration) -> Vec<Result<HaltedProcess>> {
    let begin = |pid: &i32| HaltInProgress {
        outcome: HaltedProcess::new(*pid),
        is_complete: false,
    };
    let mut halting: Vec<HaltInProgress> = pids.iter().map(begin).collect();
    // Threads may make other threads while the first ones are being stopped.
    loop {
        for process in &mut halting {
            process.seize_new(limit);
        }
        if halting.iter().all(|process| process.is_complete) {
            break;
        }
        wait_for_all(&mut halting, limit);
    }
    let outcomes = halting.into_iter().map(|process| process.outcome);
    outcomes
        .map(|halted| halted.and_then(HaltedProcess::prepare_for_calls))
        .collect()
}

impl HaltInProgress {
    /// Interrupts threads that are not known yet. If there are none, waits up to `limit` for threads that are ending.
    fn seize_new(&mut self, limit: Duration) {
        let started_at = Instant::now();
        while !self.is_complete {
            self.is_complete = self.apply_step(|halted| halted.has_all_threads()) != Some(false);
            if self.is_complete || self.apply_step(HaltedProcess::seize_new) == Some(true) {
                return;
            }
            if started_at.elapsed() > limit {
                self.apply_step(|halted| Err::<(), _>(Error::StopTimeout(halted.pid)));
            }
            std::thread::sleep(ENDING_INTERVAL);
        }
    }

    /// Applies a step to a process that has not failed yet. A failing step makes the process fail.
    fn apply_step<R>(&mut self, step: impl FnOnce(&mut HaltedProcess) -> Result<R>) -> Option<R> {
        match step(self.outcome.as_mut().ok()?) {
            Ok(done) => Some(done),
            Err(error) => {
                self.outcome = Err(error);
                None
            }
        }
    }
}

/// Waits until all interrupted threads have stopped. If no thread stops within `limit` after the last one, all
/// processes are resumed and fail.
fn wait_for_all(halting: &mut [HaltInProgress], limit: Duration) {
    let mut stop_wait = StopWait::new(limit);
    loop {
        let (mut waiting, mut progressed) = (None, false);
        for process in halting.iter_mut() {
            if let Some((tid, thread_stopped)) =
                process.apply_step(|halted| halted.poll_threads(&mut stop_wait))
            {
                waiting = waiting.or(tid);
                progressed |= thread_stopped;
            }
        }
        let Some(tid) = waiting else {
            return;
        };
        if progressed {
            stop_wait = StopWait::new(limit);
        } else if stop_wait.has_timed_out() {
            for halted in halting
                .iter_mut()
                .filter_map(|process| process.outcome.as_mut().ok())
            {
                let _ = halted.resume_stopped();
            }
            for process in halting.iter_mut().filter(|process| process.outcome.is_ok()) {
                process.outcome = Err(Error::StopTimeout(tid));
            }
            return;
        }
    }
}

impl HaltedThread {
    /// Returns true if the thread has stopped. Signals that come before are delivered.
    fn poll_stop(&mut self) -> Result<bool> {
        let Some(stop) = poll_stop(self.tracee.tid)? else {
            return Ok(false);
        };
        match stop {
            StopReason::Ended(_) => return Err(Error::ProcessEnded(self.tracee.tid)),
            StopReason::Signal(signal) => self.tracee.resume(signal)?,
            StopReason::Event(_) | StopReason::SystemCall => self.tracee.resume(0)?,
            StopReason::Interrupt | StopReason::Group(_) => {
                self.is_stopped = true;
                self.group_stop = if let StopReason::Group(signal) = stop {
                    Some(signal)
                } else {
                    None
                };
                suspend_filters(self.tracee)?;
            }
        }
        Ok(self.is_stopped)
    }
}

impl Drop for HaltedProcess {
    fn drop(&mut self) {
        if !self.is_released {
            let _ = self.resume_and_detach();
        }
    }
}

/// Returns true if a process has ended with all threads. Threads may go on after the first one has ended.
fn is_dead(pid: i32) -> bool {
    let threads = procfs::threads(pid).ok();
    has_ended(pid, pid) && threads.is_none_or(|threads| threads == [pid])
}

fn has_ended(pid: i32, tid: i32) -> bool {
    let state = procfs::read(pid, &format!("task/{tid}/stat"));
    let after_name = state.as_deref().ok().and_then(|text| text.rsplit_once(')'));
    after_name.is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}

/// Moves a thread out of a restartable sequence to the sequence's abort address. The kernel itself does so only while
/// the thread is inside the sequence, and the tracer's calls are outside of it.
fn abort_rseq(tracee: Tracee, registers: Registers, memory: &ProcessMemory) -> Result<()> {
    /// Offset of the sequence's address in the area.
    const RSEQ_CS_OFFSET: u64 = 8;
    if registers.is_in_call() {
        return Ok(());
    }
    let (area, _, _) = tracee.rseq_area()?;
    let word = |at: u64| -> Result<u64> {
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    if area == 0 || word(area + RSEQ_CS_OFFSET)? == 0 {
        return Ok(());
    }
    let sequence = word(area + RSEQ_CS_OFFSET)?;
    let (start, length, abort) = (
        word(sequence + 8)?,
        word(sequence + 16)?,
        word(sequence + 24)?,
    );
    if registers.rip.wrapping_sub(start) < length {
        tracee.set_registers(&Registers {
            rip: abort,
            ..registers
        })?;
        memory.write(area + RSEQ_CS_OFFSET, &[0; 8])?;
    }
    Ok(())
}

/// Suspends seccomp filters for the calls that the tracer makes in the stopped thread. If the caller may not suspend
/// filters, they apply to these calls.
fn suspend_filters(tracee: Tracee) -> Result<()> {
    match tracee.set_options(PTRACE_O_SUSPEND_SECCOMP) {
        Err(Error::Kernel { .. }) => Ok(()),
        other => other,
    }
}

/// Makes a thread go on as if it had not been stopped. Signals of the set `own_signals` do not count as the program's.
fn conceal_stop(thread: &HaltedThread, memory: &ProcessMemory, own_signals: u64) -> Result<()> {
    let tracee = thread.tracee;
    if let Some(registers) = thread.if_signalled
        && has_deliverable_signal(tracee, tracee.signal_mask()? | own_signals)?
    {
        return tracee.set_registers(&registers);
    }
    let registers = tracee.registers()?;
    let replayed = registers.with_call_number_recoverable(memory);
    if replayed != registers {
        tracee.set_registers(&replayed)?;
    }
    Ok(())
}

/// Returns true if a signal is pending that the mask does not block.
pub(crate) fn has_deliverable_signal(tracee: Tracee, mask: u64) -> Result<bool> {
    let mut pending = tracee.pending_signals(false)?;
    pending.extend(tracee.pending_signals(true)?);
    Ok(any_unblocked(&pending, mask))
}

/// Returns true if the mask does not block one of these signals.
pub(crate) fn any_unblocked<'a>(infos: impl IntoIterator<Item = &'a [u8; 128]>, mask: u64) -> bool {
    infos.into_iter().any(|info| {
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        (1..=64).contains(&number) && mask & signal_bit(number) == 0
    })
}

/// Returns the set of one signal.
fn signal_bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Returns registers that another kernel can continue. The other kernel restarts the same calls as this one, except
/// calls of which only this kernel knows the progress.
pub(crate) fn portable_registers(registers: Registers) -> Registers {
    if registers.is_in_call() && registers.rax as i64 == RESTART_BLOCK {
        return registers.with_call_restarted();
    }
    registers
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    /// A child process of the test, which ends with it.
    struct ChildProcess(i32);

    impl Drop for ChildProcess {
        fn drop(&mut self) {
            // SAFETY: no pointers but a null one are passed; the process is the test's child.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }

    fn fork_sleeper() -> ChildProcess {
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: no pointers are passed.
                unsafe { libc::pause() };
            }
        }
        ChildProcess(pid)
    }

    fn process_state(pid: i32) -> char {
        procfs::ProcStat::read(pid).expect("it lives").state
    }

    /// The list that the kernel gave lacked a thread.
    #[test]
    fn stop_with_missing_thread_is_incomplete() {
        let own = fork_sleeper();
        let mut halted = HaltedProcess::new(own.0).expect("it lives");
        assert!(!halted.has_all_threads().expect("it lives"));
        assert!(halted.seize_new().expect("it lives"));
        assert!(halted.has_all_threads().expect("it lives"));
    }

    /// The kernel has prepared to make a call again, and another stop comes before the thread runs.
    #[test]
    fn call_stopped_before_restart_is_completed() {
        const BYTES: usize = 1 << 20;
        let bytes = vec![7; BYTES];
        let (reader, writer) = std::io::pipe().expect("a pipe");
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: the bytes are readable for their number.
            unsafe {
                libc::write(writer.as_raw_fd(), bytes.as_ptr().cast(), 1 << 16);
                let written = libc::write(writer.as_raw_fd(), bytes.as_ptr().cast(), BYTES);
                libc::_exit(i32::from(written != BYTES as isize));
            }
        }
        let own = ChildProcess(pid);
        drop(writer);
        let since = std::time::Instant::now();
        let stopped = loop {
            assert!(
                since.elapsed() < STOP_LIMIT,
                "exceeded time: no thread is in a system call"
            );
            let stopped = HaltedProcess::stop(pid).expect("stops");
            let registers = stopped.first_thread().registers().expect("registers");
            if (registers.orig_rax, registers.rax as i64) == (libc::SYS_write as u64, -512) {
                break stopped;
            }
        };
        let registers = stopped.first_thread().registers().expect("registers");
        let prepared = Registers {
            orig_rax: registers.orig_rax,
            ..registers.with_call_repeated()
        };
        stopped
            .first_thread()
            .set_registers(&prepared)
            .expect("set");
        stopped
            .prepare_for_calls()
            .expect("stands still")
            .thaw()
            .expect("thaws");
        let mut found = Vec::new();
        { reader }.read_to_end(&mut found).expect("read");
        assert_eq!(found.len(), BYTES + (1 << 16));
        let mut status = 0;
        // SAFETY: the pointer is to a local; it is this test's child.
        assert_eq!(unsafe { libc::waitpid(own.0, &raw mut status, 0) }, pid);
        assert_eq!(status, 0);
    }

    #[test]
    fn dropping_stopped_processes_resumes_all() {
        let own: Vec<ChildProcess> = (0..20).map(|_| fork_sleeper()).collect();
        let pids: Vec<i32> = own.iter().map(|child| child.0).collect();
        let stopped: Result<Vec<HaltedProcess>> =
            HaltedProcess::stop_processes(&pids).into_iter().collect();
        let stopped = stopped.expect("all stop");
        assert!(pids.iter().all(|pid| process_state(*pid) == 't'));
        let found: Vec<i32> = stopped.iter().map(|halted| halted.pid).collect();
        assert_eq!(found, pids);
        drop(stopped);
        assert!(pids.iter().all(|pid| process_state(*pid) != 't'));
    }

    #[test]
    fn ended_process_does_not_block_others() {
        let own: Vec<ChildProcess> = (0..3).map(|_| fork_sleeper()).collect();
        let pids: Vec<i32> = own.iter().map(|child| child.0).collect();
        let ended = fork_sleeper().0;
        let mut stopped = HaltedProcess::stop_processes(&[pids[0], ended, pids[1], pids[2]]);
        assert!(matches!(stopped.remove(1), Err(Error::ProcessEnded(pid)) if pid == ended));
        assert!(stopped.iter().all(Result::is_ok));
    }

    #[test]
    fn zombie_counts_as_gone() {
        let own = fork_sleeper();
        // SAFETY: no pointers are passed; it is this test's child.
        unsafe { libc::kill(own.0, libc::SIGKILL) };
        let since = std::time::Instant::now();
        while process_state(own.0) != 'Z' {
            assert!(
                since.elapsed() < STOP_LIMIT,
                "exceeded time: the child is alive"
            );
        }
        let stopped = HaltedProcess::stop_processes(&[own.0]).pop();
        assert!(matches!(stopped, Some(Err(Error::ProcessEnded(pid))) if pid == own.0));
    }

    /// A parent in vfork(2) stops only after its child has gone on, so the child must not be stopped meanwhile.
    #[test]
    fn vfork_parent_is_stopped_before_its_child() {
        let pause = libc::timespec {
            tv_sec: 0,
            tv_nsec: 400_000_000,
        };
        // SAFETY: the child makes system calls only; its own child has memory of its own and does the same.
        let parent = unsafe {
            let pid = libc::fork();
            if pid == 0 {
                let flags = libc::CLONE_VFORK | libc::SIGCHLD;
                if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
                    libc::nanosleep(&raw const pause, std::ptr::null_mut());
                    libc::_exit(0);
                }
                loop {
                    libc::pause();
                }
            }
            ChildProcess(pid)
        };
        let child = loop {
            if let Some(child) = procfs::children(parent.0).expect("it lives").first() {
                break *child;
            }
        };
        let mut stopped = HaltedProcess::stop_processes(&[parent.0, child]);
        let last = stopped.pop().expect("two");
        // The child has ended meanwhile, and is stopped or a zombie.
        assert!(
            matches!(
                last,
                Ok(_) | Err(Error::ProcessEnded(_) | Error::Kernel { .. })
            ),
            "{last:?}"
        );
        stopped.remove(0).expect("the parent stops");
    }
}
