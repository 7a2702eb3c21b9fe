//! TCP over tokio.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::session::Socket;
use crate::session::tcp::{ManagedConnection, ManagedListener};
use crate::{Arrival, Destination, FlowText, Kept, Moved, Session};

/// A TCP listener managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct Service {
    managed: ManagedListener<TcpListener>,
}

impl Socket for TcpListener {
    type Service = Service;

    fn serve(self, session: &Session, pool: &str) -> io::Result<Service> {
        let local = self.local_addr()?;
        let managed = ManagedListener::new(self, local, session, pool)?;
        Ok(Service { managed })
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.managed, f)
    }
}

impl Service {
    /// Returns the next connection: a client's, or one that another node handed over. For one task at a time; may be
    /// cancelled without loss.
    ///
    /// # Errors
    /// Same as accept(2). The service remains usable.
    pub async fn accept(&self) -> io::Result<Arrival<TcpConnection>> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// [`Service::accept`] for hand-written futures.
    ///
    /// # Errors
    /// Same as [`Service::accept`].
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Arrival<TcpConnection>>> {
        if let Poll::Ready(handed_off) = self.managed.queue().poll_pop(context) {
            return Poll::Ready(self.managed.activate(handed_off, |stream| {
                stream.set_nonblocking(true)?;
                TcpStream::from_std(stream)
            }));
        }
        let (stream, remote) = ready!(self.managed.listener().poll_accept(context))?;
        let local = stream.local_addr()?;
        Poll::Ready(self.managed.register(stream, local, remote))
    }

    /// Returns the TCP listener at which the service's clients connect.
    pub fn listener(&self) -> &TcpListener {
        self.managed.listener()
    }

    /// Hands off many connections as one batch. The results are in the order of the connections.
    pub async fn hand_off_many(
        &self,
        connections: Vec<(TcpConnection, Vec<u8>)>,
        destination: impl Into<Destination>,
    ) -> Vec<Result<Moved, Kept<TcpConnection>>> {
        ManagedConnection::<TcpStream>::hand_off_many(connections, destination.into()).await
    }
}

/// A client's connection. Reads and writes go directly to its socket; dropping it closes it.
pub struct TcpConnection {
    managed: ManagedConnection<TcpStream>,
}

impl From<ManagedConnection<TcpStream>> for TcpConnection {
    fn from(managed: ManagedConnection<TcpStream>) -> Self {
        Self { managed }
    }
}

impl From<TcpConnection> for ManagedConnection<TcpStream> {
    fn from(connection: TcpConnection) -> Self {
        connection.managed
    }
}

impl TcpConnection {
    /// Returns the connection's flow.
    pub fn flow(&self) -> FlowText {
        self.managed.flow()
    }

    /// Returns the connection's socket, for options, `readable`, `try_read` and the like.
    pub fn stream(&self) -> &TcpStream {
        self.managed.stream()
    }

    /// Returns the destination that the operator requests, if any. A program checks this at each safe point (a point
    /// from which a program on the other node could continue), and then calls [`TcpConnection::hand_off`]. The request
    /// stands until a handoff or [`TcpConnection::decline`].
    pub fn handoff_request(&self) -> Option<Destination> {
        self.managed.notifications().handoff_request()
    }

    /// Waits until the operator requests a handoff: a branch of `select!` that wakes an idle connection. For one task
    /// at a time; may be cancelled.
    pub async fn wait_handoff_request(&self) -> Destination {
        poll_fn(|context| self.managed.notifications().poll_handoff_request(context)).await
    }

    /// Tells the operator that this connection stays.
    pub fn decline(&self, reason: &str) {
        self.managed.decline(reason);
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
        self.managed.hand_off(destination.into(), state).await
    }
}

impl fmt::Debug for TcpConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.managed, f)
    }
}

impl AsyncRead for TcpConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream().poll_read_ready(context))?;
            match self.stream().try_read(buffer.initialize_unfilled()) {
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

impl AsyncWrite for TcpConnection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream().poll_write_ready(context))?;
            match self.stream().try_write(bytes) {
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
            self.stream(),
            rustix::net::Shutdown::Write,
        )?))
    }
}
