//! The [`Endpoint`] interface of TCP connections.

use super::connection::{Connection, End};
use super::security::{Layer, Security};
use super::{LISTENERS, Over, Streams, assoc as name_of, socket};
use crate::transport::{AssocId, Endpoint, Event, Message};
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Endpoint for Streams {
    fn fd(&self) -> BorrowedFd<'_> {
        self.poller.fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let now = Instant::now();
        events.append(&mut self.events);
        for number in self.poller.ready()? {
            match number.checked_sub(LISTENERS) {
                Some(index) => self.accept(index as usize, now, events)?,
                None => self.turn(number as u32, now, events),
            }
        }
        for number in self.poller.due(now) {
            self.due(number, events)?;
        }
        self.poller.arm(now, false)
    }

    fn send(&mut self, assoc: AssocId, message: &Message) -> io::Result<()> {
        if message.ppid != self.config.rules.ppid {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let number = assoc.id();
        let connection = self.connections.get_mut(&number);
        let connection = connection.filter(|_| assoc.is_stream());
        let connection = connection.ok_or(io::ErrorKind::NotConnected)?;
        if !connection.queue(&message.data, &self.config.rules) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.fresh.insert(number);
        Ok(())
    }

    fn send_bundles(&mut self, assocs: &[AssocId], messages: &[Message], taken: &mut Vec<usize>) {
        for assoc in assocs {
            let mut each = messages.iter();
            let finds_no_room = |message: &Message| {
                let outcome = self.send(*assoc, message);
                outcome.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            };
            taken.push(each.position(finds_no_room).unwrap_or(messages.len()));
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut events = std::mem::take(&mut self.events);
        for number in std::mem::take(&mut self.fresh) {
            let Some(connection) = self.connections.get_mut(&number) else {
                continue;
            };
            let room = connection.awaits_room;
            match connection.let_out(now) {
                Ok(()) => self.settle(number, room),
                Err(end) => self.end(number, end, &mut events),
            }
        }
        self.events = events;
        self.poller.arm(now, !self.events.is_empty())
    }

    fn connect(&mut self, remote: &[SocketAddr], _: Option<u16>) -> io::Result<AssocId> {
        let first = remote.first().ok_or(io::ErrorKind::InvalidInput)?;
        self.connect_stream(*first, &Over::Tcp)
    }

    fn connect_apart(&mut self, remote: &[SocketAddr], _: Option<u16>) -> io::Result<AssocId> {
        self.connect(remote, None)
    }

    fn connect_stream(&mut self, remote: SocketAddr, over: &Over) -> io::Result<AssocId> {
        let layer = match (over, &self.config.rules.security) {
            (Over::Tcp, _) => Layer::Plain,
            (Over::Tls(_), Some(security)) => {
                let tls = security.dial().map_err(io::Error::other)?;
                Layer::Tls(Box::new(tls.into()))
            }
            (Over::Tls(_), None) => {
                let text = "TLS without certificates";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        };
        let socket = socket::connect(remote, self.config.source)?;
        socket::prepare(&socket, &self.config.failure)?;
        let (now, rules) = (Instant::now(), &self.config.rules);
        let connection = Connection::new(socket, remote, Some(over.clone()), layer, rules, now);
        let number = self.insert(connection)?;
        self.poller.arm(now, !self.events.is_empty())?;
        Ok(name_of(number))
    }

    fn name(&self, assoc: AssocId) -> Option<String> {
        self.known(assoc).ok()?.name.clone()
    }

    fn secure_anew(&mut self, security: Arc<dyn Security>) {
        self.config.rules.security = Some(security);
        let rules = &self.config.rules;
        let refused = |(number, connection): (&u32, &Connection)| {
            let is_made = connection.is_up() && connection.chain().is_some();
            let why = is_made.then(|| connection.checked_name(rules).err())??;
            Some((*number, why))
        };
        let refused: Vec<_> = self.connections.iter().filter_map(refused).collect();
        let mut events = std::mem::take(&mut self.events);
        for (number, why) in refused {
            let remote = self.connections[&number].remote;
            events.push(Event::Refused { remote, why });
            self.end(number, End::Here, &mut events);
        }
        self.events = events;
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        socket::round_trip(&self.known(assoc)?.socket)
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        Ok(vec![self.known(assoc)?.remote])
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        // The TCP handshake has confirmed the address.
        self.remote_addresses(assoc)
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        Ok(self.listeners.iter().map(|one| one.address).collect())
    }

    fn encapsulation_port(&self) -> Option<u16> {
        None
    }

    fn is_raw(&self) -> bool {
        false
    }

    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()> {
        let (number, connection) = self.connection(assoc)?;
        connection.finish();
        self.fresh.insert(number);
        Ok(())
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        let (number, _) = self.connection(assoc)?;
        let mut events = std::mem::take(&mut self.events);
        self.end(number, End::Here, &mut events);
        self.events = events;
        self.poller.arm(Instant::now(), !self.events.is_empty())
    }
}
