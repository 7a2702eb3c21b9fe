//! A single thread under ptrace.

use super::super::error::{Context, Error, Result, check_long};
use super::{Registers, StopWait};
use std::ffi::{c_long, c_void};
use std::io;
use std::time::Duration;

/// Time limit for a thread to stop.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Most bytes of extended registers (AVX-512, AMX, and reserve for later extensions).
const XSTATE_MAX: usize = 16384;
const NT_X86_XSTATE: usize = 0x202;
/// `PTRACE_EVENT_STOP` in the upper half of a wait status.
const PTRACE_EVENT_STOP: i32 = 128;

/// Reason for the stop of a traced thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// `PTRACE_INTERRUPT`, or the first stop of a new thread.
    Interrupt,
    /// Group stop of the process by this job control signal.
    Group(i32),
    /// Signal about to be delivered.
    Signal(i32),
    /// `PTRACE_EVENT_*`.
    Event(i32),
    /// Entry or exit of a system call.
    SystemCall,
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
        match tracee.ptrace(libc::PTRACE_SEIZE, 0, options as usize) {
            Ok(_) => Ok(tracee),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                Err(Error::ProcessEnded(tid))
            }
            Err(error) => Err(error).context(|| format!("attaching to thread {tid}")),
        }
    }

    /// Asks the thread to stop, without waiting.
    pub fn interrupt(self) -> Result<()> {
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0)
            .map(drop)
            .or_else(|e| self.thread_error(e, "interrupting"))
    }

    /// Waits until the thread stops by the interrupt or with its process. Signals that arrive before are delivered.
    pub fn wait_stopped(self) -> Result<StopReason> {
        loop {
            match wait_for_stop(self.tid, STOP_LIMIT)? {
                StopReason::Interrupt => return Ok(StopReason::Interrupt),
                StopReason::Group(signal) => return Ok(StopReason::Group(signal)),
                StopReason::Ended(_) => return Err(Error::ProcessEnded(self.tid)),
                StopReason::Signal(signal) => self.resume(signal)?,
                StopReason::Event(_) | StopReason::SystemCall => self.resume(0)?,
            }
        }
    }

    /// Resumes the thread, with a signal unless that is 0.
    pub fn resume(self, signal: i32) -> Result<()> {
        self.ptrace(libc::PTRACE_CONT, 0, signal as usize)
            .map(drop)
            .or_else(|e| self.thread_error(e, "resuming"))
    }

    /// Resumes the thread until the next entry or exit of a system call.
    pub fn resume_to_syscall(self) -> Result<()> {
        self.ptrace(libc::PTRACE_SYSCALL, 0, 0)
            .map(drop)
            .or_else(|e| self.thread_error(e, "resuming"))
    }

    /// Sends the thread a signal, which stays pending until the thread runs.
    pub fn send_signal(self, signal: i32) {
        // SAFETY: no pointers are passed. A thread that has ended needs no signal.
        unsafe { libc::syscall(libc::SYS_tkill, self.tid, signal) };
    }

    /// Executes one instruction of the thread.
    pub fn step(self) -> Result<()> {
        self.ptrace(libc::PTRACE_SINGLESTEP, 0, 0)
            .map(drop)
            .or_else(|e| self.thread_error(e, "stepping"))
    }

    /// Detaches from the thread.
    pub fn detach(self) -> Result<()> {
        self.ptrace(libc::PTRACE_DETACH, 0, 0)
            .map(drop)
            .or_else(|e| self.thread_error(e, "detaching from"))
    }

    /// Sets the ptrace options.
    pub fn set_options(self, options: i32) -> Result<()> {
        self.ptrace(libc::PTRACE_SETOPTIONS, 0, options as usize)
            .map(drop)
            .or_else(|e| self.thread_error(e, "setting options of"))
    }

    pub fn registers(self) -> Result<Registers> {
        let mut registers = Registers::default();
        self.ptrace(libc::PTRACE_GETREGS, 0, (&raw mut registers) as usize)
            .or_else(|e| self.thread_error(e, "reading registers of"))?;
        Ok(registers)
    }

    pub fn set_registers(self, registers: &Registers) -> Result<()> {
        self.ptrace(
            libc::PTRACE_SETREGS,
            0,
            std::ptr::from_ref(registers) as usize,
        )
        .map(drop)
        .or_else(|e| self.thread_error(e, "writing registers of"))
    }

    /// Returns floating point and vector registers, in the standard format of XSAVE.
    pub fn extended_registers(self) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; XSTATE_MAX];
        let mut part = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast::<c_void>(),
            iov_len: bytes.len(),
        };
        self.ptrace(
            libc::PTRACE_GETREGSET as _,
            NT_X86_XSTATE,
            (&raw mut part) as usize,
        )
        .or_else(|e| self.thread_error(e, "reading vector registers of"))?;
        bytes.truncate(part.iov_len);
        Ok(bytes)
    }

    pub fn set_extended_registers(self, bytes: &[u8]) -> Result<()> {
        let mut part = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: bytes.len(),
        };
        self.ptrace(
            libc::PTRACE_SETREGSET as _,
            NT_X86_XSTATE,
            (&raw mut part) as usize,
        )
        .map(drop)
        .or_else(|e| self.thread_error(e, "writing vector registers of"))
    }

    /// Returns the blocked signals, bit 0 for signal 1.
    pub fn signal_mask(self) -> Result<u64> {
        let mut mask = 0u64;
        self.ptrace(libc::PTRACE_GETSIGMASK as _, 8, (&raw mut mask) as usize)
            .or_else(|e| self.thread_error(e, "reading the signal mask of"))?;
        Ok(mask)
    }

    pub fn set_signal_mask(self, mask: u64) -> Result<()> {
        self.ptrace(libc::PTRACE_SETSIGMASK as _, 8, (&raw const mask) as usize)
            .map(drop)
            .or_else(|e| self.thread_error(e, "writing the signal mask of"))
    }

    /// Returns the thread's area for restartable sequences: address, bytes, signature.
    pub fn rseq_area(self) -> Result<(u64, u32, u32)> {
        let mut found: libc::ptrace_rseq_configuration = {
            // SAFETY: plain numbers, for which zero is a value.
            unsafe { std::mem::zeroed() }
        };
        let size = size_of_val(&found);
        self.ptrace(
            libc::PTRACE_GET_RSEQ_CONFIGURATION as _,
            size,
            (&raw mut found) as usize,
        )
        .or_else(|e| self.thread_error(e, "reading the rseq area of"))?;
        Ok((found.rseq_abi_pointer, found.rseq_abi_size, found.signature))
    }

    /// Returns true if the thread gets its own system calls as signals.
    pub fn has_syscall_dispatch(self) -> bool {
        /// `PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG` (Linux 6.4).
        const GET_DISPATCH: u32 = 0x4211;
        // Mode, selector, offset, length.
        let mut found = [0u64; 4];
        let size = size_of_val(&found);
        let asked = self.ptrace(GET_DISPATCH as _, size, found.as_mut_ptr() as usize);
        asked.is_ok() && found[0] != 0
    }

    /// Returns the signals pending for the thread, or with `shared` for its process, as `siginfo_t`.
    pub fn pending_signals(self, shared: bool) -> Result<Vec<[u8; 128]>> {
        let mut found: Vec<[u8; 128]> = Vec::new();
        loop {
            let mut chunk = [[0u8; 128]; 8];
            let arguments = libc::ptrace_peeksiginfo_args {
                off: found.len() as u64,
                flags: if shared {
                    libc::PTRACE_PEEKSIGINFO_SHARED
                } else {
                    0
                },
                nr: chunk.len() as i32,
            };
            // SAFETY: `arguments` is readable, and `chunk` has space for as many `siginfo_t` of 128 bytes as `arguments` requests.
            let count = unsafe {
                libc::ptrace(
                    libc::PTRACE_PEEKSIGINFO as _,
                    self.tid,
                    &raw const arguments,
                    chunk.as_mut_ptr(),
                )
            };
            let count = check_long(count)
                .or_else(|e| self.thread_error(e, "reading pending signals of"))?;
            found.extend_from_slice(&chunk[..count as usize]);
            if (count as usize) < chunk.len() {
                return Ok(found);
            }
        }
    }

    /// Returns a seccomp filter of the thread, the newest at index 0; `None` beyond the last.
    pub fn seccomp_filter(self, index: usize) -> io::Result<Option<Vec<[u8; 8]>>> {
        const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
        let mut code = vec![[0u8; 8]; 4096];
        match self.ptrace(
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

    fn ptrace(self, request: libc::c_uint, address: usize, data: usize) -> io::Result<c_long> {
        // SAFETY: for each request, callers pass either plain numbers or the address of a value that is as large as
        // the kernel's and outlives the call; libc's wrapper writes through no pointer for the requests used here.
        check_long(unsafe { libc::ptrace(request, self.tid, address, data) })
    }

    fn thread_error<T>(self, error: io::Error, doing: &str) -> Result<T> {
        match error.raw_os_error() {
            Some(libc::ESRCH) => Err(Error::ProcessEnded(self.tid)),
            _ => Err(error).context(|| format!("{doing} thread {}", self.tid)),
        }
    }
}

/// Waits for the next stop of a traced thread.
pub(crate) fn wait_for_stop(tid: i32, limit: Duration) -> Result<StopReason> {
    let mut stop_wait = StopWait::new(limit);
    loop {
        if let Some(stop) = poll_stop(tid)? {
            return Ok(stop);
        }
        if !stop_wait.wait_briefly(tid) {
            return Err(Error::StopTimeout(tid));
        }
    }
}

/// Returns the next stop of a traced thread, if there is one already.
pub(crate) fn poll_stop(tid: i32) -> Result<Option<StopReason>> {
    loop {
        let mut status = 0;
        // SAFETY: `status` is writable and outlives the call.
        let found = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
        if found >= 0 {
            return Ok((found == tid).then(|| parse_status(status)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Err(Error::ProcessEnded(tid)),
            _ => return Err(error).context(|| format!("waiting for thread {tid}")),
        }
    }
}

fn parse_status(status: i32) -> StopReason {
    if !libc::WIFSTOPPED(status) {
        return StopReason::Ended(status);
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        PTRACE_EVENT_STOP if signal == libc::SIGTRAP => StopReason::Interrupt,
        PTRACE_EVENT_STOP => StopReason::Group(signal),
        0 if signal == libc::SIGTRAP | 0x80 => StopReason::SystemCall,
        0 => StopReason::Signal(signal),
        event => StopReason::Event(event),
    }
}
