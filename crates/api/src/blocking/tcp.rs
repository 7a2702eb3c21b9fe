//! TCP for multithreaded programs.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wait_readable;
use crate::session::{FlowRegistration, SharedDescriptor, Socket, block_on, tcp::TcpService};
use crate::{Arrival, Destination, FlowText, Kept, Moved, Session};

/// A TCP listener managed by Holdfast. Created by [`Session::serve`]; withdrawn when dropped.
pub struct Service {
    listener: TcpListener,
    tcp: TcpService,
}

impl Socket for TcpListener {
    type Service = Service;

    fn serve(self, session: &Session, pool: &str) -> io::Result<Service> {
        self.set_nonblocking(true)?;
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
    /// Returns the next connection: a client's, or one that another node handed over. Several threads may wait here.
    ///
    /// # Errors
    /// Same as accept(2). The service remains usable.
    pub fn accept(&self) -> io::Result<Arrival<Connection>> {
        loop {
            if let Some(handed_off) = self.tcp.queue().pop() {
                let (stream, registration, state) = self.tcp.activate(handed_off)?;
                return Ok(Arrival::HandedOff {
                    connection: Connection::new(stream, registration)?,
                    state,
                });
            }
            match self.listener.accept() {
                Ok((stream, remote)) => {
                    let registration = self.tcp.register(stream.local_addr()?, remote)?;
                    return Ok(Arrival::New(Connection::new(stream, registration)?));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_readable(
                        self.listener.as_fd(),
                        self.tcp.queue().notifier().as_fd(),
                        None,
                    )?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the listener.
    pub fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Hands off many connections as one batch. The results are in the order of the connections.
    pub fn hand_off_many(
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
        connections
            .into_iter()
            .zip(started)
            .map(|(connection, begun)| connection.finish(begun))
            .collect()
    }
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
pub struct Connection {
    stream: Arc<TcpStream>,
    registration: FlowRegistration,
}

impl Connection {
    fn new(stream: TcpStream, registration: FlowRegistration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self {
            stream: Arc::new(stream),
            registration,
        })
    }

    /// Returns the connection's flow.
    pub fn flow(&self) -> FlowText {
        self.registration.flow
    }

    /// Returns the connection's socket, for example to set options.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns the destination that the operator requests, if any. A program checks this at each safe point (a point
    /// from which a program on the other node could continue), and then calls [`Connection::hand_off`]. The request
    /// stands until a handoff or [`Connection::decline`].
    pub fn handoff_request(&self) -> Option<Destination> {
        self.registration.signals.handoff_request()
    }

    /// Waits until data can be read, the operator requests a handoff, or `wait_max` has passed.
    ///
    /// # Errors
    /// Same as poll(2).
    pub fn wait(&self, wait_max: Option<Duration>) -> io::Result<WaitResult> {
        let deadline = wait_max.map(|wait_max| Instant::now() + wait_max);
        let notifier = self.registration.signals.notifier()?;
        loop {
            if let Some(destination) = self.handoff_request() {
                return Ok(WaitResult::HandoffRequested(destination));
            }
            match wait_readable(self.stream.as_fd(), notifier.as_fd(), deadline)? {
                (true, _) => return Ok(WaitResult::Readable),
                (false, true) => {}
                (false, false) => return Ok(WaitResult::TimedOut),
            }
        }
    }

    /// Tells the operator that this connection stays.
    pub fn decline(&self, reason: &str) {
        self.registration.decline(reason);
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
        let mut started =
            FlowRegistration::hand_off_batch(&destination.into(), [self.handoff_parts(state)]);
        self.finish(
            started
                .pop()
                .unwrap_or_else(|| Err("nothing to hand off".into())),
        )
    }

    fn handoff_parts(&self, state: Vec<u8>) -> (&FlowRegistration, Vec<u8>, SharedDescriptor) {
        (
            &self.registration,
            state,
            Arc::clone(&self.stream) as SharedDescriptor,
        )
    }

    fn finish(self, started: Result<(), String>) -> Result<Moved, Kept<Self>> {
        let outcome = started.and_then(|()| {
            block_on(self.registration.outcome(), None).unwrap_or_else(|| Err("no outcome".into()))
        });
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

impl Read for &Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self.stream).read(buffer)
    }
}

impl Write for &Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.stream).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
