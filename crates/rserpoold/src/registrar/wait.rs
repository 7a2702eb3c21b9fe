//! Waiting for a registrar's descriptors.

use std::io;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::event_loop::RegistrarEventLoop;

/// Descriptors of the registrar's event loop that are ready.
pub(super) struct ReadyDescriptors {
    pub(super) asap: bool,
    pub(super) enrp: bool,
    pub(super) wake: bool,
    pub(super) groups: bool,
}

/// Poll set for the maximum of five descriptors, without an allocation.
type Fds<'a> = smallvec::SmallVec<[PollFd<'a>; 5]>;

impl RegistrarEventLoop {
    /// Waits for the first event or deadline.
    pub(super) fn wait(&self) -> io::Result<ReadyDescriptors> {
        let now = self.now();
        let times = [self.machine.poll_timeout(), self.backlog.next_send(now)];
        let until = times.into_iter().flatten().min();
        let until = until.map_or(self.next_round_trip_check, |at| {
            at.min(self.next_round_trip_check)
        });
        let mut fds = self.other_fds();
        fds.push(PollFd::new(self.enrp.fd(), PollFlags::POLLIN));
        // Each request may cause an update, for which the peers have no room.
        fds.push(match self.backlog.is_long() {
            true => PollFd::new(self.asap.fd(), PollFlags::empty()),
            false => PollFd::new(self.asap.fd(), PollFlags::POLLIN),
        });
        poll(&mut fds, until.saturating_sub(now))?;
        let asap = fds.pop().is_some_and(|fd| is_ready(&fd));
        let enrp = fds.pop().is_some_and(|fd| is_ready(&fd));
        Ok(ReadyDescriptors {
            asap,
            enrp,
            ..ReadyDescriptors::from_other_fds(&fds)
        })
    }

    /// Collects requests for `collect_requests`, unless an operator sends one. The endpoints are not polled, so that the first
    /// request causes no wake-up.
    pub(super) fn collect_requests(&self, batch_delay: Duration) -> io::Result<ReadyDescriptors> {
        let mut fds = self.other_fds();
        poll(&mut fds, batch_delay)?;
        Ok(ReadyDescriptors {
            asap: !self.backlog.is_long(),
            enrp: true,
            ..ReadyDescriptors::from_other_fds(&fds)
        })
    }

    /// Returns the poll set without the two endpoints.
    fn other_fds(&self) -> Fds<'_> {
        let fds = std::iter::once(self.requests.fd()).chain(self.groups.fds());
        fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect()
    }
}

impl ReadyDescriptors {
    fn from_other_fds(fds: &[PollFd<'_>]) -> ReadyDescriptors {
        let ready = fds.split_first();
        ReadyDescriptors {
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
