//! Locks on files, which are taken when the donor has given them up.

use crate::process::files::error::{At, FilesError};
use crate::process::files::image::{Lock, LockHolder};
use crate::process::files::raw;
use rustix::fs::{FlockOperation, flock};
use std::os::fd::BorrowedFd;

/// Takes a lock without waiting. Record locks of a process must be taken from its own descriptor table.
pub fn take(fd: BorrowedFd<'_>, lock: &Lock) -> Result<(), FilesError> {
    let of_open_file = match lock.holder {
        LockHolder::Flock => {
            let operation = if lock.write {
                FlockOperation::NonBlockingLockExclusive
            } else {
                FlockOperation::NonBlockingLockShared
            };
            return flock(fd, operation).at("flock");
        }
        LockHolder::OpenFile => true,
        LockHolder::Table(_) => false,
    };
    let start = lock.start as i64;
    // The last byte that can be: to the end of the file.
    let length = match lock.end {
        Some(end) if end < i64::MAX as u64 => end as i64 - start + 1,
        _ => 0,
    };
    raw::lock_range(fd, of_open_file, lock.write, start, length).at("a record lock")
}
