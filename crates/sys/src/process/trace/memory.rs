//! Memory of another process, and its descriptors.

use super::super::error::{Context, Error, Result, check_long};
use crate::process::files::Stock;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Memory of a process that the caller may trace.
#[derive(Debug)]
pub(crate) struct Memory {
    pid: i32,
    /// `/proc/PID/mem`: reaches pages that the process itself may not touch.
    file: File,
}

impl Memory {
    pub fn open(pid: i32) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let file = File::options().read(true).write(true).open(&path);
        let file = match file {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Err(Error::Gone(pid));
            }
            other => other.context(|| path)?,
        };
        Ok(Self { pid, file })
    }

    /// Moves the handle out of the way of the descriptors of a tree that is being restored.
    pub fn lift(self) -> Result<Self> {
        let file = File::from(Stock::lift_own(self.file.into())?);
        Ok(Self { file, ..self })
    }

    /// Reads exactly as many bytes as `bytes` has.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let local = part(bytes.as_mut_ptr(), bytes.len());
        let remote = part(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, writable and alive; the other address is the other process's.
        let count = unsafe {
            libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if count == bytes.len() as isize {
            return Ok(());
        }
        self.file
            .read_exact_at(bytes, address)
            .map_err(|e| self.named(e, "reading", address))
    }

    /// Writes where the process may write itself.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let local = part(bytes.as_ptr().cast_mut(), bytes.len());
        let remote = part(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, readable and alive; the other address is the other process's.
        let count = unsafe {
            libc::process_vm_writev(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if count == bytes.len() as isize {
            return Ok(());
        }
        self.write_any(address, bytes)
    }

    /// Writes where the process may not even read.
    pub fn write_any(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all_at(bytes, address)
            .map_err(|e| self.named(e, "writing", address))
    }

    fn named(&self, error: io::Error, doing: &str, address: u64) -> Error {
        if error.raw_os_error() == Some(libc::ESRCH) {
            return Error::Gone(self.pid);
        }
        let what = format!("{doing} memory of process {} at {address:#x}", self.pid);
        Error::Kernel {
            what,
            source: error,
        }
    }
}

fn part(base: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast::<c_void>(),
        iov_len: length,
    }
}

/// A descriptor that stands for a process.
pub(crate) fn pidfd_open(pid: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = check_long(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) });
    let fd = fd.context(|| format!("opening process {pid}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A copy of a descriptor of another process.
pub(crate) fn pidfd_getfd(process: BorrowedFd<'_>, number: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd =
        check_long(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) });
    let fd = fd.context(|| format!("fetching descriptor {number}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
