//! TCP, with or without TLS, through the same interface as SCTP: a connection is an association with one stream and one
//! peer address, which counts as confirmed.
//!
//! An accepted connection is reported when it is usable: with TLS, after the handshake and the check of the
//! certificate. Until then it counts as a handshake in progress, of which a host may have few. Slow handshakes,
//! messages and readers are ended by timeouts.

mod connection;
mod endpoint;
mod listener;
mod message_splitter;
mod poller;
mod security;
mod socket;

pub use message_splitter::{MessageLength, MessageSplitter};
pub use security::TlsSecurity;

use super::{AssocId, DownReason, FailureDetection, TransportEvent};
use connection::{ConnectionEndReason, StreamConnection};
use listener::{ConnectionCounts, Listener};
use poller::Poller;
use security::SecurityLayer;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Protocol of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamProtocol {
    /// TCP without TLS.
    Tcp,
    /// TLS, with a peer of this certificate name, or any admitted peer.
    Tls(Option<String>),
}

/// Settings of a [`TcpTransport`].
#[derive(Clone, Debug)]
pub struct TcpTransportConfig {
    /// Listening addresses without TLS.
    pub tcp: Vec<SocketAddr>,
    /// Listening addresses with TLS.
    pub tls: Vec<SocketAddr>,
    /// Source address of outgoing connections; `None`: as routed.
    pub source: Option<IpAddr>,
    /// Parameters of each connection.
    pub rules: ConnectionRules,
    /// Limits on accepted connections.
    pub limits: TcpLimits,
    /// Limits after which a silent peer has failed: like SCTP's heartbeats, in whole seconds.
    pub failure: FailureDetection,
}

/// Parameters that apply to each connection.
#[derive(Clone, Debug)]
pub struct ConnectionRules {
    /// Payload protocol identifier of all messages, which the wire format does not carry.
    pub ppid: u32,
    /// Function that finds a message's end.
    pub length_of: MessageLength,
    /// Length of the longest accepted message, bytes.
    pub message_len_max: usize,
    /// Most queued bytes to send.
    pub send_buffer: usize,
    /// Longest time until a connection is established.
    pub handshake_timeout: Duration,
    /// Longest time from the first to the last byte of a message, and longest time in which a peer may accept no data.
    pub message_timeout: Duration,
    /// TLS configuration; `None` disables TLS.
    pub security: Option<Arc<dyn TlsSecurity>>,
}

/// Limits on the connections of other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpLimits {
    /// Most connections in total.
    pub connections: usize,
    /// Most connections of one host.
    pub connections_per_host: usize,
    /// Most handshakes in progress of one host.
    pub handshakes_per_host: usize,
}

/// Endpoint of many TCP connections, with or without TLS. See the module documentation.
pub struct TcpTransport {
    config: TcpTransportConfig,
    poller: Poller,
    listeners: Vec<Listener>,
    connections: BTreeMap<u32, StreamConnection>,
    hosts: ConnectionCounts,
    last_number: u32,
    /// Connections with new data to send.
    unflushed: BTreeSet<u32>,
    /// Events that occurred outside [`TransportEndpoint::recv_batch`].
    events: Vec<TransportEvent>,
    buffer: Box<[u8]>,
}

/// Smallest poller number of listeners; connections have smaller ones.
const LISTENER_NUMBER_MIN: u64 = 1 << 32;
/// Most bytes read at once.
const BUFFER_LEN: usize = 16 * 1024;

fn assoc_of(number: u32) -> AssocId {
    AssocId::from_stream_number(number)
}

impl TcpTransport {
    /// Opens an endpoint that listens for TCP and TLS connections at the addresses of `config`.
    ///
    /// # Errors
    /// An address is not available for listening, TLS is configured without security, or the system has no free
    /// descriptor.
    pub fn open(config: TcpTransportConfig) -> io::Result<Self> {
        let poller = Poller::new()?;
        if !config.tls.is_empty() && config.rules.security.is_none() {
            let text = "TLS without certificates";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut listeners = Vec::new();
        let plain = config.tcp.iter().map(|at| (*at, false));
        for (at, secure) in plain.chain(config.tls.iter().map(|at| (*at, true))) {
            let listener = Listener::open(at, secure)?;
            let number = LISTENER_NUMBER_MIN + listeners.len() as u64;
            poller.add(&listener.socket, number, false)?;
            listeners.push(listener);
        }
        Ok(Self {
            config,
            poller,
            listeners,
            connections: BTreeMap::new(),
            hosts: ConnectionCounts::default(),
            last_number: 0,
            unflushed: BTreeSet::new(),
            events: Vec::new(),
            buffer: vec![0; BUFFER_LEN].into(),
        })
    }

    /// Returns the listening addresses: without TLS, and with TLS.
    #[must_use]
    pub fn listen_addresses(&self) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
        let addresses = |secure| {
            let listeners = self
                .listeners
                .iter()
                .filter(move |one| one.secure == secure);
            listeners.map(|one| one.address).collect()
        };
        (addresses(false), addresses(true))
    }

    /// Adds a connection and registers it with the poller.
    fn insert(&mut self, connection: StreamConnection) -> io::Result<u32> {
        loop {
            self.last_number = self.last_number.wrapping_add(1);
            if !self.connections.contains_key(&self.last_number) {
                break;
            }
        }
        let (number, awaited_send_space) = (self.last_number, connection.awaits_send_space);
        self.poller
            .add(&connection.socket, number.into(), awaited_send_space)?;
        self.connections.insert(number, connection);
        self.update_poller(number, awaited_send_space);
        Ok(number)
    }

    /// Updates the connection's deadline and readiness interest in the poller.
    fn update_poller(&mut self, number: u32, awaited_send_space: bool) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let deadline = connection.next_deadline(&self.config.rules);
        if deadline != connection.deadline {
            self.poller
                .set_deadline(number.into(), connection.deadline, deadline);
            connection.deadline = deadline;
        }
        if connection.awaits_send_space != awaited_send_space {
            let awaits_send_space = connection.awaits_send_space;
            // The connection is registered, so the call cannot fail.
            let _ = self
                .poller
                .change(&connection.socket, number.into(), awaits_send_space);
        }
    }

    /// Processes a ready connection, and removes it if it has ended.
    fn process(&mut self, number: u32, now: Instant, events: &mut Vec<TransportEvent>) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let (was_up, awaited_send_space) = (connection.is_up(), connection.awaits_send_space);
        let rules = &self.config.rules;
        let outcome = connection.process(assoc_of(number), rules, now, &mut self.buffer, events);
        if !was_up && connection.is_up() && connection.outgoing.is_none() {
            self.hosts.on_established(connection.remote.ip());
        }
        match outcome {
            Ok(()) => self.update_poller(number, awaited_send_space),
            Err(end) => self.end_connection(number, end, events),
        }
    }

    /// Removes a connection and reports its end.
    fn end_connection(
        &mut self,
        number: u32,
        end: ConnectionEndReason,
        events: &mut Vec<TransportEvent>,
    ) {
        let Some(connection) = self.connections.remove(&number) else {
            return;
        };
        self.poller
            .set_deadline(number.into(), connection.deadline, None);
        self.unflushed.remove(&number);
        let is_up = connection.is_up();
        if connection.outgoing.is_none() {
            self.hosts.on_closed(connection.remote.ip(), is_up);
        }
        let (assoc, remote) = (assoc_of(number), connection.remote);
        if !matches!(end, ConnectionEndReason::Orderly) {
            socket::reset_on_close(&connection.socket);
        }
        let reason = match end {
            ConnectionEndReason::Orderly => DownReason::Shutdown,
            _ if is_up => DownReason::Lost,
            _ => DownReason::NotStarted,
        };
        if let (ConnectionEndReason::Broken(reason_text), false) = (end, is_up) {
            events.push(TransportEvent::Refused {
                remote,
                reason: reason_text,
            });
        }
        // An incoming connection that was never reported as up needs no report of its end.
        if is_up || connection.outgoing.is_some() {
            events.push(TransportEvent::Down { assoc, reason });
        }
    }

    fn connection_mut(&mut self, assoc: AssocId) -> io::Result<(u32, &mut StreamConnection)> {
        let number = assoc.id();
        match self.connections.get_mut(&number) {
            Some(connection) if assoc.is_stream() => Ok((number, connection)),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn find_connection(&self, assoc: AssocId) -> io::Result<&StreamConnection> {
        let connection = self
            .connections
            .get(&assoc.id())
            .filter(|_| assoc.is_stream());
        connection.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Accepts a limited number of waiting connections.
    fn accept(
        &mut self,
        index: usize,
        now: Instant,
        events: &mut Vec<TransportEvent>,
    ) -> io::Result<()> {
        let Some(listener) = self.listeners.get(index) else {
            return Ok(());
        };
        let secure = listener.secure;
        let (accepted, accept_error) = listener.accept();
        if let Some(error) = accept_error {
            // Without free descriptors the connections keep waiting, and the listener pauses.
            self.poller.remove(&self.listeners[index].socket);
            let resume_at = now + listener::ACCEPT_PAUSE;
            self.poller
                .set_deadline(LISTENER_NUMBER_MIN + index as u64, None, Some(resume_at));
            let remote = self.listeners[index].address;
            let reason = error.to_string();
            events.push(TransportEvent::Refused { remote, reason });
        }
        for (socket, remote) in accepted {
            let limits = &self.config.limits;
            let total = self.connections.len();
            if let Err(reason) = self.hosts.admit(remote.ip(), total, limits) {
                socket::reset_on_close(&socket);
                let reason = reason.to_owned();
                events.push(TransportEvent::Refused { remote, reason });
                continue;
            }
            let layer = match (&self.config.rules.security, secure) {
                (Some(security), true) => security
                    .server_session()
                    .map(|tls| SecurityLayer::Tls(Box::new(tls.into()))),
                _ => Ok(SecurityLayer::Plain),
            };
            let layer = layer.map_err(io::Error::other)?;
            socket::set_options(&socket, &self.config.failure)?;
            let rules = &self.config.rules;
            let number = self.insert(StreamConnection::new(
                socket, remote, None, layer, rules, now,
            ))?;
            self.process(number, now, events);
        }
        Ok(())
    }

    fn on_deadline(&mut self, number: u64, events: &mut Vec<TransportEvent>) -> io::Result<()> {
        if let Some(index) = number.checked_sub(LISTENER_NUMBER_MIN) {
            let listener = self.listeners.get(index as usize);
            return listener.map_or(Ok(()), |one| self.poller.add(&one.socket, number, false));
        }
        let number = number as u32;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.deadline = None;
            self.end_connection(
                number,
                ConnectionEndReason::Broken("the peer reads too slowly".to_owned()),
                events,
            );
        }
        Ok(())
    }
}
