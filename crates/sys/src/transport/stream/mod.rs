//! TCP, with TLS or without, behind the same face as SCTP: a connection is an association with one stream and one address, the
//! other side's, which it has answered from.
//!
//! A connection that the other side makes is told of once it is good for something: with TLS, after the handshake and a look
//! at the certificate. Until then it counts among those that are being made, of which a host may have few. What is slow ends: a
//! handshake, a message that has begun, a reader that takes nothing.

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

/// How a connection is made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Over {
    /// TCP as it is.
    Tcp,
    /// TLS, with somebody whose certificate says this name, or any that is admitted.
    Tls(Option<String>),
}

/// Settings of an endpoint of streams.
#[derive(Clone, Debug)]
pub struct StreamConfig {
    /// Where connections are accepted without TLS.
    pub tcp: Vec<SocketAddr>,
    /// Where they are accepted with it.
    pub tls: Vec<SocketAddr>,
    /// Where connections are made from; none: as routed.
    pub source: Option<IpAddr>,
    /// What keeps messages apart.
    pub rules: Rules,
    /// What others may use.
    pub limits: StreamLimits,
    /// When a silent peer is given up: as SCTP's heartbeats, in whole seconds.
    pub failure: Failure,
}

/// What holds for each connection.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The payload protocol identifier of all messages: there is none on the wire.
    pub ppid: u32,
    /// Where a message ends.
    pub length_of: MessageLength,
    /// Longest message taken.
    pub message_len_max: usize,
    /// Bytes that may wait to be sent.
    pub send_buffer: usize,
    /// How long it may take until a connection is up.
    pub handshake: Duration,
    /// How long a message may take from its first byte to its last, and a peer to take anything of what is sent.
    pub message: Duration,
    /// TLS; without, there is none.
    pub security: Option<Arc<dyn Security>>,
}

/// What others may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// Connections in all.
    pub connections: usize,
    /// Connections of one host.
    pub connections_per_host: usize,
    /// Of those, the ones that are being made.
    pub handshakes_per_host: usize,
}

/// Many connections. See the module's text.
pub struct Streams {
    config: StreamConfig,
    poller: Poller,
    listeners: Vec<Listener>,
    connections: BTreeMap<u32, Connection>,
    hosts: Hosts,
    last: u32,
    /// Those with something new to send.
    fresh: BTreeSet<u32>,
    /// What happened outside [`Endpoint::recv_batch`].
    events: Vec<Event>,
    buffer: Box<[u8]>,
}

/// The poller's numbers of listeners begin here; connections have theirs below.
const LISTENERS: u64 = 1 << 32;
/// Bytes read at once.
const BUFFER_LEN: usize = 16 * 1024;

fn assoc(number: u32) -> AssocId {
    AssocId::of_stream(number)
}

impl Streams {
    /// Opens an endpoint.
    ///
    /// # Errors
    /// An address that cannot be listened at, TLS without security, or the system gives no descriptor.
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

    /// Where it listens: without TLS, and with.
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

    /// A connection that is there from now on.
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

    /// Tells the poller what a connection waits for.
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
            // It is watched, since it is there.
            let _ = self.poller.change(&connection.socket, number.into(), room);
        }
    }

    /// What a connection has to do, and its end if that comes of it.
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

    /// A connection is no more.
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
        // One that another made, and that was never told of, has no end to tell of.
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

    /// Takes in some of those who wait to be let in.
    fn accept(&mut self, index: usize, now: Instant, events: &mut Vec<Event>) -> io::Result<()> {
        let Some(listener) = self.listeners.get(index) else {
            return Ok(());
        };
        let secure = listener.secure;
        let (came, is_over) = listener.accept();
        if let Some(error) = is_over {
            // No descriptors: those who wait go on waiting, and so does the loop, for a moment.
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
