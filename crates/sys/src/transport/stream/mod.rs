//! TCP, with or without TLS, through the same interface as SCTP: a connection is an association with one stream and one
//! peer address, which counts as confirmed.
//!
//! An accepted connection is reported when it is usable: with TLS, after the handshake and the check of the
//! certificate. Until then it counts as a handshake in progress, of which a host may have few. Slow handshakes,
//! messages and readers are ended by timeouts.

mod connection;
mod endpoint;
mod frames;
mod listener;
mod poller;
mod security;
mod socket;

pub use frames::{Frames, MessageLength};
pub use security::Security;

use super::{AssocId, DownReason, Event, Failure};
use connection::{Connection, End};
use listener::{Hosts, Listener};
use poller::Poller;
use security::Layer;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Protocol of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Over {
    /// TCP without TLS.
    Tcp,
    /// TLS, with a peer of this certificate name, or any admitted peer.
    Tls(Option<String>),
}

/// Settings of an endpoint for TCP connections.
#[derive(Clone, Debug)]
pub struct StreamConfig {
    /// Listening addresses without TLS.
    pub tcp: Vec<SocketAddr>,
    /// Listening addresses with TLS.
    pub tls: Vec<SocketAddr>,
    /// Source address of outgoing connections; `None`: as routed.
    pub source: Option<IpAddr>,
    /// Parameters of each connection.
    pub rules: Rules,
    /// Limits on accepted connections.
    pub limits: StreamLimits,
    /// Limits after which a silent peer has failed: like SCTP's heartbeats, in whole seconds.
    pub failure: Failure,
}

/// Parameters that apply to each connection.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Payload protocol identifier of all messages, which the wire format does not carry.
    pub ppid: u32,
    /// Function that finds a message's end.
    pub length_of: MessageLength,
    /// Length of the longest accepted message, bytes.
    pub message_len_max: usize,
    /// Most queued bytes to send.
    pub send_buffer: usize,
    /// Longest time until a connection is established.
    pub handshake: Duration,
    /// Longest time from the first to the last byte of a message, and longest time in which a peer may accept no data.
    pub message: Duration,
    /// TLS configuration; `None` disables TLS.
    pub security: Option<Arc<dyn Security>>,
}

/// Limits on the connections of other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// Most connections in total.
    pub connections: usize,
    /// Most connections of one host.
    pub connections_per_host: usize,
    /// Most handshakes in progress of one host.
    pub handshakes_per_host: usize,
}

/// Many connections as one endpoint. See the module documentation.
pub struct Streams {
    config: StreamConfig,
    poller: Poller,
    listeners: Vec<Listener>,
    connections: BTreeMap<u32, Connection>,
    hosts: Hosts,
    last: u32,
    /// Connections with new data to send.
    fresh: BTreeSet<u32>,
    /// Events that occurred outside [`Endpoint::recv_batch`].
    events: Vec<Event>,
    buffer: Box<[u8]>,
}

/// Smallest poller number of listeners; connections have smaller ones.
const LISTENERS: u64 = 1 << 32;
/// Most bytes read at once.
const BUFFER_LEN: usize = 16 * 1024;

fn assoc(number: u32) -> AssocId {
    AssocId::of_stream(number)
}

impl Streams {
    /// Opens an endpoint.
    ///
    /// # Errors
    /// An address is not available for listening, TLS is configured without security, or the system has no free
    /// descriptor.
    pub fn open(config: StreamConfig) -> io::Result<Self> {
        let poller = Poller::new()?;
        if !config.tls.is_empty() && config.rules.security.is_none() {
            let text = "TLS without certificates";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut listeners = Vec::new();
        let plain = config.tcp.iter().map(|at| (*at, false));
        for (at, secure) in plain.chain(config.tls.iter().map(|at| (*at, true))) {
            let listener = Listener::open(at, secure)?;
            let number = LISTENERS + listeners.len() as u64;
            poller.add(&listener.socket, number, false)?;
            listeners.push(listener);
        }
        Ok(Self {
            config,
            poller,
            listeners,
            connections: BTreeMap::new(),
            hosts: Hosts::default(),
            last: 0,
            fresh: BTreeSet::new(),
            events: Vec::new(),
            buffer: vec![0; BUFFER_LEN].into(),
        })
    }

    /// Returns the listening addresses: without TLS, and with TLS.
    #[must_use]
    pub fn listens_at(&self) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
        let at = |secure| {
            let some = self
                .listeners
                .iter()
                .filter(move |one| one.secure == secure);
            some.map(|one| one.address).collect()
        };
        (at(false), at(true))
    }

    /// Adds a connection and registers it with the poller.
    fn insert(&mut self, connection: Connection) -> io::Result<u32> {
        loop {
            self.last = self.last.wrapping_add(1);
            if !self.connections.contains_key(&self.last) {
                break;
            }
        }
        let (number, room) = (self.last, connection.awaits_room);
        self.poller.add(&connection.socket, number.into(), room)?;
        self.connections.insert(number, connection);
        self.settle(number, room);
        Ok(number)
    }

    /// Updates the connection's deadline and readiness interest in the poller.
    fn settle(&mut self, number: u32, awaited_room: bool) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let due = connection.over_at(&self.config.rules);
        if due != connection.due {
            self.poller.set(number.into(), connection.due, due);
            connection.due = due;
        }
        if connection.awaits_room != awaited_room {
            let room = connection.awaits_room;
            // The connection is registered, so the call cannot fail.
            let _ = self.poller.change(&connection.socket, number.into(), room);
        }
    }

    /// Processes a ready connection, and removes it if it has ended.
    fn turn(&mut self, number: u32, now: Instant, events: &mut Vec<Event>) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let (was_up, room) = (connection.is_up(), connection.awaits_room);
        let rules = &self.config.rules;
        let outcome = connection.turn(assoc(number), rules, now, &mut self.buffer, events);
        if !was_up && connection.is_up() && connection.made.is_none() {
            self.hosts.came_up(connection.remote.ip());
        }
        match outcome {
            Ok(()) => self.settle(number, room),
            Err(end) => self.end(number, end, events),
        }
    }

    /// Removes a connection and reports its end.
    fn end(&mut self, number: u32, end: End, events: &mut Vec<Event>) {
        let Some(connection) = self.connections.remove(&number) else {
            return;
        };
        self.poller.set(number.into(), connection.due, None);
        self.fresh.remove(&number);
        let is_up = connection.is_up();
        if connection.made.is_none() {
            self.hosts.left(connection.remote.ip(), is_up);
        }
        let (assoc, remote) = (assoc(number), connection.remote);
        if !matches!(end, End::Orderly) {
            socket::reset_on_close(&connection.socket);
        }
        let reason = match end {
            End::Orderly => DownReason::Shutdown,
            _ if is_up => DownReason::Lost,
            _ => DownReason::NotStarted,
        };
        if let (End::Broken(why), false) = (end, is_up) {
            events.push(Event::Refused { remote, why });
        }
        // An incoming connection that was never reported as up needs no report of its end.
        if is_up || connection.made.is_some() {
            events.push(Event::Down { assoc, reason });
        }
    }

    fn connection(&mut self, of: AssocId) -> io::Result<(u32, &mut Connection)> {
        let number = of.id();
        match self.connections.get_mut(&number) {
            Some(connection) if of.is_stream() => Ok((number, connection)),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn known(&self, of: AssocId) -> io::Result<&Connection> {
        let connection = self.connections.get(&of.id()).filter(|_| of.is_stream());
        connection.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Accepts a limited number of waiting connections.
    fn accept(&mut self, index: usize, now: Instant, events: &mut Vec<Event>) -> io::Result<()> {
        let Some(listener) = self.listeners.get(index) else {
            return Ok(());
        };
        let secure = listener.secure;
        let (came, is_over) = listener.accept();
        if let Some(error) = is_over {
            // Without free descriptors the connections keep waiting, and the listener pauses.
            self.poller.remove(&self.listeners[index].socket);
            let at = now + listener::PAUSE;
            self.poller.set(LISTENERS + index as u64, None, Some(at));
            let remote = self.listeners[index].address;
            let why = error.to_string();
            events.push(Event::Refused { remote, why });
        }
        for (socket, remote) in came {
            let limits = &self.config.limits;
            let total = self.connections.len();
            if let Err(why) = self.hosts.admit(remote.ip(), total, limits) {
                socket::reset_on_close(&socket);
                let why = why.to_owned();
                events.push(Event::Refused { remote, why });
                continue;
            }
            let layer = match (&self.config.rules.security, secure) {
                (Some(security), true) => security
                    .accept()
                    .map(|tls| Layer::Tls(Box::new(tls.into()))),
                _ => Ok(Layer::Plain),
            };
            let layer = layer.map_err(io::Error::other)?;
            socket::prepare(&socket, &self.config.failure)?;
            let rules = &self.config.rules;
            let number = self.insert(Connection::new(socket, remote, None, layer, rules, now))?;
            self.turn(number, now, events);
        }
        Ok(())
    }

    fn due(&mut self, number: u64, events: &mut Vec<Event>) -> io::Result<()> {
        if let Some(index) = number.checked_sub(LISTENERS) {
            let listener = self.listeners.get(index as usize);
            return listener.map_or(Ok(()), |one| self.poller.add(&one.socket, number, false));
        }
        let number = number as u32;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.due = None;
            self.end(number, End::Broken("it is too slow".to_owned()), events);
        }
        Ok(())
    }
}
