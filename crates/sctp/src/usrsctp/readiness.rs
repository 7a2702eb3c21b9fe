//! Readiness of the stack's descriptors.

use holdfast_sys::sockopt::check;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most descriptors reported in one turn: two raw, two UDP, the timer, and the wake-up.
const READY_MAX: usize = 8;

/// An epoll instance over the stack's descriptors and an endpoint's wake-up.
pub struct StackPoller {
    epoll: OwnedFd,
    wake: RawFd,
}

impl StackPoller {
    /// Watches `fds` and `wake`, which the caller keeps open.
    pub fn new(fds: impl Iterator<Item = RawFd>, wake: RawFd) -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        check(epoll)?;
        // SAFETY: the descriptor was just opened and belongs to nobody else.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        for fd in fds.chain([wake]) {
            let mut interest = libc::epoll_event {
                events: libc::EPOLLIN as u32,
                u64: fd as u64,
            };
            let (epoll, add) = (epoll.as_raw_fd(), libc::EPOLL_CTL_ADD);
            // SAFETY: the event outlives the call.
            check(unsafe { libc::epoll_ctl(epoll, add, fd, &raw mut interest) })?;
        }
        Ok(Self { epoll, wake })
    }

    /// Returns a descriptor that is readable when any of the watched ones is.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Returns the stack's readable descriptors; clears a wake-up.
    pub fn ready_fds(&self) -> impl Iterator<Item = RawFd> + use<> {
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; READY_MAX];
        // SAFETY: the array is writable for its length.
        let count = unsafe {
            let max = READY_MAX as i32;
            libc::epoll_wait(self.epoll.as_raw_fd(), ready.as_mut_ptr(), max, 0)
        };
        let wake = self.wake;
        let ready = ready
            .into_iter()
            .take(usize::try_from(count).unwrap_or(0))
            .map(|event| event.u64 as RawFd);
        ready.filter(move |&fd| {
            if fd == wake {
                drain(fd);
            }
            fd != wake
        })
    }
}

/// Makes an event descriptor.
pub fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    check(fd)?;
    // SAFETY: the descriptor was just opened and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a timer descriptor that becomes readable every `tick_ms` milliseconds.
pub fn periodic_timer_fd(tick_ms: u32) -> io::Result<OwnedFd> {
    let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
    check(fd)?;
    // SAFETY: the descriptor was just opened and belongs to nobody else.
    let timer = unsafe { OwnedFd::from_raw_fd(fd) };
    let tick = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(tick_ms) * 1_000_000,
    };
    let setting = libc::itimerspec {
        it_interval: tick,
        it_value: tick,
    };
    // SAFETY: the specification outlives the call; the old one is not asked for.
    check(unsafe {
        libc::timerfd_settime(
            timer.as_raw_fd(),
            0,
            &raw const setting,
            std::ptr::null_mut(),
        )
    })?;
    Ok(timer)
}

/// Makes an event descriptor readable.
pub fn signal(event: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer is readable for its length. If the counter is full, the descriptor is readable already.
    unsafe { libc::write(event, one.as_ptr().cast(), one.len()) };
}

/// Reads and discards the eight bytes of an event or timer descriptor.
pub fn drain(fd: RawFd) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer is writable for its length.
    unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
}
