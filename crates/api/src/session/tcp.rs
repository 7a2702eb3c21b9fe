//! The common part of the asynchronous and the blocking TCP service.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::{
    DeliveryQueue, FlowRegistration, HandedOffConnection, ServiceSlot, Session, SessionHandle,
};
use crate::{Destination, FlowText, Moved, Protocol};

/// A TCP service of the session; withdrawn when dropped.
pub(crate) struct TcpService {
    handle: Arc<SessionHandle>,
    service: u32,
    queue: Arc<DeliveryQueue<HandedOffConnection>>,
}

impl TcpService {
    pub(crate) fn new(session: &Session, pool: &str, local: SocketAddr) -> io::Result<Self> {
        let queue = Arc::new(DeliveryQueue::new()?);
        let handle = Arc::clone(&session.handle);
        let slot = ServiceSlot::Tcp(Arc::clone(&queue));
        let service = handle.shared.serve(pool, Protocol::Tcp, vec![local], slot);
        Ok(Self {
            handle,
            service,
            queue,
        })
    }

    pub(crate) fn queue(&self) -> &DeliveryQueue<HandedOffConnection> {
        &self.queue
    }

    /// Registers a connection that the listener accepted.
    pub(crate) fn register(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> io::Result<FlowRegistration> {
        let flow = FlowText::new(Protocol::Tcp, local, remote).map_err(io::Error::other)?;
        let registration = FlowRegistration {
            flow,
            signals: Arc::default(),
            handle: Arc::clone(&self.handle),
        };
        self.handle.shared.with_core(|core| {
            core.register_flow(self.service, flow, Arc::clone(&registration.signals))
        });
        Ok(registration)
    }

    /// Returns the socket, registration and application state of a connection that was handed over.
    pub(crate) fn activate(
        &self,
        connection: HandedOffConnection,
    ) -> io::Result<(TcpStream, FlowRegistration, Vec<u8>)> {
        let HandedOffConnection {
            flow,
            signals: cell,
            descriptor,
            state,
        } = connection;
        let registration = FlowRegistration {
            flow,
            signals: cell,
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

impl FlowRegistration {
    /// Starts handoffs as one batch: no message is sent before the last is registered.
    pub(crate) fn hand_off_batch<'a>(
        destination: &Destination,
        handoffs: impl IntoIterator<Item = (&'a FlowRegistration, Vec<u8>, super::SharedDescriptor)>,
    ) -> Vec<Result<(), String>> {
        let mut leaving = handoffs.into_iter().peekable();
        let Some(handle) = leaving.peek().map(|(first, ..)| Arc::clone(&first.handle)) else {
            return Vec::new();
        };
        handle.shared.with_core(|core| {
            let start_handoff = |(registration, state, socket): (&FlowRegistration, _, _)| {
                if !Arc::ptr_eq(&registration.handle, &handle) {
                    return Err(
                        "the connection belongs to another session than the first of the batch"
                            .into(),
                    );
                }
                registration.signals.clear_request();
                core.hand_off(registration.flow, destination, state, Some(socket))
            };
            leaving.map(start_handoff).collect()
        })
    }

    /// Waits for the result of the handoff.
    pub(crate) async fn outcome(&self) -> Result<Moved, String> {
        poll_fn(|context| self.signals.poll_outcome(context))
            .await
            .map(|to| Moved { to })
    }

    pub(crate) fn decline(&self, reason: &str) {
        self.signals.clear_request();
        self.handle
            .shared
            .with_core(|core| core.decline(self.flow, reason));
    }
}
