//! TCP over tokio.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::session::{FlowRegistration, SharedDescriptor, Socket, tcp::TcpService};
use crate::{Arrival, Destination, FlowText, Kept, Moved, Session};

/// A TCP listener managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct Service {
    listener: TcpListener,
    tcp: TcpService,
}

impl Socket for TcpListener {
    type Service = Service;

    fn serve(self, session: &Session, pool: &str) -> io::Result<Service> {
        let tcp = TcpService::new(session, pool, self.local_addr()?)?;
        Ok(Service {
            listener: self,
            tcp,
        })
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("listener", &self.listener)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// Returns the next connection: a client's, or one that another node handed over. For one task at a time; may be
    /// cancelled without loss.
    ///
    /// # Errors
    /// Same as accept(2). The service remains usable.
    pub async fn accept(&self) -> io::Result<Arrival<Connection>> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// [`Service::accept`] for hand-written futures.
    ///
    /// # Errors
    /// Same as [`Service::accept`].
    pub fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Arrival<Connection>>> {
        if let Poll::Ready(handed_off) = self.tcp.queue().poll_pop(context) {
            let (stream, registration, state) = self.tcp.activate(handed_off)?;
            stream.set_nonblocking(true)?;
            let connection = Connection::new(TcpStream::from_std(stream)?, registration);
            return Poll::Ready(Ok(Arrival::HandedOff { connection, state }));
        }
        let (stream, remote) = ready!(self.listener.poll_accept(context))?;
        let registration = self.tcp.register(stream.local_addr()?, remote)?;
        Poll::Ready(Ok(Arrival::New(Connection::new(stream, registration))))
    }

    /// Returns the listener.
    pub fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Hands off many connections as one batch. The results are in the order of the connections.
    pub async fn hand_off_many(
        &self,
        connections: Vec<(Connection, Vec<u8>)>,
        destination: impl Into<Destination>,
    ) -> Vec<Result<Moved, Kept<Connection>>> {
        let (connections, states): (Vec<_>, Vec<_>) = connections.into_iter().unzip();
        let handoffs = connections
            .iter()
            .zip(states)
            .map(|(connection, state)| connection.handoff_parts(state));
        let started = FlowRegistration::hand_off_batch(&destination.into(), handoffs);
        let mut results = Vec::with_capacity(started.len());
        for (connection, begun) in connections.into_iter().zip(started) {
            results.push(connection.finish(begun).await);
        }
        results
    }
}

/// A client's connection. Reads and writes go directly to its socket; dropping it closes it.
pub struct Connection {
    stream: Arc<TcpStream>,
    registration: FlowRegistration,
}

impl Connection {
    fn new(stream: TcpStream, registration: FlowRegistration) -> Self {
        Self {
            stream: Arc::new(stream),
            registration,
        }
    }

    /// Returns the connection's flow.
    pub fn flow(&self) -> FlowText {
        self.registration.flow
    }

    /// Returns the connection's socket, for options, `readable`, `try_read` and the like.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns the destination that the operator requests, if any. A program checks this at each safe point (a point
    /// from which a program on the other node could continue), and then calls [`Connection::hand_off`]. The request
    /// stands until a handoff or [`Connection::decline`].
    pub fn handoff_request(&self) -> Option<Destination> {
        self.registration.signals.handoff_request()
    }

    /// Waits until the operator requests a handoff: a branch of `select!` that wakes an idle connection. For one task
    /// at a time; may be cancelled.
    pub async fn wait_handoff_request(&self) -> Destination {
        poll_fn(|context| self.registration.signals.poll_handoff_request(context)).await
    }

    /// Tells the operator that this connection stays.
    pub fn decline(&self, reason: &str) {
        self.registration.decline(reason);
    }

    /// Hands the connection to another node, where the service's `accept` returns it with `state` (48 KiB at most).
    /// Unread received data and unacknowledged sent data move with the connection. Waits for the result, however long
    /// the daemon is absent.
    ///
    /// If the future is dropped, the handoff continues; a connection that stays is then closed.
    ///
    /// # Errors
    /// [`Kept`] returns the connection, usable as before.
    pub async fn hand_off(
        self,
        destination: impl Into<Destination>,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<Self>> {
        let mut started =
            FlowRegistration::hand_off_batch(&destination.into(), [self.handoff_parts(state)]);
        self.finish(
            started
                .pop()
                .unwrap_or_else(|| Err("nothing to hand off".into())),
        )
        .await
    }

    fn handoff_parts(&self, state: Vec<u8>) -> (&FlowRegistration, Vec<u8>, SharedDescriptor) {
        (
            &self.registration,
            state,
            Arc::clone(&self.stream) as SharedDescriptor,
        )
    }

    async fn finish(self, started: Result<(), String>) -> Result<Moved, Kept<Self>> {
        let outcome = match started {
            Ok(()) => self.registration.outcome().await,
            Err(reason) => Err(reason),
        };
        outcome.map_err(|reason| Kept {
            connection: self,
            reason,
        })
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connection").field(&self.flow()).finish()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match self.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(
            &self.stream,
            rustix::net::Shutdown::Write,
        )?))
    }
}
