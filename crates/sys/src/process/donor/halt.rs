//! All threads of a process stopped, and let go as if nothing had been.

use crate::process::error::{Error, Result};
use crate::process::procfs;
use crate::process::trace::{Memory, Registers, Stop, Tracee};

/// `PTRACE_O_SUSPEND_SECCOMP`: filters do not apply while we make the thread call the kernel.
const SUSPEND_SECCOMP: i32 = 1 << 21;

/// A process whose threads stand still. Dropping it lets them go on.
#[derive(Debug)]
pub(crate) struct Halted {
    pub pid: i32,
    pub memory: Memory,
    pub threads: Vec<HaltedThread>,
    /// A stop signal was taken off the process on the way, and must be sent again.
    pub stop_again: bool,
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
            stop_again: false,
            released: false,
        };
        // Threads may still be born while the first are being stopped.
        while halted.stop_new()? {}
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
            match seize(tid) {
                Ok(tracee) => self.threads.push(HaltedThread {
                    tracee,
                    group_stop: None,
                    stopped: false,
                }),
                Err(Error::Gone(_)) if tid != self.pid => {}
                Err(error) => return Err(error),
            }
        }
        let new = known..self.threads.len();
        for at in new.clone() {
            // A thread that ends meanwhile is found below.
            let _ = self.threads[at].tracee.interrupt();
        }
        let mut ended = Vec::new();
        for at in new.clone() {
            let thread = &mut self.threads[at];
            match thread.tracee.wait_stopped() {
                Ok(stop) => {
                    thread.stopped = true;
                    thread.group_stop = if let Stop::Group(signal) = stop {
                        Some(signal)
                    } else {
                        None
                    };
                }
                Err(Error::Gone(tid)) if tid != self.pid => ended.push(tid),
                Err(error) => return Err(error),
            }
        }
        self.threads
            .retain(|thread| !ended.contains(&thread.tracee.tid));
        Ok(!new.is_empty())
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

    fn let_go(&mut self) -> Result<()> {
        self.released = true;
        let mut outcome = Ok(());
        for thread in self.threads.iter().filter(|thread| thread.stopped) {
            let fixed = conceal_stop(thread.tracee).and_then(|()| thread.tracee.detach());
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
        if self.stop_again {
            // SAFETY: no pointers are passed.
            unsafe { libc::kill(self.pid, libc::SIGSTOP) };
        }
        outcome
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if !self.released {
            let _ = self.let_go();
        }
    }
}

/// Attaches; where the caller may not suspend filters, without: its calls may then meet a filter.
fn seize(tid: i32) -> Result<Tracee> {
    match Tracee::seize(tid, SUSPEND_SECCOMP) {
        Err(Error::Kernel { .. }) => Tracee::seize(tid, 0),
        other => other,
    }
}

/// A call that the stop ended with `EINTR` is made again; the kernel itself does so for all others.
fn conceal_stop(tracee: Tracee) -> Result<()> {
    let registers = tracee.registers()?;
    if registers.interrupted_by_stop() && !signal_waits(tracee, tracee.mask()?)? {
        tracee.set_registers(&registers.restarted())?;
    }
    Ok(())
}

/// Whether a signal waits that the thread does not block.
pub(crate) fn signal_waits(tracee: Tracee, mask: u64) -> Result<bool> {
    let mut waiting = tracee.pending(false)?;
    waiting.extend(tracee.pending(true)?);
    Ok(waiting.iter().any(|info| {
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        (1..=64).contains(&number) && mask & (1 << (number - 1)) == 0
    }))
}

/// Registers as another kernel can take them: it restarts what this one would, except calls of which this one alone knows
/// how far they were.
pub(crate) fn portable(registers: Registers, waits: bool) -> Registers {
    const RESTART_BLOCK: i64 = -516;
    let by_stop = registers.interrupted_by_stop() && !waits;
    if by_stop || (registers.in_call() && registers.rax as i64 == RESTART_BLOCK) {
        return registers.restarted();
    }
    registers
}
