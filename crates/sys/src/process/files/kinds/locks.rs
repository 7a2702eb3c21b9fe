//! Taking locks on files at the acceptor.

use crate::process::files::error::{FilesError, StepContext};
use crate::process::files::image::Lock;
use crate::process::files::lock_handover::LockChange;
use std::io;
use std::os::fd::BorrowedFd;

/// Takes a lock without waiting. Record locks of a process must be taken from its own descriptor table.
pub fn take(fd: BorrowedFd<'_>, lock: &Lock) -> Result<(), FilesError> {
    let outcome = LockChange::restore(lock).apply(fd, lock.holder);
    let conflict = || io::Error::from_raw_os_error(libc::EAGAIN);
    outcome
        .and_then(|taken| if taken { Ok(()) } else { Err(conflict()) })
        .with_step("setting a lock")
}
