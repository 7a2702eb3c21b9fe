//! All threads of a process stopped, and let go as if nothing had been.

use crate::process::error::{Error, Result};
use crate::process::procfs::{self, Status};
use crate::process::trace::{
    Memory, Patience, RESTART_BLOCK, Registers, STOP_LIMIT, Stop, Tracee, look,
};

/// `PTRACE_O_SUSPEND_SECCOMP`: filters do not apply while we make the thread call the kernel.
const SUSPEND_SECCOMP: i32 = 1 << 21;

/// A process whose threads stand still. Dropping it lets them go on.
#[derive(Debug)]
pub(crate) struct Halted {
    pub pid: i32,
    pub memory: Memory,
    pub threads: Vec<HaltedThread>,
    /// A `SIGSTOP` of ours waits for it, in case that we die.
    pub held: bool,
    /// A `SIGCONT` of ours waits for it, which has taken that away.
    continued: bool,
    released: bool,
}

/// A thread that stands still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HaltedThread {
    pub tracee: Tracee,
    /// Stopped with its process, by this signal.
    pub group_stop: Option<i32>,
    stopped: bool,
}

impl Halted {
    /// Stops every thread of a process.
    pub fn stop(pid: i32) -> Result<Self> {
        let mut halted = Self {
            pid,
            memory: Memory::open(pid)?,
            threads: Vec::new(),
            held: false,
            continued: false,
            released: false,
        };
        // Threads may still be born while the first are being stopped.
        while halted.stop_new()? {}
        // Its memory may have become another one by `exec` until it stood still.
        halted.memory = Memory::open(pid)?;
        for thread in &halted.threads {
            leave_sequence(thread.tracee, &halted.memory)?;
        }
        match halted.threads.first() {
            Some(first) if first.tracee.tid == pid => Ok(halted),
            _ => Err(Error::Gone(pid)),
        }
    }

    fn stop_new(&mut self) -> Result<bool> {
        let known = self.threads.len();
        for tid in procfs::threads(self.pid)? {
            if self.threads.iter().any(|thread| thread.tracee.tid == tid) {
                continue;
            }
            match Tracee::seize(tid, 0) {
                Ok(tracee) => self.threads.push(HaltedThread {
                    tracee,
                    group_stop: None,
                    stopped: false,
                }),
                Err(Error::Gone(_)) if tid != self.pid => {}
                // Between its end and its disappearance a thread cannot be attached to.
                Err(_) if tid != self.pid && has_ended(self.pid, tid) => {}
                Err(error) => return Err(error),
            }
        }
        let new = known..self.threads.len();
        for at in new.clone() {
            // A thread that ends meanwhile is found below.
            let _ = self.threads[at].tracee.interrupt();
        }
        self.wait_for_new(known)?;
        Ok(!new.is_empty())
    }

    /// Waits for all threads from `first` on together: the first thread of a process that ends is only seen to end after
    /// the others were.
    fn wait_for_new(&mut self, first: usize) -> Result<()> {
        let mut patience = Patience::new(STOP_LIMIT);
        loop {
            let mut waiting = None;
            for at in (first..self.threads.len()).rev() {
                let thread = &mut self.threads[at];
                if thread.stopped {
                    continue;
                }
                match thread.look() {
                    Ok(true) => {}
                    Ok(false) => drop(waiting.get_or_insert(thread.tracee.tid)),
                    Err(Error::Gone(tid)) if tid != self.pid => drop(self.threads.remove(at)),
                    Err(error) => return Err(error),
                }
            }
            match waiting {
                None => return Ok(()),
                Some(tid) if !patience.wait(tid) => return Err(Error::WouldNotStop(tid)),
                Some(_) => {}
            }
        }
    }

    /// Threads by their IDs in their own PID namespace.
    pub fn own_ids(&self) -> Result<Vec<i32>> {
        let own = |thread: &HaltedThread| {
            Status::read(self.pid, thread.tracee.tid).map(|status| status.own_id())
        };
        self.threads.iter().map(own).collect()
    }

    /// The first thread.
    pub fn first(&self) -> Tracee {
        Tracee { tid: self.pid }
    }

    /// Lets all threads go on as if nothing had been.
    pub fn thaw(mut self) -> Result<()> {
        self.let_go()
    }

    /// Lets go without putting anything back: the process is to end.
    pub fn forget(mut self) {
        self.released = true;
        for thread in &self.threads {
            let _ = thread.tracee.detach();
        }
    }

    /// Takes back what would stop the process once it is let go.
    pub fn release_hold(&mut self) {
        if std::mem::take(&mut self.held) {
            // One that was killed meanwhile needs nothing.
            let _ = super::hold::signal(self.pid, libc::SIGCONT);
            self.continued = true;
        }
    }

    fn let_go(&mut self) -> Result<()> {
        self.release_hold();
        self.released = true;
        let ours = if self.continued {
            bit(libc::SIGCONT)
        } else {
            0
        };
        let mut outcome = Ok(());
        for thread in self.threads.iter().filter(|thread| thread.stopped) {
            let fixed = conceal_stop(thread.tracee, &self.memory, ours)
                .and_then(|()| thread.tracee.detach());
            if !matches!(fixed, Err(Error::Gone(_))) {
                outcome = outcome.and(fixed);
            }
        }
        // One that did not stop in time can only be let go where it stops at last.
        for thread in self.threads.iter().filter(|thread| !thread.stopped) {
            let _ = thread
                .tracee
                .wait_stopped()
                .and_then(|_| thread.tracee.detach());
        }
        outcome
    }
}

impl HaltedThread {
    /// Whether it has stopped; signals that come before are delivered.
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

fn has_ended(pid: i32, tid: i32) -> bool {
    let state = procfs::read(pid, &format!("task/{tid}/stat"));
    let after_name = state.as_deref().ok().and_then(|text| text.rsplit_once(')'));
    after_name.is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}

/// A thread in the middle of a restartable sequence is put to where it goes when it is interrupted: the kernel does so only as
/// long as the thread is where it was, and our calls are elsewhere.
fn leave_sequence(tracee: Tracee, memory: &Memory) -> Result<()> {
    /// Where in the area the sequence is told.
    const SEQUENCE: u64 = 8;
    let registers = tracee.registers()?;
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

/// While it stands still and makes our calls, filters do not apply; before, they do. Where the caller may not suspend them,
/// our calls may meet one.
fn suspend_filters(tracee: Tracee) -> Result<()> {
    match tracee.options(SUSPEND_SECCOMP) {
        Err(Error::Kernel { .. }) => Ok(()),
        other => other,
    }
}

/// A call that the stop ended with `EINTR` is made again; the kernel itself does so for all others.
/// Signals of the set `ours` do not count as the program's.
fn conceal_stop(tracee: Tracee, memory: &Memory, ours: u64) -> Result<()> {
    let registers = tracee.registers()?;
    if registers.interrupted_by_stop() && !signal_waits(tracee, tracee.mask()? | ours)? {
        return tracee.set_registers(&registers.restarted());
    }
    let recallable = registers.recallable(memory);
    if recallable != registers {
        tracee.set_registers(&recallable)?;
    }
    Ok(())
}

/// Whether a signal waits that the thread does not block.
pub(crate) fn signal_waits(tracee: Tracee, mask: u64) -> Result<bool> {
    let mut waiting = tracee.pending(false)?;
    waiting.extend(tracee.pending(true)?);
    Ok(waiting.iter().any(|info| {
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        (1..=64).contains(&number) && mask & bit(number) == 0
    }))
}

/// A signal in a set.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Registers as another kernel can take them: it restarts what this one would, except calls of which this one alone knows
/// how far they were.
pub(crate) fn portable(registers: Registers, waits: bool) -> Registers {
    let by_stop = registers.interrupted_by_stop() && !waits;
    if by_stop || (registers.in_call() && registers.rax as i64 == RESTART_BLOCK) {
        return registers.restarted();
    }
    registers
}
