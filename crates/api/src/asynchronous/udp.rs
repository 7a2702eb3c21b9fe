//! UDP over tokio.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::session::{Association, ManagedUdpSocket, Socket, UdpEvent};
use crate::{Destination, Kept, Moved, Session};

/// A bound UDP socket managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct UdpService {
    managed: ManagedUdpSocket,
    /// Reports readiness to read and write; the same socket as the managed one.
    socket: UdpSocket,
}

impl Socket for UdpSocket {
    type Service = UdpService;

    fn serve(self, session: &Session, pool: &str) -> io::Result<UdpService> {
        let socket = self.into_std()?;
        let managed = ManagedUdpSocket::new(socket.try_clone()?, session, pool)?;
        let socket = UdpSocket::from_std(socket)?;
        Ok(UdpService { managed, socket })
    }
}

impl fmt::Debug for UdpService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpService")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl UdpService {
    /// Returns the next event. For one task at a time; may be cancelled without loss.
    ///
    /// # Errors
    /// Same as recvfrom(2).
    pub async fn receive(&self) -> io::Result<UdpEvent> {
        poll_fn(|context| self.poll_receive(context)).await
    }

    fn poll_receive(&self, context: &mut Context<'_>) -> Poll<io::Result<UdpEvent>> {
        loop {
            if let Poll::Ready(event) = self.managed.ready_events().poll_pop(context) {
                return Poll::Ready(Ok(event));
            }
            ready!(self.socket.poll_recv_ready(context))?;
            let receive = || self.managed.receive();
            match self.socket.try_io(Interest::READABLE, receive) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    /// Sends a datagram to a client.
    ///
    /// # Errors
    /// `NotConnected` for an association in transit or on another node; otherwise as sendto(2).
    pub async fn send(&self, association: &Association, data: &[u8]) -> io::Result<usize> {
        self.managed.check_may_send(association)?;
        self.socket.send_to(data, association.remote()).await
    }

    /// Hands one association to another node, where the service's socket receives it with `state` (48 KiB at most) and
    /// with the datagrams that this program has not read. Waits for the result, however long the daemon is absent.
    ///
    /// # Errors
    /// [`Kept`] returns the association, usable as before.
    pub async fn hand_off(
        &self,
        association: &Association,
        destination: impl Into<Destination>,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<Association>> {
        self.managed
            .hand_off(association, destination.into(), state)
            .await
    }

    /// Forgets the associations that have been silent for at least `idle_min`; returns their number.
    pub fn forget_idle(&self, idle_min: Duration) -> usize {
        self.managed.forget_idle(idle_min)
    }
}
