//! Stop of all threads of a process, and a resume that hides the stop from the program.

use super::unfinished;
use crate::priority::share_out;
use crate::process::error::{Error, Result};
use crate::process::procfs::{self, Status};
use crate::process::trace::{
    Memory, Patience, RESTART_BLOCK, Registers, STOP_LIMIT, Stop, Tracee, look,
};
use std::cell::OnceCell;
use std::collections::HashSet;
use std::time::Duration;

/// `PTRACE_O_SUSPEND_SECCOMP`: filters do not apply to the calls that the tracer makes in the thread.
const SUSPEND_SECCOMP: i32 = 1 << 21;
/// `PTRACE_O_EXITKILL`.
const EXIT_KILL: i32 = 1 << 20;

/// A process with all threads stopped. Dropping it resumes the threads.
#[derive(Debug)]
pub(crate) struct Halted {
    pub pid: i32,
    pub memory: Memory,
    pub threads: Vec<HaltedThread>,
    statuses: OnceCell<Vec<Status>>,
    /// True if a `SIGSTOP` of the tracer is pending, which keeps the process stopped if the tracer dies.
    pub held: bool,
    /// True if a `SIGCONT` of the tracer is pending, which has cancelled that `SIGSTOP`.
    continued: bool,
    released: bool,
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
    stopped: bool,
}

/// Time limit between the stops of two threads, when several processes are stopped together.
const TOGETHER_LIMIT: Duration = Duration::from_millis(100);

impl Halted {
    /// Stops every thread of a process.
    pub fn stop(pid: i32) -> Result<Self> {
        let mut stopped = stop_together(&[pid], STOP_LIMIT);
        stopped.pop().unwrap_or(Err(Error::Gone(pid)))
    }

    /// Stops every thread of several processes, given parents before children. All threads are interrupted before the
    /// first wait, so that the duration of the stop is the slowest thread's and not the sum of all.
    pub fn stop_all(pids: &[i32]) -> Vec<Result<Self>> {
        if pids.len() > 1 {
            let stopped = stop_together(pids, TOGETHER_LIMIT);
            let waits = |one: &Result<Self>| matches!(one, Err(Error::WouldNotStop(_)));
            if !stopped.iter().any(waits) {
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
            memory: Memory::open(pid)?,
            threads: Vec::new(),
            statuses: OnceCell::new(),
            held: false,
            continued: false,
            released: false,
        })
    }

    /// Attaches to threads that are not known yet and interrupts them. Returns false if there are none.
    fn seize_new(&mut self) -> Result<bool> {
        let known: HashSet<i32> = self.threads.iter().map(|of| of.tracee.tid).collect();
        for tid in procfs::threads(self.pid)? {
            if known.contains(&tid) {
                continue;
            }
            match Tracee::seize(tid, 0) {
                Ok(tracee) => self.threads.push(HaltedThread {
                    tracee,
                    group_stop: None,
                    if_signalled: None,
                    stopped: false,
                }),
                Err(Error::Gone(_)) if tid != self.pid => {}
                // A thread cannot be attached to between its end and its disappearance.
                Err(_) if tid != self.pid && has_ended(self.pid, tid) => {}
                Err(_) if is_over(self.pid) => return Err(Error::Gone(tid)),
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
    fn wait_once(&mut self, patience: &mut Patience) -> Result<(Option<i32>, bool)> {
        let (mut waiting, mut came) = (None, false);
        for at in (0..self.threads.len()).rev() {
            let thread = &mut self.threads[at];
            if thread.stopped {
                continue;
            }
            let tid = thread.tracee.tid;
            let stopped = match thread.look() {
                // Other threads stop meanwhile.
                Ok(false) if patience.wait(tid) => thread.look(),
                other => other,
            };
            match stopped {
                Ok(stopped) => {
                    came |= stopped;
                    waiting = waiting.or((!stopped).then_some(tid));
                }
                Err(Error::Gone(tid)) if tid != self.pid => {
                    came = true;
                    self.threads.remove(at);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((waiting, came))
    }

    /// Prepares a process with all threads stopped for calls.
    fn finish(mut self) -> Result<Self> {
        // The process may have replaced its memory by `exec` before it stopped.
        self.memory = Memory::open(self.pid)?;
        for thread in &self.threads {
            let registers = thread.tracee.registers()?;
            let settled = registers.not_begun_again(&self.memory);
            if settled != registers {
                thread.tracee.set_registers(&settled)?;
            }
            leave_sequence(thread.tracee, settled, &self.memory)?;
        }
        match self.threads.first() {
            Some(first) if first.tracee.tid == self.pid => {}
            _ => return Err(Error::Gone(self.pid)),
        }
        unfinished::go_on(self.pid, &self.memory, &mut self.threads)?;
        Ok(self)
    }

    /// Returns the threads' IDs in their own PID namespace.
    pub fn own_ids(&self) -> Result<Vec<i32>> {
        Ok(self.statuses()?.iter().map(Status::own_id).collect())
    }

    /// Returns the procfs status of each thread, read once per stop: the fields in use do not change while all
    /// threads are stopped.
    pub fn statuses(&self) -> Result<&[Status]> {
        if self.statuses.get().is_none() {
            let pid = self.pid;
            let found = share_out(&self.threads, |of| Status::read(pid, of.tracee.tid));
            let found: Result<Vec<Status>> = found.into_iter().collect();
            let _ = self.statuses.set(found?);
        }
        Ok(self.statuses.get().map_or(&[], Vec::as_slice))
    }

    /// Returns the first thread.
    pub fn first(&self) -> Tracee {
        Tracee { tid: self.pid }
    }

    /// Selects the fate of the process if the caller dies: with `ends` the kernel kills the process, without it the
    /// kernel resumes the process.
    pub fn end_with_tracer(&self, ends: bool) -> Result<()> {
        let ending = if ends { EXIT_KILL } else { 0 };
        let first = self.first();
        match first.options(SUSPEND_SECCOMP | ending) {
            // The caller may not be allowed to suspend filters, see `suspend_filters`.
            Err(Error::Kernel { .. }) => first.options(ending),
            other => other,
        }
    }

    /// Resumes all threads as if there had been no stop.
    pub fn thaw(mut self) -> Result<()> {
        self.let_go()
    }

    /// Detaches without restoring anything, as the process is about to be ended.
    pub fn forget(mut self) {
        self.released = true;
        for thread in &self.threads {
            let _ = thread.tracee.detach();
        }
    }

    /// Cancels the pending signal that would stop the process when it is resumed.
    pub fn release_hold(&mut self) {
        if std::mem::take(&mut self.held) {
            // A process that was killed meanwhile needs no signal.
            let _ = super::hold::signal(self.pid, libc::SIGCONT);
            self.continued = true;
        }
    }

    fn let_go(&mut self) -> Result<()> {
        let outcome = self.release_stopped();
        self.released = true;
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
    fn release_stopped(&mut self) -> Result<()> {
        self.release_hold();
        let ours = if self.continued {
            bit(libc::SIGCONT)
        } else {
            0
        };
        let mut outcome = Ok(());
        for thread in self.threads.extract_if(.., |thread| thread.stopped) {
            let fixed =
                conceal_stop(&thread, &self.memory, ours).and_then(|()| thread.tracee.detach());
            if !matches!(fixed, Err(Error::Gone(_))) {
                outcome = outcome.and(fixed);
            }
        }
        outcome
    }
}

/// A process that is being stopped.
struct Halting {
    outcome: Result<Halted>,
    /// True if all threads have stopped, so that none can make another.
    is_complete: bool,
}

/// Stops processes. Each wait covers all of them.
fn stop_together(pids: &[i32], limit: Duration) -> Vec<Result<Halted>> {
    let begin = |pid: &i32| Halting {
        outcome: Halted::new(*pid),
        is_complete: false,
    };
    let mut halting: Vec<Halting> = pids.iter().map(begin).collect();
    // Threads may make other threads while the first ones are being stopped.
    loop {
        halting.iter_mut().for_each(Halting::seize_new);
        if halting.iter().all(|of| of.is_complete) {
            break;
        }
        wait_for_all(&mut halting, limit);
    }
    let outcomes = halting.into_iter().map(|of| of.outcome);
    outcomes
        .map(|halted| halted.and_then(Halted::finish))
        .collect()
}

impl Halting {
    fn seize_new(&mut self) {
        if !self.is_complete {
            self.is_complete =
                self.advance(|halted| halted.seize_new().map(|new| !new)) != Some(false);
        }
    }

    /// Applies a step to a process that has not failed yet. A failing step makes the process fail.
    fn advance<R>(&mut self, step: impl FnOnce(&mut Halted) -> Result<R>) -> Option<R> {
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
fn wait_for_all(halting: &mut [Halting], limit: Duration) {
    let mut patience = Patience::new(limit);
    loop {
        let (mut waiting, mut came) = (None, false);
        for of in halting.iter_mut() {
            if let Some((tid, some)) = of.advance(|halted| halted.wait_once(&mut patience)) {
                waiting = waiting.or(tid);
                came |= some;
            }
        }
        let Some(tid) = waiting else {
            return;
        };
        if came {
            patience = Patience::new(limit);
        } else if patience.is_over() {
            for halted in halting.iter_mut().filter_map(|of| of.outcome.as_mut().ok()) {
                let _ = halted.release_stopped();
            }
            for of in halting.iter_mut().filter(|of| of.outcome.is_ok()) {
                of.outcome = Err(Error::WouldNotStop(tid));
            }
            return;
        }
    }
}

impl HaltedThread {
    /// Returns true if the thread has stopped. Signals that come before are delivered.
    fn look(&mut self) -> Result<bool> {
        let Some(stop) = look(self.tracee.tid)? else {
            return Ok(false);
        };
        match stop {
            Stop::Ended(_) => return Err(Error::Gone(self.tracee.tid)),
            Stop::Signal(signal) => self.tracee.resume(signal)?,
            Stop::Event(_) | Stop::Call => self.tracee.resume(0)?,
            Stop::Interrupt | Stop::Group(_) => {
                self.stopped = true;
                self.group_stop = if let Stop::Group(signal) = stop {
                    Some(signal)
                } else {
                    None
                };
                suspend_filters(self.tracee)?;
            }
        }
        Ok(self.stopped)
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if !self.released {
            let _ = self.let_go();
        }
    }
}

/// Returns true if a process has ended with all threads. Threads may go on after the first one has ended.
fn is_over(pid: i32) -> bool {
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
fn leave_sequence(tracee: Tracee, registers: Registers, memory: &Memory) -> Result<()> {
    /// Offset of the sequence's address in the area.
    const SEQUENCE: u64 = 8;
    if registers.in_call() {
        return Ok(());
    }
    let (area, _, _) = tracee.rseq()?;
    let word = |at: u64| -> Result<u64> {
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    if area == 0 || word(area + SEQUENCE)? == 0 {
        return Ok(());
    }
    let sequence = word(area + SEQUENCE)?;
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
        memory.write(area + SEQUENCE, &[0; 8])?;
    }
    Ok(())
}

/// Suspends seccomp filters for the calls that the tracer makes in the stopped thread. If the caller may not suspend
/// filters, they apply to these calls.
fn suspend_filters(tracee: Tracee) -> Result<()> {
    match tracee.options(SUSPEND_SECCOMP) {
        Err(Error::Kernel { .. }) => Ok(()),
        other => other,
    }
}

/// Makes a thread go on as if it had not been stopped. Signals of the set `ours` do not count as the program's.
fn conceal_stop(thread: &HaltedThread, memory: &Memory, ours: u64) -> Result<()> {
    let tracee = thread.tracee;
    if let Some(registers) = thread.if_signalled
        && signal_waits(tracee, tracee.mask()? | ours)?
    {
        return tracee.set_registers(&registers);
    }
    let registers = tracee.registers()?;
    let recallable = registers.recallable(memory);
    if recallable != registers {
        tracee.set_registers(&recallable)?;
    }
    Ok(())
}

/// Returns true if a signal is pending that the mask does not block.
pub(crate) fn signal_waits(tracee: Tracee, mask: u64) -> Result<bool> {
    let mut waiting = tracee.pending(false)?;
    waiting.extend(tracee.pending(true)?);
    Ok(any_waits(&waiting, mask))
}

/// Returns true if the mask does not block one of these signals.
pub(crate) fn any_waits<'a>(infos: impl IntoIterator<Item = &'a [u8; 128]>, mask: u64) -> bool {
    infos.into_iter().any(|info| {
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        (1..=64).contains(&number) && mask & bit(number) == 0
    })
}

/// Returns the set of one signal.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Returns registers that another kernel can continue. The other kernel restarts the same calls as this one, except
/// calls of which only this kernel knows the progress.
pub(crate) fn portable(registers: Registers) -> Registers {
    if registers.in_call() && registers.rax as i64 == RESTART_BLOCK {
        return registers.restarted();
    }
    registers
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    /// A child process of the test, which ends with it.
    struct Own(i32);

    impl Drop for Own {
        fn drop(&mut self) {
            // SAFETY: no pointers but a null one are passed; the process is the test's child.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }

    fn sleeper() -> Own {
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: no pointers are passed.
                unsafe { libc::pause() };
            }
        }
        Own(pid)
    }

    fn state(pid: i32) -> char {
        procfs::Stat::read(pid).expect("it lives").state
    }

    /// The kernel has prepared to make a call again, and another stop comes before the thread runs.
    #[test]
    fn a_call_that_was_not_begun_again_is_made_whole() {
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
        let own = Own(pid);
        drop(writer);
        let since = std::time::Instant::now();
        let stopped = loop {
            assert!(since.elapsed() < STOP_LIMIT, "exceeded time: no call");
            let stopped = Halted::stop(pid).expect("stops");
            let registers = stopped.first().registers().expect("registers");
            if (registers.orig_rax, registers.rax as i64) == (libc::SYS_write as u64, -512) {
                break stopped;
            }
        };
        let registers = stopped.first().registers().expect("registers");
        let prepared = Registers {
            orig_rax: registers.orig_rax,
            ..registers.made_again()
        };
        stopped.first().set_registers(&prepared).expect("set");
        stopped
            .finish()
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
    fn processes_are_stopped_together_and_let_go() {
        let own: Vec<Own> = (0..20).map(|_| sleeper()).collect();
        let pids: Vec<i32> = own.iter().map(|of| of.0).collect();
        let stopped: Result<Vec<Halted>> = Halted::stop_all(&pids).into_iter().collect();
        let stopped = stopped.expect("all stop");
        assert!(pids.iter().all(|pid| state(*pid) == 't'));
        let found: Vec<i32> = stopped.iter().map(|halted| halted.pid).collect();
        assert_eq!(found, pids);
        drop(stopped);
        assert!(pids.iter().all(|pid| state(*pid) != 't'));
    }

    #[test]
    fn one_that_has_ended_does_not_keep_the_others_from_stopping() {
        let own: Vec<Own> = (0..3).map(|_| sleeper()).collect();
        let pids: Vec<i32> = own.iter().map(|of| of.0).collect();
        let ended = sleeper().0;
        let mut stopped = Halted::stop_all(&[pids[0], ended, pids[1], pids[2]]);
        assert!(matches!(stopped.remove(1), Err(Error::Gone(pid)) if pid == ended));
        assert!(stopped.iter().all(Result::is_ok));
    }

    #[test]
    fn one_that_was_not_waited_for_has_ended() {
        let own = sleeper();
        // SAFETY: no pointers are passed; it is this test's child.
        unsafe { libc::kill(own.0, libc::SIGKILL) };
        let since = std::time::Instant::now();
        while state(own.0) != 'Z' {
            assert!(since.elapsed() < STOP_LIMIT, "exceeded time: it lives");
        }
        let stopped = Halted::stop_all(&[own.0]).pop();
        assert!(matches!(stopped, Some(Err(Error::Gone(pid))) if pid == own.0));
    }

    /// A parent in vfork(2) stops only after its child has gone on, so the child must not be stopped meanwhile.
    #[test]
    fn a_parent_that_waits_for_its_child_is_stopped_before_the_child() {
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
            Own(pid)
        };
        let child = loop {
            if let Some(child) = procfs::children(parent.0).expect("it lives").first() {
                break *child;
            }
        };
        let mut stopped = Halted::stop_all(&[parent.0, child]);
        let last = stopped.pop().expect("two");
        // The child has ended meanwhile, and is stopped or a zombie.
        assert!(
            matches!(last, Ok(_) | Err(Error::Gone(_) | Error::Kernel { .. })),
            "{last:?}"
        );
        stopped.remove(0).expect("the parent stops");
    }
}
