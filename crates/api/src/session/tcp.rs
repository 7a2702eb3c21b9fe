//! The common part of the asynchronous and the blocking TCP service.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::{Handle, Letter, Queue, Registration, Session, Slot};
use crate::{Destination, FlowText, Moved, Protocol};

/// A TCP service of the session; withdrawn when dropped.
pub(crate) struct TcpService {
    handle: Arc<Handle>,
    service: u32,
    queue: Arc<Queue<Letter>>,
}

impl TcpService {
    pub(crate) fn new(session: &Session, pool: &str, local: SocketAddr) -> io::Result<Self> {
        let queue = Arc::new(Queue::new()?);
        let handle = Arc::clone(&session.handle);
        let slot = Slot::Tcp(Arc::clone(&queue));
        let service = handle.shared.serve(pool, Protocol::Tcp, vec![local], slot);
        Ok(Self {
            handle,
            service,
            queue,
        })
    }

    pub(crate) fn queue(&self) -> &Queue<Letter> {
        &self.queue
    }

    /// Registers a connection that the listener accepted.
    pub(crate) fn accepted(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> io::Result<Registration> {
        let flow = FlowText::new(Protocol::Tcp, local, remote).map_err(io::Error::other)?;
        let registration = Registration {
            flow,
            cell: Arc::default(),
            handle: Arc::clone(&self.handle),
        };
        self.handle
            .shared
            .with_core(|core| core.accepted(self.service, flow, Arc::clone(&registration.cell)));
        Ok(registration)
    }

    /// Returns the socket, registration and application state of a connection that was handed over.
    pub(crate) fn open(&self, letter: Letter) -> io::Result<(TcpStream, Registration, Vec<u8>)> {
        let Letter {
            flow,
            cell,
            descriptor,
            state,
        } = letter;
        let registration = Registration {
            flow,
            cell,
            handle: Arc::clone(&self.handle),
        };
        let descriptor: OwnedFd =
            Arc::try_unwrap(descriptor).or_else(|shared| shared.as_fd().try_clone_to_owned())?;
        Ok((TcpStream::from(descriptor), registration, state))
    }
}

impl Drop for TcpService {
    fn drop(&mut self) {
        self.handle.shared.withdraw(self.service);
    }
}

impl Registration {
    /// Starts handoffs as one batch: no message is sent before the last is registered.
    pub(crate) fn leave_together<'a>(
        to: &Destination,
        leaving: impl IntoIterator<Item = (&'a Registration, Vec<u8>, super::Descriptor)>,
    ) -> Vec<Result<(), String>> {
        let mut leaving = leaving.into_iter().peekable();
        let Some(handle) = leaving.peek().map(|(first, ..)| Arc::clone(&first.handle)) else {
            return Vec::new();
        };
        handle.shared.with_core(|core| {
            let leave = |(registration, state, socket): (&Registration, _, _)| {
                if !Arc::ptr_eq(&registration.handle, &handle) {
                    return Err("it belongs to another session than the first of the batch".into());
                }
                registration.cell.unask();
                core.hand_off(registration.flow, to, state, Some(socket))
            };
            leaving.map(leave).collect()
        })
    }

    /// Waits for the result of the handoff.
    pub(crate) async fn outcome(&self) -> Result<Moved, String> {
        poll_fn(|context| self.cell.poll_outcome(context))
            .await
            .map(|to| Moved { to })
    }

    pub(crate) fn decline(&self, reason: &str) {
        self.cell.unask();
        self.handle
            .shared
            .with_core(|core| core.decline(self.flow, reason));
    }
}
