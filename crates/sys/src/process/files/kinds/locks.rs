//! Taking locks on files at the acceptor.

use crate::process::files::error::{At, FilesError};
use crate::process::files::handover::LockChange;
use crate::process::files::image::Lock;
use std::io;
use std::os::fd::BorrowedFd;

/// Takes a lock without waiting. Record locks of a process must be taken from its own descriptor table.
pub fn take(fd: BorrowedFd<'_>, lock: &Lock) -> Result<(), FilesError> {
    let taken = LockChange::whole(lock).make(fd, lock.holder);
    let excluded = || io::Error::from_raw_os_error(libc::EAGAIN);
    taken
        .and_then(|taken| if taken { Ok(()) } else { Err(excluded()) })
        .at("a lock")
}
