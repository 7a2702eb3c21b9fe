//! Combination of an SCTP endpoint and an endpoint of TCP connections.

use super::{AssocId, Endpoint, Event, Message, Over, Security, Streams};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// An SCTP endpoint and TCP connections as one endpoint. The addresses of the endpoint are SCTP's.
pub struct Joined {
    sctp: Box<dyn Endpoint>,
    streams: Streams,
    epoll: OwnedFd,
}

impl Joined {
    /// Combines the two endpoints.
    ///
    /// # Errors
    /// The system has no free descriptor.
    pub fn new(sctp: Box<dyn Endpoint>, streams: Streams) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (number, fd) in [sctp.fd(), streams.fd()].into_iter().enumerate() {
            let data = EventData::new_u64(number as u64);
            epoll::add(&epoll, fd, data, EventFlags::IN)?;
        }
        Ok(Self {
            sctp,
            streams,
            epoll,
        })
    }

    fn of(&self, assoc: AssocId) -> &dyn Endpoint {
        match assoc.is_stream() {
            true => &self.streams,
            false => self.sctp.as_ref(),
        }
    }

    fn of_mut(&mut self, assoc: AssocId) -> &mut dyn Endpoint {
        match assoc.is_stream() {
            true => &mut self.streams,
            false => self.sctp.as_mut(),
        }
    }
}

impl Endpoint for Joined {
    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.sctp.recv_batch(events)?;
        self.streams.recv_batch(events)
    }

    fn send(&mut self, assoc: AssocId, message: &Message) -> io::Result<()> {
        self.of_mut(assoc).send(assoc, message)
    }

    fn send_bundles(&mut self, assocs: &[AssocId], messages: &[Message], taken: &mut Vec<usize>) {
        if !assocs.iter().any(|assoc| assoc.is_stream()) {
            return self.sctp.send_bundles(assocs, messages, taken);
        }
        for assoc in assocs {
            self.of_mut(*assoc).send_bundles(&[*assoc], messages, taken);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sctp.flush()?;
        self.streams.flush()
    }

    fn connect(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        self.sctp.connect(remote, encapsulation)
    }

    fn connect_apart(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        self.sctp.connect_apart(remote, encapsulation)
    }

    fn connect_stream(&mut self, remote: SocketAddr, over: &Over) -> io::Result<AssocId> {
        self.streams.connect_stream(remote, over)
    }

    fn name(&self, assoc: AssocId) -> Option<String> {
        self.of(assoc).name(assoc)
    }

    fn secure_anew(&mut self, security: Arc<dyn Security>) {
        self.streams.secure_anew(security);
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        self.of(assoc).round_trip(assoc)
    }

    fn measure(&mut self, assoc: AssocId) {
        self.of_mut(assoc).measure(assoc);
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        self.of(assoc).remote_addresses(assoc)
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        self.of(assoc).confirmed_addresses(assoc)
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.sctp.local_addresses()
    }

    fn encapsulation_port(&self) -> Option<u16> {
        self.sctp.encapsulation_port()
    }

    fn is_raw(&self) -> bool {
        self.sctp.is_raw()
    }

    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()> {
        self.of_mut(assoc).shutdown(assoc)
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        self.of_mut(assoc).abort(assoc)
    }
}
