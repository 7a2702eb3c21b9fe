//! Access to another process's memory and descriptors.

use super::super::error::{Context, Error, Result, check_long};
use crate::files::FdStore;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Most ranges of one call (`IOV_MAX`).
const RANGES_MAX: usize = 1024;

/// Memory of a process that the caller may trace.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: i32,
    /// `/proc/PID/mem`, which also reaches pages that the process itself may not access.
    file: File,
}

impl ProcessMemory {
    pub fn open(pid: i32) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let file = File::options().read(true).write(true).open(&path);
        let file = match file {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Err(Error::ProcessEnded(pid));
            }
            other => other.context(|| path)?,
        };
        Ok(Self { pid, file })
    }

    /// Moves the handle to a high descriptor number, out of the way of the descriptors of a tree that is being
    /// restored.
    pub fn with_high_fd(self) -> Result<Self> {
        let file = File::from(FdStore::move_caller_fd_up(self.file.into())?);
        Ok(Self { file, ..self })
    }

    /// Reads exactly `bytes.len()` bytes.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let local = iovec(bytes.as_mut_ptr(), bytes.len());
        let remote = iovec(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, writable and alive; the other address is in the other process.
        let count = unsafe {
            libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if count == bytes.len() as isize {
            return Ok(());
        }
        self.file
            .read_exact_at(bytes, address)
            .map_err(|e| self.io_error(e, "reading", address))
    }

    /// Reads ranges (address, length) into `bytes` one after the other, in as few calls as possible. Returns false if
    /// not all of them can be read this way.
    pub fn read_ranges(&self, places: &[(u64, usize)], mut bytes: &mut [u8]) -> bool {
        places.chunks(RANGES_MAX).all(|chunk| {
            let Some((local_bytes, rest)) =
                std::mem::take(&mut bytes).split_at_mut_checked(total_length(chunk))
            else {
                return false;
            };
            bytes = rest;
            let (local, remote) = (
                iovec(local_bytes.as_mut_ptr(), local_bytes.len()),
                iovecs(chunk),
            );
            let count = remote.len() as libc::c_ulong;
            // SAFETY: `local` describes `local_bytes`, writable and alive; all addresses of `remote` are in the other
            // process.
            let read = unsafe {
                libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), count, 0)
            };
            read == local_bytes.len() as isize
        })
    }

    /// Writes `bytes` to ranges (address, length) one after the other, in as few calls as possible.
    pub fn write_ranges(&self, places: &[(u64, usize)], bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for chunk in places.chunks(RANGES_MAX) {
            let (local_bytes, after) = rest.split_at(total_length(chunk).min(rest.len()));
            rest = after;
            let (local, remote) = (
                iovec(local_bytes.as_ptr().cast_mut(), local_bytes.len()),
                iovecs(chunk),
            );
            let count = remote.len() as libc::c_ulong;
            // SAFETY: `local` describes `local_bytes`, readable and alive; all addresses of `remote` are in the other
            // process.
            let written = unsafe {
                libc::process_vm_writev(self.pid, &raw const local, 1, remote.as_ptr(), count, 0)
            };
            if written == local_bytes.len() as isize {
                continue;
            }
            let mut remaining = local_bytes;
            for (address, length) in chunk {
                let (piece, after) = remaining.split_at((*length).min(remaining.len()));
                remaining = after;
                self.write(*address, piece)?;
            }
        }
        Ok(())
    }

    /// Writes to memory, with the faster call where the process itself may write.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let local = iovec(bytes.as_ptr().cast_mut(), bytes.len());
        let remote = iovec(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, readable and alive; the other address is in the other process.
        let count = unsafe {
            libc::process_vm_writev(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if count == bytes.len() as isize {
            return Ok(());
        }
        self.write_protected(address, bytes)
    }

    /// Writes to memory, even where the process itself may not read.
    pub fn write_protected(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all_at(bytes, address)
            .map_err(|e| self.io_error(e, "writing", address))
    }

    fn io_error(&self, error: io::Error, doing: &str, address: u64) -> Error {
        if error.raw_os_error() == Some(libc::ESRCH) {
            return Error::ProcessEnded(self.pid);
        }
        let what = format!("{doing} memory of process {} at {address:#x}", self.pid);
        Error::Kernel {
            operation: what,
            source: error,
        }
    }
}

fn iovecs(places: &[(u64, usize)]) -> Vec<libc::iovec> {
    let part = |(address, length): &(u64, usize)| iovec(*address as *mut u8, *length);
    places.iter().map(part).collect()
}

fn total_length(places: &[(u64, usize)]) -> usize {
    let lengths = places.iter().map(|(_, length)| *length);
    lengths.fold(0, usize::saturating_add)
}

fn iovec(base: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast::<c_void>(),
        iov_len: length,
    }
}

/// Opens a descriptor that refers to a process.
pub(crate) fn pidfd_open(pid: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = check_long(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) });
    let fd = fd.context(|| format!("opening a pidfd of process {pid}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Duplicates a descriptor of another process into this one.
pub(crate) fn pidfd_getfd(process: BorrowedFd<'_>, number: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd =
        check_long(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) });
    let fd = fd.context(|| format!("copying descriptor {number}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_ranges_are_accessed_in_order() {
        let memory = ProcessMemory::open(std::process::id() as i32).unwrap();
        let mut content: Vec<u8> = (0..5000).map(|at| (at % 251) as u8).collect();
        // Every second byte, in more ranges than one call takes.
        let base = content.as_mut_ptr().addr() as u64;
        let places: Vec<(u64, usize)> = (0..2500).map(|at| (base + 2 * at, 1)).collect();
        let mut found = vec![0; places.len()];
        assert!(memory.read_ranges(&places, &mut found));
        let even = |bytes: &[u8]| -> Vec<u8> { bytes.iter().step_by(2).copied().collect() };
        assert_eq!(found, even(&content));
        let odd: Vec<u8> = content.iter().skip(1).step_by(2).copied().collect();
        memory
            .write_ranges(&places, &vec![255; places.len()])
            .unwrap();
        // Read through the kernel: the compiler has not seen the kernel's write.
        let mut content_after = vec![0; content.len()];
        memory.read(base, &mut content_after).unwrap();
        assert_eq!(even(&content_after), vec![255; places.len()]);
        let odd_after: Vec<u8> = content_after.iter().skip(1).step_by(2).copied().collect();
        assert_eq!(odd_after, odd);
        drop(content);
    }

    #[test]
    fn unmapped_range_is_reported() {
        let memory = ProcessMemory::open(std::process::id() as i32).unwrap();
        let content = [7_u8; 4];
        let places = [(content.as_ptr().addr() as u64, 4), (0, 4)];
        assert!(!memory.read_ranges(&places, &mut [0; 8]));
        // The buffer is smaller than the range.
        assert!(!memory.read_ranges(&places[..1], &mut [0; 3]));
    }
}
