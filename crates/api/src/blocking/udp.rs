//! UDP for multithreaded programs.

use std::fmt;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::wait_readable;
use crate::session::{Association, ManagedUdpSocket, Socket, UdpEvent, block_on};
use crate::{Destination, Kept, Moved, Session};

/// A bound UDP socket managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct UdpService {
    managed: ManagedUdpSocket,
}

impl Socket for UdpSocket {
    type Service = UdpService;

    fn serve(self, session: &Session, pool: &str) -> io::Result<UdpService> {
        let managed = ManagedUdpSocket::new(self, session, pool)?;
        Ok(UdpService { managed })
    }
}

impl fmt::Debug for UdpService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpService")
            .field("socket", self.managed.socket())
            .finish_non_exhaustive()
    }
}

impl UdpService {
    /// Returns the next event; `None` when `wait_max` has passed.
    ///
    /// # Errors
    /// Same as recvfrom(2).
    pub fn receive(&self, wait_max: Option<Duration>) -> io::Result<Option<UdpEvent>> {
        let deadline = wait_max.map(|wait_max| Instant::now() + wait_max);
        loop {
            match self.managed.receive() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other.map(Some),
            }
            let socket = self.managed.socket().as_fd();
            let notifier = self.managed.ready_events().notifier().as_fd();
            if let (false, false) = wait_readable(socket, notifier, deadline)? {
                return Ok(None);
            }
        }
    }

    /// Sends a datagram to a client.
    ///
    /// # Errors
    /// `NotConnected` for an association in transit or on another node; otherwise as sendto(2), `WouldBlock` when the
    /// socket's buffer is full.
    pub fn send(&self, association: &Association, data: &[u8]) -> io::Result<usize> {
        self.managed.check_may_send(association)?;
        self.managed.socket().send_to(data, association.remote())
    }

    /// Hands one association to another node, where the service's socket receives it with `state` (48 KiB at most) and
    /// with the datagrams that this program has not read. Waits for the result, however long the daemon is absent.
    ///
    /// # Errors
    /// [`Kept`] returns the association, usable as before.
    pub fn hand_off(
        &self,
        association: &Association,
        destination: impl Into<Destination>,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<Association>> {
        block_on(
            self.managed
                .hand_off(association, destination.into(), state),
        )
    }

    /// Forgets the associations that have been silent for at least `idle_min`; returns their number.
    pub fn forget_idle(&self, idle_min: Duration) -> usize {
        self.managed.forget_idle(idle_min)
    }
}
