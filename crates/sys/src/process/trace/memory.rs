//! Access to another process's memory and descriptors.

use super::super::error::{Context, Error, Result, check_long};
use crate::process::files::Stock;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Most ranges of one call (`IOV_MAX`).
const PLACES_MAX: usize = 1024;

/// Memory of a process that the caller may trace.
#[derive(Debug)]
pub(crate) struct Memory {
    pid: i32,
    /// `/proc/PID/mem`, which also reaches pages that the process itself may not access.
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

    /// Moves the handle to a high descriptor number, out of the way of the descriptors of a tree that is being
    /// restored.
    pub fn lift(self) -> Result<Self> {
        let file = File::from(Stock::lift_own(self.file.into())?);
        Ok(Self { file, ..self })
    }

    /// Reads exactly `bytes.len()` bytes.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let local = part(bytes.as_mut_ptr(), bytes.len());
        let remote = part(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, writable and alive; the other address is in the other process.
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

    /// Reads ranges (address, length) into `bytes` one after the other, in as few calls as possible. Returns false if
    /// not all of them can be read this way.
    pub fn read_places(&self, places: &[(u64, usize)], mut bytes: &mut [u8]) -> bool {
        places.chunks(PLACES_MAX).all(|some| {
            let Some((here, rest)) = std::mem::take(&mut bytes).split_at_mut_checked(sum(some))
            else {
                return false;
            };
            bytes = rest;
            let (local, remote) = (part(here.as_mut_ptr(), here.len()), parts(some));
            let count = remote.len() as libc::c_ulong;
            // SAFETY: `local` describes `here`, writable and alive; all addresses of `remote` are in the other
            // process.
            let read = unsafe {
                libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), count, 0)
            };
            read == here.len() as isize
        })
    }

    /// Writes `bytes` to ranges (address, length) one after the other, in as few calls as possible.
    pub fn write_places(&self, places: &[(u64, usize)], bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for some in places.chunks(PLACES_MAX) {
            let (here, after) = rest.split_at(sum(some).min(rest.len()));
            rest = after;
            let (local, remote) = (part(here.as_ptr().cast_mut(), here.len()), parts(some));
            let count = remote.len() as libc::c_ulong;
            // SAFETY: `local` describes `here`, readable and alive; all addresses of `remote` are in the other
            // process.
            let written = unsafe {
                libc::process_vm_writev(self.pid, &raw const local, 1, remote.as_ptr(), count, 0)
            };
            if written == here.len() as isize {
                continue;
            }
            let mut left = here;
            for (address, length) in some {
                let (one, after) = left.split_at((*length).min(left.len()));
                left = after;
                self.write(*address, one)?;
            }
        }
        Ok(())
    }

    /// Writes to memory, with the faster call where the process itself may write.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let local = part(bytes.as_ptr().cast_mut(), bytes.len());
        let remote = part(address as *mut u8, bytes.len());
        // SAFETY: `local` describes `bytes`, readable and alive; the other address is in the other process.
        let count = unsafe {
            libc::process_vm_writev(self.pid, &raw const local, 1, &raw const remote, 1, 0)
        };
        if count == bytes.len() as isize {
            return Ok(());
        }
        self.write_any(address, bytes)
    }

    /// Writes to memory, even where the process itself may not read.
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

fn parts(places: &[(u64, usize)]) -> Vec<libc::iovec> {
    let part = |(address, length): &(u64, usize)| part(*address as *mut u8, *length);
    places.iter().map(part).collect()
}

fn sum(places: &[(u64, usize)]) -> usize {
    let lengths = places.iter().map(|(_, length)| *length);
    lengths.fold(0, usize::saturating_add)
}

fn part(base: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast::<c_void>(),
        iov_len: length,
    }
}

/// Opens a descriptor that refers to a process.
pub(crate) fn pidfd_open(pid: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = check_long(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) });
    let fd = fd.context(|| format!("opening process {pid}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Duplicates a descriptor of another process into this one.
pub(crate) fn pidfd_getfd(process: BorrowedFd<'_>, number: i32) -> Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd =
        check_long(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) });
    let fd = fd.context(|| format!("fetching descriptor {number}"))?;
    // SAFETY: the call succeeded, so it is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_places_are_read_and_written_in_order() {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        let mut there: Vec<u8> = (0..5000).map(|at| (at % 251) as u8).collect();
        // Every second byte, in more ranges than one call takes.
        let base = there.as_mut_ptr().addr() as u64;
        let places: Vec<(u64, usize)> = (0..2500).map(|at| (base + 2 * at, 1)).collect();
        let mut found = vec![0; places.len()];
        assert!(memory.read_places(&places, &mut found));
        let even = |bytes: &[u8]| -> Vec<u8> { bytes.iter().step_by(2).copied().collect() };
        assert_eq!(found, even(&there));
        let odd: Vec<u8> = there.iter().skip(1).step_by(2).copied().collect();
        memory
            .write_places(&places, &vec![255; places.len()])
            .unwrap();
        // Read through the kernel: the compiler has not seen the kernel's write.
        let mut whole = vec![0; there.len()];
        memory.read(base, &mut whole).unwrap();
        assert_eq!(even(&whole), vec![255; places.len()]);
        let still: Vec<u8> = whole.iter().skip(1).step_by(2).copied().collect();
        assert_eq!(still, odd);
        drop(there);
    }

    #[test]
    fn a_place_that_is_not_there_is_noticed() {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        let there = [7_u8; 4];
        let places = [(there.as_ptr().addr() as u64, 4), (0, 4)];
        assert!(!memory.read_places(&places, &mut [0; 8]));
        // The buffer is smaller than the range.
        assert!(!memory.read_places(&places[..1], &mut [0; 3]));
    }
}
