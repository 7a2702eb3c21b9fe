//! Taking locks on files at the acceptor.

use crate::files::error::{FilesError, StepContext};
use crate::files::image::FileLock;
use crate::files::lock_handover::LockChange;
use std::io;
use std::os::fd::BorrowedFd;

/// Takes a lock without waiting. Record locks of a process must be taken from its own descriptor table.
pub fn take(fd: BorrowedFd<'_>, lock: &FileLock) -> Result<(), FilesError> {
    let outcome = LockChange::for_whole_range(lock).apply(fd, lock.holder);
    let conflict = || io::Error::from_raw_os_error(libc::EAGAIN);
    outcome
        .and_then(|taken| if taken { Ok(()) } else { Err(conflict()) })
        .with_step("setting a lock")
}
