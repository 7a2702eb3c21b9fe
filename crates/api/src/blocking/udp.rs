//! UDP for multithreaded programs.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wait_readable;
use crate::session::{
    Association, ServiceSlot, SessionHandle, Socket, UdpEvent, UdpServiceState, block_on,
};
use crate::{Destination, Kept, Moved, Protocol, Session};

/// A bound UDP socket managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct UdpService {
    table: Arc<UdpServiceState>,
    handle: Arc<SessionHandle>,
}

impl Socket for UdpSocket {
    type Service = UdpService;

    fn serve(self, session: &Session, pool: &str) -> io::Result<UdpService> {
        let local = self.local_addr()?;
        let table = UdpServiceState::new(self)?;
        let handle = Arc::clone(&session.handle);
        let slot = ServiceSlot::Udp(Arc::downgrade(&table));
        table.set_service(handle.shared.serve(pool, Protocol::Udp, vec![local], slot));
        Ok(UdpService { table, handle })
    }
}

impl fmt::Debug for UdpService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpService")
            .field("socket", self.table.socket())
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
            match self.table.receive(&self.handle.shared) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other.map(Some),
            }
            let notifier = self.table.ready_events().notifier().as_fd();
            if let (false, false) = wait_readable(self.table.socket().as_fd(), notifier, deadline)?
            {
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
        if !self.table.may_send(association) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.table.socket().send_to(data, association.remote())
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
        association.notifications().clear_request();
        let started =
            self.table
                .start_handoff(&self.handle.shared, association, &destination.into(), state);
        let outcome = started.and_then(|()| {
            let outcome = poll_fn(|context| association.notifications().poll_outcome(context));
            block_on(outcome, None).unwrap_or_else(|| Err("no outcome".into()))
        });
        match outcome {
            Ok(to) => Ok(Moved { to }),
            Err(reason) => Err(Kept {
                connection: association.clone(),
                reason,
            }),
        }
    }

    /// Forgets the associations that have been silent for at least `idle_min`; returns their number.
    pub fn forget_idle(&self, idle_min: Duration) -> usize {
        self.table
            .forget(&self.handle.shared, |_, idle| idle >= idle_min)
    }
}

impl Drop for UdpService {
    fn drop(&mut self) {
        self.handle.shared.withdraw(self.table.service());
        self.table.forget(&self.handle.shared, |_, _| true);
    }
}
