//! Timer for another try of messages that the kernel had no buffer space for.
//!
//! A one-to-many socket becomes writable only when its associations together have buffer space, so one association that
//! stays full would prevent that event. A timer is used instead.

use holdfast_sys::sockopt::check;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// A descriptor that becomes readable when its time has come.
pub struct RetryTimer {
    fd: OwnedFd,
    is_set: bool,
}

impl AsFd for RetryTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl RetryTimer {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe {
            let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
            libc::timerfd_create(libc::CLOCK_MONOTONIC, flags)
        };
        check(fd)?;
        // SAFETY: the descriptor was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, is_set: false })
    }

    /// Starts the timer, unless it is running.
    pub fn start(&mut self, pause: Duration) -> io::Result<()> {
        if self.is_set {
            return Ok(());
        }
        self.is_set = true;
        self.set(pause)
    }

    /// Disarms the retry timer, so that its descriptor is not readable.
    pub fn stop(&mut self) -> io::Result<()> {
        self.is_set = false;
        self.set(Duration::ZERO)
    }

    fn set(&self, pause: Duration) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid `itimerspec`.
        let mut time: libc::itimerspec = unsafe { std::mem::zeroed() };
        time.it_value.tv_sec = pause.as_secs() as libc::time_t;
        time.it_value.tv_nsec = pause.subsec_nanos().into();
        let (fd, old_value) = (self.fd.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: the structure outlives the call, and nothing is written.
        check(unsafe { libc::timerfd_settime(fd, 0, &raw const time, old_value) })
    }
}
