//! A single thread under ptrace.

use super::super::error::{Context, Error, Result, check_long};
use super::{Patience, Registers};
use std::ffi::{c_long, c_void};
use std::io;
use std::time::Duration;

/// Time limit for a thread to stop.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Most bytes of extended registers (AVX-512, AMX, and reserve for later extensions).
const XSTATE_MAX: usize = 16384;
const NT_X86_XSTATE: usize = 0x202;
/// `PTRACE_EVENT_STOP` in the upper half of a wait status.
const EVENT_STOP: i32 = 128;

/// Reason for the stop of a traced thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// `PTRACE_INTERRUPT`, or the first stop of a new thread.
    Interrupt,
    /// Group stop of the process by this job control signal.
    Group(i32),
    /// Signal about to be delivered.
    Signal(i32),
    /// `PTRACE_EVENT_*`.
    Event(i32),
    /// Entry or exit of a system call.
    Call,
    /// The thread has ended with this wait status.
    Ended(i32),
}

/// A thread that the calling thread traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tracee {
    /// TID in the caller's PID namespace.
    pub tid: i32,
}

impl Tracee {
    /// Attaches without stopping the thread.
    pub fn seize(tid: i32, options: i32) -> Result<Self> {
        let tracee = Self { tid };
        match tracee.ask(libc::PTRACE_SEIZE, 0, options as usize) {
            Ok(_) => Ok(tracee),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(Error::Gone(tid)),
            Err(error) => Err(error).context(|| format!("attaching to thread {tid}")),
        }
    }

    /// Asks the thread to stop, without waiting.
    pub fn interrupt(self) -> Result<()> {
        self.ask(libc::PTRACE_INTERRUPT, 0, 0)
            .map(drop)
            .or_else(|e| self.named(e, "interrupting"))
    }

    /// Waits until the thread stops by the interrupt or with its process. Signals that arrive before are delivered.
    pub fn wait_stopped(self) -> Result<Stop> {
        loop {
            match wait_for(self.tid, STOP_LIMIT)? {
                Stop::Interrupt => return Ok(Stop::Interrupt),
                Stop::Group(signal) => return Ok(Stop::Group(signal)),
                Stop::Ended(_) => return Err(Error::Gone(self.tid)),
                Stop::Signal(signal) => self.resume(signal)?,
                Stop::Event(_) | Stop::Call => self.resume(0)?,
            }
        }
    }

    /// Resumes the thread, with a signal unless that is 0.
    pub fn resume(self, signal: i32) -> Result<()> {
        self.ask(libc::PTRACE_CONT, 0, signal as usize)
            .map(drop)
            .or_else(|e| self.named(e, "resuming"))
    }

    /// Resumes the thread until the next entry or exit of a system call.
    pub fn resume_to_call(self) -> Result<()> {
        self.ask(libc::PTRACE_SYSCALL, 0, 0)
            .map(drop)
            .or_else(|e| self.named(e, "resuming"))
    }

    /// Sends the thread a signal, which stays pending until the thread runs.
    pub fn send(self, signal: i32) {
        // SAFETY: no pointers are passed. A thread that has ended needs no signal.
        unsafe { libc::syscall(libc::SYS_tkill, self.tid, signal) };
    }

    /// Executes one instruction of the thread.
    pub fn step(self) -> Result<()> {
        self.ask(libc::PTRACE_SINGLESTEP, 0, 0)
            .map(drop)
            .or_else(|e| self.named(e, "stepping"))
    }

    /// Detaches from the thread.
    pub fn detach(self) -> Result<()> {
        self.ask(libc::PTRACE_DETACH, 0, 0)
            .map(drop)
            .or_else(|e| self.named(e, "detaching from"))
    }

    /// Sets the ptrace options.
    pub fn options(self, options: i32) -> Result<()> {
        self.ask(libc::PTRACE_SETOPTIONS, 0, options as usize)
            .map(drop)
            .or_else(|e| self.named(e, "setting options of"))
    }

    pub fn registers(self) -> Result<Registers> {
        let mut registers = Registers::default();
        self.ask(libc::PTRACE_GETREGS, 0, (&raw mut registers) as usize)
            .or_else(|e| self.named(e, "reading registers of"))?;
        Ok(registers)
    }

    pub fn set_registers(self, registers: &Registers) -> Result<()> {
        self.ask(
            libc::PTRACE_SETREGS,
            0,
            std::ptr::from_ref(registers) as usize,
        )
        .map(drop)
        .or_else(|e| self.named(e, "writing registers of"))
    }

    /// Returns floating point and vector registers, in the standard format of XSAVE.
    pub fn extended(self) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; XSTATE_MAX];
        let mut part = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast::<c_void>(),
            iov_len: bytes.len(),
        };
        self.ask(
            libc::PTRACE_GETREGSET as _,
            NT_X86_XSTATE,
            (&raw mut part) as usize,
        )
        .or_else(|e| self.named(e, "reading vector registers of"))?;
        bytes.truncate(part.iov_len);
        Ok(bytes)
    }

    pub fn set_extended(self, bytes: &[u8]) -> Result<()> {
        let mut part = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: bytes.len(),
        };
        self.ask(
            libc::PTRACE_SETREGSET as _,
            NT_X86_XSTATE,
            (&raw mut part) as usize,
        )
        .map(drop)
        .or_else(|e| self.named(e, "writing vector registers of"))
    }

    /// Returns the blocked signals, bit 0 for signal 1.
    pub fn mask(self) -> Result<u64> {
        let mut mask = 0u64;
        self.ask(libc::PTRACE_GETSIGMASK as _, 8, (&raw mut mask) as usize)
            .or_else(|e| self.named(e, "reading the signal mask of"))?;
        Ok(mask)
    }

    pub fn set_mask(self, mask: u64) -> Result<()> {
        self.ask(libc::PTRACE_SETSIGMASK as _, 8, (&raw const mask) as usize)
            .map(drop)
            .or_else(|e| self.named(e, "writing the signal mask of"))
    }

    /// Returns the thread's area for restartable sequences: address, bytes, signature.
    pub fn rseq(self) -> Result<(u64, u32, u32)> {
        let mut found: libc::ptrace_rseq_configuration = {
            // SAFETY: plain numbers, for which zero is a value.
            unsafe { std::mem::zeroed() }
        };
        let size = size_of_val(&found);
        self.ask(
            libc::PTRACE_GET_RSEQ_CONFIGURATION as _,
            size,
            (&raw mut found) as usize,
        )
        .or_else(|e| self.named(e, "reading the rseq area of"))?;
        Ok((found.rseq_abi_pointer, found.rseq_abi_size, found.signature))
    }

    /// Returns true if the thread gets its own system calls as signals.
    pub fn dispatches_calls(self) -> bool {
        /// `PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG` (Linux 6.4).
        const GET_DISPATCH: u32 = 0x4211;
        // Mode, selector, offset, length.
        let mut found = [0u64; 4];
        let size = size_of_val(&found);
        let asked = self.ask(GET_DISPATCH as _, size, found.as_mut_ptr() as usize);
        asked.is_ok() && found[0] != 0
    }

    /// Returns the signals pending for the thread, or with `shared` for its process, as `siginfo_t`.
    pub fn pending(self, shared: bool) -> Result<Vec<[u8; 128]>> {
        let mut found: Vec<[u8; 128]> = Vec::new();
        loop {
            let mut some = [[0u8; 128]; 8];
            let ask = libc::ptrace_peeksiginfo_args {
                off: found.len() as u64,
                flags: if shared {
                    libc::PTRACE_PEEKSIGINFO_SHARED
                } else {
                    0
                },
                nr: some.len() as i32,
            };
            // SAFETY: `ask` is readable, and `some` has space for as many `siginfo_t` of 128 bytes as `ask` requests.
            let count = unsafe {
                libc::ptrace(
                    libc::PTRACE_PEEKSIGINFO as _,
                    self.tid,
                    &raw const ask,
                    some.as_mut_ptr(),
                )
            };
            let count =
                check_long(count).or_else(|e| self.named(e, "reading pending signals of"))?;
            found.extend_from_slice(&some[..count as usize]);
            if (count as usize) < some.len() {
                return Ok(found);
            }
        }
    }

    /// Returns a seccomp filter of the thread, the newest at index 0; `None` beyond the last.
    pub fn filter(self, index: usize) -> io::Result<Option<Vec<[u8; 8]>>> {
        const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
        let mut code = vec![[0u8; 8]; 4096];
        match self.ask(
            PTRACE_SECCOMP_GET_FILTER as _,
            index,
            code.as_mut_ptr() as usize,
        ) {
            Ok(length) => {
                code.truncate(length as usize);
                Ok(Some(code))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn ask(self, request: libc::c_uint, address: usize, data: usize) -> io::Result<c_long> {
        // SAFETY: for each request, callers pass either plain numbers or the address of a value that is as large as
        // the kernel's and outlives the call; libc's wrapper writes through no pointer for the requests used here.
        check_long(unsafe { libc::ptrace(request, self.tid, address, data) })
    }

    fn named<T>(self, error: io::Error, doing: &str) -> Result<T> {
        match error.raw_os_error() {
            Some(libc::ESRCH) => Err(Error::Gone(self.tid)),
            _ => Err(error).context(|| format!("{doing} thread {}", self.tid)),
        }
    }
}

/// Waits for the next stop of a traced thread.
pub(crate) fn wait_for(tid: i32, limit: Duration) -> Result<Stop> {
    let mut patience = Patience::new(limit);
    loop {
        if let Some(stop) = look(tid)? {
            return Ok(stop);
        }
        if !patience.wait(tid) {
            return Err(Error::WouldNotStop(tid));
        }
    }
}

/// Returns the next stop of a traced thread, if there is one already.
pub(crate) fn look(tid: i32) -> Result<Option<Stop>> {
    loop {
        let mut status = 0;
        // SAFETY: `status` is writable and outlives the call.
        let found = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if found >= 0 {
            return Ok((found == tid).then(|| parse(status)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Err(Error::Gone(tid)),
            _ => return Err(error).context(|| format!("waiting for thread {tid}")),
        }
    }
}

fn parse(status: i32) -> Stop {
    if !libc::WIFSTOPPED(status) {
        return Stop::Ended(status);
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupt,
        EVENT_STOP => Stop::Group(signal),
        0 if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        0 => Stop::Signal(signal),
        event => Stop::Event(event),
    }
}
