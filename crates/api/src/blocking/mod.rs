//! The library for multithreaded programs: the same interface as in the crate's root, over std's sockets.

mod tcp;
mod udp;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use tcp::{Service, TcpConnection, WaitResult};
pub use udp::UdpService;

/// Waits until one of two descriptors is readable or `deadline` is reached; returns which are readable.
fn wait_readable(
    first: BorrowedFd<'_>,
    second: BorrowedFd<'_>,
    deadline: Option<Instant>,
) -> io::Result<(bool, bool)> {
    loop {
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = remaining.map(timespec);
        let mut poll_fds = [
            PollFd::from_borrowed_fd(first, PollFlags::IN),
            PollFd::from_borrowed_fd(second, PollFlags::IN),
        ];
        match poll(&mut poll_fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        return Ok((
            !poll_fds[0].revents().is_empty(),
            !poll_fds[1].revents().is_empty(),
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
