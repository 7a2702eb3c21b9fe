//! Waiting for a registrar's descriptors.

use std::io;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::event_loop::Daemon;

/// Descriptors that are ready.
pub(super) struct Ready {
    pub(super) asap: bool,
    pub(super) enrp: bool,
    pub(super) wake: bool,
    pub(super) groups: bool,
}

/// Poll set for the maximum of five descriptors, without an allocation.
type Fds<'a> = smallvec::SmallVec<[PollFd<'a>; 5]>;

impl Daemon {
    /// Waits for the first event or deadline.
    pub(super) fn wait(&self) -> io::Result<Ready> {
        let now = self.now();
        let times = [self.machine.poll_timeout(), self.backlog.next(now)];
        let until = times.into_iter().flatten().min();
        let until = until.map_or(self.next_round_trips, |at| at.min(self.next_round_trips));
        let mut fds = self.beside();
        fds.push(PollFd::new(self.enrp.fd(), PollFlags::POLLIN));
        // Each request may cause an update, for which the peers have no room.
        fds.push(match self.backlog.is_long() {
            true => PollFd::new(self.asap.fd(), PollFlags::empty()),
            false => PollFd::new(self.asap.fd(), PollFlags::POLLIN),
        });
        poll(&mut fds, until.saturating_sub(now))?;
        let asap = fds.pop().is_some_and(|fd| is_ready(&fd));
        let enrp = fds.pop().is_some_and(|fd| is_ready(&fd));
        Ok(Ready {
            asap,
            enrp,
            ..Ready::beside(&fds)
        })
    }

    /// Collects requests for `pause`, unless an operator sends one. The endpoints are not polled, so that the first
    /// request causes no wake-up.
    pub(super) fn pause(&self, pause: Duration) -> io::Result<Ready> {
        let mut fds = self.beside();
        poll(&mut fds, pause)?;
        Ok(Ready {
            asap: !self.backlog.is_long(),
            enrp: true,
            ..Ready::beside(&fds)
        })
    }

    /// Returns the poll set without the two endpoints.
    fn beside(&self) -> Fds<'_> {
        let fds = std::iter::once(self.requests.fd()).chain(self.groups.fds());
        fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect()
    }
}

impl Ready {
    fn beside(fds: &[PollFd<'_>]) -> Ready {
        let ready = fds.split_first();
        Ready {
            asap: false,
            enrp: false,
            wake: ready.is_some_and(|(wake, _)| is_ready(wake)),
            groups: ready.is_some_and(|(_, groups)| groups.iter().any(is_ready)),
        }
    }
}

fn is_ready(fd: &PollFd<'_>) -> bool {
    fd.any() == Some(true)
}

fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    match ppoll(fds, Some(TimeSpec::from(timeout)), None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
