//! The library for multithreaded programs: the same interface as in the crate's root, over std's sockets.

mod tcp;
mod udp;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use tcp::{Connection, Ready, Service};
pub use udp::UdpService;

/// Waits until one of two descriptors is readable or `deadline` is reached; returns which are readable.
fn wait_readable(
    one: BorrowedFd<'_>,
    other: BorrowedFd<'_>,
    deadline: Option<Instant>,
) -> io::Result<(bool, bool)> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(timespec);
        let mut polled = [
            PollFd::from_borrowed_fd(one, PollFlags::IN),
            PollFd::from_borrowed_fd(other, PollFlags::IN),
        ];
        match poll(&mut polled, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        return Ok((
            !polled[0].revents().is_empty(),
            !polled[1].revents().is_empty(),
        ));
    }
}

fn timespec(duration: Duration) -> Timespec {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
