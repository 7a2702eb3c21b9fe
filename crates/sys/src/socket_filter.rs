//! Packet filters of sockets (`SO_ATTACH_FILTER`): classic BPF, read from one socket and attached to another.

use crate::sockopt::{check, get_bytes, get_int, set_bytes, set_int};
use libc::SOL_SOCKET;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Length of the longest filter, in instructions (`BPF_MAXINSNS`).
pub const INSTRUCTIONS_MAX: usize = 4096;

/// An instruction of classic BPF (`struct sock_filter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterInstruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jump_true: u8,
    /// Instructions to skip if the comparison does not hold.
    pub jump_false: u8,
    /// Operand.
    pub operand: u32,
}

/// The filter of a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFilter {
    /// The filter's program; empty for a socket without a filter.
    pub program: Vec<FilterInstruction>,
    /// True if the filter can be neither replaced nor detached (`SO_LOCK_FILTER`).
    pub locked: bool,
}

/// Reason for a failure to read a filter.
#[derive(Debug)]
pub enum FilterError {
    /// The filter is an eBPF program (`SO_ATTACH_BPF`), which the kernel does not export.
    Ebpf,
    /// The kernel refused.
    Kernel(io::Error),
}

impl SocketFilter {
    /// Reads the filter of a socket without changing the socket.
    ///
    /// # Errors
    /// [`FilterError::Ebpf`], or the kernel's error.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Self, FilterError> {
        // For an empty buffer the kernel returns the number of instructions, or EACCES for an eBPF program.
        let length = match get_bytes(fd, SOL_SOCKET, libc::SO_GET_FILTER, &mut []) {
            Ok(length) => length,
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
                return Err(FilterError::Ebpf);
            }
            Err(error) => return Err(FilterError::Kernel(error)),
        };
        let program = match length {
            0 => Vec::new(),
            _ => read_program(fd).map_err(FilterError::Kernel)?,
        };
        let locked = get_int(fd, SOL_SOCKET, libc::SO_LOCK_FILTER).map_err(FilterError::Kernel)?;
        Ok(Self {
            program,
            locked: locked != 0,
        })
    }

    /// Returns true if there is neither a filter nor a lock.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        self.program.is_empty() && !self.locked
    }

    /// Attaches the filter to a socket without one.
    ///
    /// # Errors
    /// The kernel's error; `EINVAL` for an invalid program.
    pub fn attach(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if !self.program.is_empty() {
            let raw = |one: &FilterInstruction| libc::sock_filter {
                code: one.code,
                jt: one.jump_true,
                jf: one.jump_false,
                k: one.operand,
            };
            let raw: Vec<libc::sock_filter> = self.program.iter().map(raw).collect();
            let program = libc::sock_fprog {
                len: u16::try_from(raw.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
                filter: raw.as_ptr().cast_mut(),
            };
            // SAFETY: `program` is plain data of that size, which outlives the slice, as do the instructions that it
            // points to.
            let bytes = unsafe {
                std::slice::from_raw_parts((&raw const program).cast::<u8>(), size_of_val(&program))
            };
            set_bytes(fd, SOL_SOCKET, libc::SO_ATTACH_FILTER, bytes)?;
        }
        match self.locked {
            true => set_int(fd, SOL_SOCKET, libc::SO_LOCK_FILTER, 1),
            false => Ok(()),
        }
    }
}

/// Reads the program. Lengths of this option are counted in instructions, not bytes.
fn read_program(fd: BorrowedFd<'_>) -> io::Result<Vec<FilterInstruction>> {
    const EMPTY_INSTRUCTION: libc::sock_filter = libc::sock_filter {
        code: 0,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let mut raw = vec![EMPTY_INSTRUCTION; INSTRUCTIONS_MAX];
    let mut length = INSTRUCTIONS_MAX as libc::socklen_t;
    // SAFETY: `raw` is writable for `length` instructions, the most that a filter has; both outlive the call.
    let outcome = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            SOL_SOCKET,
            libc::SO_GET_FILTER,
            raw.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    check(outcome)?;
    let instructions = raw
        .iter()
        .take(length as usize)
        .map(|one| FilterInstruction {
            code: one.code,
            jump_true: one.jt,
            jump_false: one.jf,
            operand: one.k,
        });
    Ok(instructions.collect())
}
