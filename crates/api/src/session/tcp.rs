//! TCP for both interfaces: a managed listener and its connections. An interface adds its socket types, its way of
//! waiting, and a connection type `C` made of a [`ManagedConnection`].

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::{
    FlowNotifications, FlowRegistration, HandedOffConnection, ServiceInbox, ServiceSlot, Session,
    SessionHandle, SharedDescriptor, SharedSessionCore,
};
use crate::{Arrival, Destination, FlowText, Kept, Moved, Protocol};

/// A listener that is a service of the session; withdrawn when dropped.
pub(crate) struct ManagedListener<L> {
    listener: L,
    handle: Arc<SessionHandle>,
    service: u32,
    queue: Arc<ServiceInbox<HandedOffConnection>>,
}

impl<L> ManagedListener<L> {
    /// Makes a service of `listener`, which is bound to `local`.
    pub(crate) fn new(
        listener: L,
        local: SocketAddr,
        session: &Session,
        pool: &str,
    ) -> io::Result<Self> {
        let queue = Arc::new(ServiceInbox::new()?);
        let handle = Arc::clone(&session.handle);
        let slot = ServiceSlot::Tcp(Arc::clone(&queue));
        let service = session.registered_service(pool, Protocol::Tcp, local);
        let service = handle.shared.serve(service, slot);
        Ok(Self {
            listener,
            handle,
            service,
            queue,
        })
    }

    pub(crate) fn listener(&self) -> &L {
        &self.listener
    }

    /// Returns the queue of connections that other nodes handed over.
    pub(crate) fn queue(&self) -> &ServiceInbox<HandedOffConnection> {
        &self.queue
    }

    /// Registers a connection that the listener accepted.
    pub(crate) fn register<S, C: From<ManagedConnection<S>>>(
        &self,
        stream: S,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> io::Result<Arrival<C>> {
        let flow = FlowText::new(Protocol::Tcp, local, remote).map_err(io::Error::other)?;
        let registration = self.registration(flow, Arc::default());
        self.handle.shared.with_core(|core| {
            core.register_flow(self.service, flow, Arc::clone(&registration.signals))
        });
        let connection = ManagedConnection::new(stream, registration);
        Ok(Arrival::New(connection.into()))
    }

    /// Makes a connection of one from the queue. `adopt` converts the socket to the interface's type.
    pub(crate) fn activate<S, C: From<ManagedConnection<S>>>(
        &self,
        connection: HandedOffConnection,
        adopt: impl FnOnce(TcpStream) -> io::Result<S>,
    ) -> io::Result<Arrival<C>> {
        let HandedOffConnection {
            flow,
            signals,
            descriptor,
            state,
        } = connection;
        // Dropping the registration reports the connection as closed if the socket cannot be used.
        let registration = self.registration(flow, signals);
        let descriptor: OwnedFd =
            Arc::try_unwrap(descriptor).or_else(|shared| shared.as_fd().try_clone_to_owned())?;
        let stream = adopt(TcpStream::from(descriptor))?;
        Ok(Arrival::HandedOff {
            connection: ManagedConnection::new(stream, registration).into(),
            state,
        })
    }

    fn registration(&self, flow: FlowText, signals: Arc<FlowNotifications>) -> FlowRegistration {
        FlowRegistration {
            flow,
            signals,
            handle: Arc::clone(&self.handle),
        }
    }
}

impl<L> Drop for ManagedListener<L> {
    fn drop(&mut self) {
        self.handle.shared.withdraw(self.service);
    }
}

/// Prints the listener of the public type `Service`, which contains this value.
impl<L: fmt::Debug> fmt::Debug for ManagedListener<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("listener", &self.listener)
            .finish_non_exhaustive()
    }
}

/// A connection of a service: its socket, and its registration with the session.
pub(crate) struct ManagedConnection<S> {
    stream: Arc<S>,
    registration: FlowRegistration,
}

impl<S> ManagedConnection<S> {
    fn new(stream: S, registration: FlowRegistration) -> Self {
        Self {
            stream: Arc::new(stream),
            registration,
        }
    }

    pub(crate) fn flow(&self) -> FlowText {
        self.registration.flow
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns the session's reports on this connection.
    pub(crate) fn notifications(&self) -> &FlowNotifications {
        &self.registration.signals
    }

    /// Tells the operator that this connection stays.
    pub(crate) fn decline(&self, reason: &str) {
        self.notifications().clear_request();
        let decline = |core: &mut SharedSessionCore| core.decline(self.flow(), reason);
        self.registration.handle.shared.with_core(decline);
    }
}

impl<S: AsFd + Send + Sync + 'static> ManagedConnection<S> {
    /// Hands the connection to another node, and waits for the result.
    pub(crate) async fn hand_off<C: From<Self>>(
        self,
        destination: Destination,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<C>> {
        let shared = &self.registration.handle.shared;
        let started = shared.with_core(|core| self.start_handoff(core, &destination, state));
        self.finish_handoff(started).await
    }

    /// Hands off many connections as one batch: no message is sent before the last connection is registered. The
    /// results are in the order of the connections.
    pub(crate) async fn hand_off_many<C: From<Self> + Into<Self>>(
        connections: Vec<(C, Vec<u8>)>,
        destination: Destination,
    ) -> Vec<Result<Moved, Kept<C>>> {
        let (connections, states): (Vec<C>, Vec<_>) = connections.into_iter().unzip();
        let connections: Vec<Self> = connections.into_iter().map(C::into).collect();
        let started = Self::start_batch(&connections, states, &destination);
        let mut results = Vec::with_capacity(started.len());
        for (connection, started) in connections.into_iter().zip(started) {
            results.push(connection.finish_handoff(started).await);
        }
        results
    }

    fn start_batch(
        connections: &[Self],
        states: Vec<Vec<u8>>,
        destination: &Destination,
    ) -> Vec<Result<(), String>> {
        let Some(first) = connections.first() else {
            return Vec::new();
        };
        let handle = &first.registration.handle;
        handle.shared.with_core(|core| {
            let handoffs = connections.iter().zip(states);
            let start_handoff = |(connection, state): (&Self, _)| {
                if !Arc::ptr_eq(&connection.registration.handle, handle) {
                    return Err(
                        "the connection belongs to another session than the first of the batch"
                            .into(),
                    );
                }
                connection.start_handoff(core, destination, state)
            };
            handoffs.map(start_handoff).collect()
        })
    }

    /// Starts a handoff, or returns the reason that it cannot start.
    fn start_handoff(
        &self,
        core: &mut SharedSessionCore,
        destination: &Destination,
        state: Vec<u8>,
    ) -> Result<(), String> {
        self.notifications().clear_request();
        let socket = Arc::clone(&self.stream) as SharedDescriptor;
        core.hand_off(self.flow(), destination, state, Some(socket))
    }

    /// Waits for the result of a handoff that has started.
    async fn finish_handoff<C: From<Self>>(
        self,
        started: Result<(), String>,
    ) -> Result<Moved, Kept<C>> {
        let outcome = self.notifications().outcome(started).await;
        outcome.map_err(|reason| Kept {
            connection: self.into(),
            reason,
        })
    }
}

/// Prints the flow of the public type `TcpConnection`, which contains this value.
impl<S> fmt::Debug for ManagedConnection<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TcpConnection").field(&self.flow()).finish()
    }
}
