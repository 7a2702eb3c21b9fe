//! General registers of a thread, and system calls interrupted by a stop.

use super::ProcessMemory;
use serde::{Deserialize, Serialize};

/// `struct user_regs_struct` of x86_64, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the architecture")]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

/// Value of `orig_rax` without a system call to restart.
pub(crate) const NO_CALL: u64 = u64::MAX;

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Number of code bytes, before the address at which a thread continues, that are searched for the number of its
/// system call.
const SEARCHED_BYTES: usize = 24;

/// Returns the last number of a waiting system call that this code loads: `mov $number, %eax`.
fn find_loaded_number(code: &[u8; SEARCHED_BYTES]) -> Option<u64> {
    const WAITING_CALLS: [i64; 4] = [
        libc::SYS_poll,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_futex,
    ];
    let numbers = code.windows(5).rev().filter(|window| window[0] == 0xb8);
    let mut numbers = numbers.map(|window| {
        i64::from(i32::from_le_bytes([
            window[1], window[2], window[3], window[4],
        ]))
    });
    numbers
        .find(|number| WAITING_CALLS.contains(number))
        .map(|number| number as u64)
}

/// Member of [`RESTART_RESULTS`] after which only the interrupting kernel knows the call's progress.
pub(crate) const RESTART_BLOCK: i64 = -516;
/// Values that the kernel leaves in `rax` for an interrupted call that it will restart (`linux/errno.h`, not visible
/// to programs).
const RESTART_RESULTS: [i64; 4] = [-512, -513, -514, RESTART_BLOCK];

/// System calls that a stop makes return `EINTR` without a signal, and that the kernel does not restart by itself:
/// waits of epoll, AIO and System V semaphores, `sigtimedwait`, sockets with a timeout, and `fallocate` of memory.
const EINTR_CALLS: [i64; 25] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
    libc::SYS_fallocate,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwritev2,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
];

impl Registers {
    /// Returns true if the thread is in an interrupted system call.
    #[must_use]
    pub fn is_in_call(&self) -> bool {
        (self.orig_rax as i64) >= 0
    }

    /// Returns true if the call returned `EINTR` only because of the stop.
    #[must_use]
    pub fn is_interrupted_by_stop(&self) -> bool {
        let call = self.orig_rax as i64;
        self.rax as i64 == -i64::from(libc::EINTR) && EINTR_CALLS.contains(&call)
    }

    /// Returns the registers set to repeat the interrupted call, for a kernel that has no record of the interruption.
    #[must_use]
    pub fn with_call_restarted(mut self) -> Self {
        if self.rax as i64 == RESTART_BLOCK {
            self.use_remaining_time();
        }
        if self.is_in_call()
            && (RESTART_RESULTS.contains(&(self.rax as i64)) || self.is_interrupted_by_stop())
        {
            return self.with_call_repeated();
        }
        self.orig_rax = NO_CALL;
        self
    }

    /// Returns the registers set to repeat the call, whatever it returned.
    #[must_use]
    pub(crate) fn with_call_repeated(self) -> Self {
        Self {
            rax: self.orig_rax,
            rip: self.rip.wrapping_sub(SYSCALL.len() as u64),
            orig_rax: NO_CALL,
            ..self
        }
    }

    /// Returns the registers as they were at the interruption, if the kernel has prepared to restart the call and the
    /// thread has not run since. In that state the thread is in front of the instruction and `rax` holds no result.
    /// If the kernel remembers the rest of a wait, the registers go back to the interrupted wait; any other call is
    /// simply about to be made.
    #[must_use]
    pub(crate) fn with_restart_undone(self, memory: &ProcessMemory) -> Self {
        let (call, next) = (self.orig_rax, self.rax);
        let is_restart_syscall = next as i64 == libc::SYS_restart_syscall;
        let mut code = [0; SYSCALL.len()];
        if !self.is_in_call()
            || !(next == call || is_restart_syscall)
            || memory.read(self.rip, &mut code).is_err()
        {
            return self;
        }
        match code == SYSCALL {
            false => self,
            true if is_restart_syscall => Self {
                rax: RESTART_BLOCK as u64,
                rip: self.rip + SYSCALL.len() as u64,
                ..self
            },
            true => Self {
                orig_rax: NO_CALL,
                ..self
            },
        }
    }

    /// Recovers the number of an interrupted call that the kernel has restarted once, and so replaced by
    /// `restart_syscall`. The number is the one that the program loads right before the instruction `syscall`, if the
    /// program does so.
    #[must_use]
    pub(crate) fn with_call_number_recovered(mut self, memory: &ProcessMemory) -> Self {
        let interrupted = self.rax as i64 == RESTART_BLOCK;
        if interrupted && self.orig_rax as i64 == libc::SYS_restart_syscall {
            self.orig_rax = self.loaded_call_number(memory).unwrap_or(self.orig_rax);
        }
        self
    }

    /// Returns the registers such that the call's number can be recovered after a later restart.
    #[must_use]
    pub(crate) fn with_call_number_recoverable(self, memory: &ProcessMemory) -> Self {
        let interrupted = self.rax as i64 == RESTART_BLOCK;
        let is_first_restart = self.orig_rax as i64 != libc::SYS_restart_syscall;
        if interrupted && is_first_restart && self.loaded_call_number(memory) != Some(self.orig_rax)
        {
            return self.with_call_restarted();
        }
        self
    }

    fn loaded_call_number(&self, memory: &ProcessMemory) -> Option<u64> {
        let mut code = [0; SEARCHED_BYTES];
        memory
            .read(self.rip.wrapping_sub(SEARCHED_BYTES as u64), &mut code)
            .ok()?;
        find_loaded_number(&code)
    }

    /// Continues an interrupted sleep with the remaining time, if the program asked the kernel to store that.
    fn use_remaining_time(&mut self) {
        match self.orig_rax as i64 {
            libc::SYS_nanosleep if self.rsi != 0 => self.rdi = self.rsi,
            libc::SYS_clock_nanosleep if self.r10 != 0 => self.rdx = self.r10,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_number_is_read_from_code() {
        let mut code = [0x90; SEARCHED_BYTES];
        code[SEARCHED_BYTES - 7..].copy_from_slice(&[0xb8, 230, 0, 0, 0, 0x0f, 0x05]);
        assert_eq!(find_loaded_number(&code), Some(230));
        code[SEARCHED_BYTES - 7] = 0x90;
        assert_eq!(find_loaded_number(&code), None);
    }

    #[test]
    fn sleep_continues_with_remaining_time() {
        let sleeping = Registers {
            rax: RESTART_BLOCK as u64,
            orig_rax: libc::SYS_clock_nanosleep as u64,
            rdx: 0x5000,
            r10: 0x6000,
            ..Registers::default()
        };
        assert_eq!(sleeping.with_call_restarted().rdx, 0x6000);
        let without_remainder = Registers { r10: 0, ..sleeping };
        assert_eq!(without_remainder.with_call_restarted().rdx, 0x5000);
    }

    #[test]
    fn calls_interrupted_by_stop_are_restarted() {
        let waiting = Registers {
            rax: -512i64 as u64,
            orig_rax: libc::SYS_read as u64,
            rip: 0x1002,
            ..Registers::default()
        };
        let again = waiting.with_call_restarted();
        assert_eq!((again.rip, again.rax, again.orig_rax), (0x1000, 0, NO_CALL));
        let done = Registers { rax: 5, ..waiting }.with_call_restarted();
        assert_eq!((done.rip, done.rax), (0x1002, 5));
        let computing = Registers {
            orig_rax: NO_CALL,
            ..waiting
        }
        .with_call_restarted();
        assert_eq!(computing.rip, 0x1002);
        let polled = Registers {
            rax: -4i64 as u64,
            orig_rax: libc::SYS_epoll_wait as u64,
            ..waiting
        };
        assert!(polled.is_interrupted_by_stop());
        assert_eq!(polled.with_call_restarted().rip, 0x1000);
    }

    #[test]
    fn call_about_to_restart_has_no_result() {
        let memory = ProcessMemory::open(std::process::id().cast_signed()).expect("own memory");
        let code = [SYSCALL, [0x90; 2]].concat();
        let at = code.as_ptr().addr() as u64;
        let write = Registers {
            rax: libc::SYS_write as u64,
            orig_rax: libc::SYS_write as u64,
            rip: at,
            ..Registers::default()
        };
        let undone = write.with_restart_undone(&memory);
        assert_eq!((undone.orig_rax, undone.rip), (NO_CALL, at));
        // After a call that has returned, `rax` is the number of bytes written.
        let returned = Registers {
            rip: at + 2,
            ..write
        };
        assert_eq!(returned.with_restart_undone(&memory), returned);
        let sleep = Registers {
            rax: libc::SYS_restart_syscall as u64,
            orig_rax: libc::SYS_nanosleep as u64,
            ..write
        };
        let interrupted = sleep.with_restart_undone(&memory);
        assert_eq!(interrupted.rax as i64, RESTART_BLOCK);
        assert_eq!(interrupted.rip, at + 2);
        let again = interrupted.with_call_restarted();
        assert_eq!((again.rax, again.rip), (libc::SYS_nanosleep as u64, at));
    }
}
