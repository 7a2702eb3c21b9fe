//! TCP for multithreaded programs.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::wait_readable;
use crate::session::tcp::{ManagedConnection, ManagedListener};
use crate::session::{Socket, block_on};
use crate::{Arrival, Destination, FlowText, Kept, Moved, Session};

/// A TCP listener managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct Service {
    managed: ManagedListener<TcpListener>,
}

impl Socket for TcpListener {
    type Service = Service;

    fn serve(self, session: &Session, pool: &str) -> io::Result<Service> {
        self.set_nonblocking(true)?;
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
    /// Returns the next connection: a client's, or one that another node handed over. Several threads may wait here.
    ///
    /// # Errors
    /// Same as accept(2). The service remains usable.
    pub fn accept(&self) -> io::Result<Arrival<TcpConnection>> {
        loop {
            if let Some(handed_off) = self.managed.queue().pop() {
                return self.managed.activate(handed_off, into_blocking);
            }
            match self.listener().accept() {
                Ok((stream, remote)) => {
                    let local = stream.local_addr()?;
                    let stream = into_blocking(stream)?;
                    return self.managed.register(stream, local, remote);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_readable(
                        self.listener().as_fd(),
                        self.managed.queue().notifier().as_fd(),
                        None,
                    )?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the TCP listener at which the service's clients connect.
    pub fn listener(&self) -> &TcpListener {
        self.managed.listener()
    }

    /// Hands off many connections as one batch. The results are in the order of the connections.
    pub fn hand_off_many(
        &self,
        connections: Vec<(TcpConnection, Vec<u8>)>,
        destination: impl Into<Destination>,
    ) -> Vec<Result<Moved, Kept<TcpConnection>>> {
        block_on(ManagedConnection::<TcpStream>::hand_off_many(
            connections,
            destination.into(),
        ))
    }
}

fn into_blocking(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Result of waiting on a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitResult {
    /// Data or the end of the stream can be read.
    Readable,
    /// The operator requests that the connection move.
    HandoffRequested(Destination),
    /// The maximum wait has passed.
    TimedOut,
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

    /// Returns the connection's socket, for example to set options.
    pub fn stream(&self) -> &TcpStream {
        self.managed.stream()
    }

    /// Returns the destination that the operator requests, if any. A program checks this at each safe point (a point
    /// from which a program on the other node could continue), and then calls [`TcpConnection::hand_off`]. The request
    /// stands until a handoff or [`TcpConnection::decline`].
    pub fn handoff_request(&self) -> Option<Destination> {
        self.managed.notifications().handoff_request()
    }

    /// Waits until data can be read, the operator requests a handoff, or `wait_max` has passed.
    ///
    /// # Errors
    /// Same as poll(2).
    pub fn wait(&self, wait_max: Option<Duration>) -> io::Result<WaitResult> {
        let deadline = wait_max.map(|wait_max| Instant::now() + wait_max);
        let notifier = self.managed.notifications().notifier()?;
        loop {
            if let Some(destination) = self.handoff_request() {
                return Ok(WaitResult::HandoffRequested(destination));
            }
            match wait_readable(self.stream().as_fd(), notifier.as_fd(), deadline)? {
                (true, _) => return Ok(WaitResult::Readable),
                (false, true) => {}
                (false, false) => return Ok(WaitResult::TimedOut),
            }
        }
    }

    /// Tells the operator that this connection stays.
    pub fn decline(&self, reason: &str) {
        self.managed.decline(reason);
    }

    /// Hands the connection to another node, where the service's `accept` returns it with `state` (48 KiB at most).
    /// Unread received data and unacknowledged sent data move with the connection. Waits for the result, however long
    /// the daemon is absent.
    ///
    /// # Errors
    /// [`Kept`] returns the connection, usable as before.
    pub fn hand_off(
        self,
        destination: impl Into<Destination>,
        state: Vec<u8>,
    ) -> Result<Moved, Kept<Self>> {
        block_on(self.managed.hand_off(destination.into(), state))
    }
}

impl fmt::Debug for TcpConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.managed, f)
    }
}

impl Read for &TcpConnection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream().read(buffer)
    }
}

impl Write for &TcpConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for TcpConnection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl Write for TcpConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
