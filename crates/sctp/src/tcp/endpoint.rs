//! The [`TransportEndpoint`] interface of TCP connections.

use super::connection::{ConnectionEndReason, StreamConnection};
use super::security::{SecurityLayer, TlsSecurity};
use super::{LISTENER_NUMBER_MIN, StreamProtocol, TcpTransport, assoc_of as name_of, socket};
use crate::{AssocId, MessageToSend, TransportEndpoint, TransportEvent};
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl TransportEndpoint for TcpTransport {
    fn fd(&self) -> BorrowedFd<'_> {
        self.poller.fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<TransportEvent>) -> io::Result<()> {
        let now = Instant::now();
        events.append(&mut self.events);
        for number in self.poller.ready()? {
            match number.checked_sub(LISTENER_NUMBER_MIN) {
                Some(index) => self.accept(index as usize, now, events)?,
                None => self.process(number as u32, now, events),
            }
        }
        for number in self.poller.take_expired(now) {
            self.on_deadline(number, events)?;
        }
        self.poller.arm(now, false)
    }

    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()> {
        if message.ppid != self.config.rules.ppid {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let number = assoc.id();
        let connection = self.connections.get_mut(&number);
        let connection = connection.filter(|_| assoc.is_stream());
        let connection = connection.ok_or(io::ErrorKind::NotConnected)?;
        if !connection.queue_message(&message.data, &self.config.rules) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.unflushed.insert(number);
        Ok(())
    }

    fn send_bundles(
        &mut self,
        assocs: &[AssocId],
        messages: &[MessageToSend],
        taken: &mut Vec<usize>,
    ) {
        for assoc in assocs {
            let mut remaining = messages.iter();
            let is_full = |message: &MessageToSend| {
                let outcome = self.send(*assoc, message);
                outcome.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            };
            taken.push(remaining.position(is_full).unwrap_or(messages.len()));
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut events = std::mem::take(&mut self.events);
        for number in std::mem::take(&mut self.unflushed) {
            let Some(connection) = self.connections.get_mut(&number) else {
                continue;
            };
            let awaited_send_space = connection.awaits_send_space;
            match connection.write_queued(now) {
                Ok(()) => self.update_poller(number, awaited_send_space),
                Err(end) => self.end_connection(number, end, &mut events),
            }
        }
        self.events = events;
        self.poller.arm(now, !self.events.is_empty())
    }

    fn connect(&mut self, remote: &[SocketAddr], _: Option<u16>) -> io::Result<AssocId> {
        let first = remote.first().ok_or(io::ErrorKind::InvalidInput)?;
        self.connect_stream(*first, &StreamProtocol::Tcp)
    }

    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        _: Option<u16>,
    ) -> io::Result<AssocId> {
        self.connect(remote, None)
    }

    fn connect_stream(&mut self, remote: SocketAddr, over: &StreamProtocol) -> io::Result<AssocId> {
        let layer = match (over, &self.config.rules.security) {
            (StreamProtocol::Tcp, _) => SecurityLayer::Plain,
            (StreamProtocol::Tls(_), Some(security)) => {
                let session = security.client_session().map_err(io::Error::other)?;
                SecurityLayer::Tls(Box::new(session.into()))
            }
            (StreamProtocol::Tls(_), None) => {
                let text = "TLS without certificates";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        };
        let socket = socket::connect(remote, self.config.source)?;
        socket::set_options(&socket, &self.config.failure)?;
        let (now, rules) = (Instant::now(), &self.config.rules);
        let connection =
            StreamConnection::new(socket, remote, Some(over.clone()), layer, rules, now);
        let number = self.insert(connection)?;
        self.poller.arm(now, !self.events.is_empty())?;
        Ok(name_of(number))
    }

    fn peer_name(&self, assoc: AssocId) -> Option<String> {
        self.find_connection(assoc).ok()?.name.clone()
    }

    fn replace_security(&mut self, security: Arc<dyn TlsSecurity>) {
        self.config.rules.security = Some(security);
        let rules = &self.config.rules;
        let find_refused = |(number, connection): (&u32, &StreamConnection)| {
            let is_secured = connection.is_up() && connection.chain().is_some();
            let reason = is_secured.then(|| connection.admitted_peer_name(rules).err())??;
            Some((*number, reason))
        };
        let refused: Vec<_> = self.connections.iter().filter_map(find_refused).collect();
        let mut events = std::mem::take(&mut self.events);
        for (number, reason) in refused {
            let remote = self.connections[&number].remote;
            events.push(TransportEvent::Refused { remote, reason });
            self.end_connection(number, ConnectionEndReason::LocalClose, &mut events);
        }
        self.events = events;
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        socket::round_trip(&self.find_connection(assoc)?.socket)
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        Ok(vec![self.find_connection(assoc)?.remote])
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
        let (number, connection) = self.connection_mut(assoc)?;
        connection.finish_sending();
        self.unflushed.insert(number);
        Ok(())
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        let (number, _) = self.connection_mut(assoc)?;
        let mut events = std::mem::take(&mut self.events);
        self.end_connection(number, ConnectionEndReason::LocalClose, &mut events);
        self.events = events;
        self.poller.arm(Instant::now(), !self.events.is_empty())
    }
}
