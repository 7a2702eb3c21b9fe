//! One endpoint for SCTP and TCP.

use super::{
    AssocId, MessageToSend, StreamProtocol, TcpTransport, TlsSecurity, TransportEndpoint,
    TransportEvent,
};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// An SCTP endpoint and TCP connections as one endpoint. The addresses of the endpoint are SCTP's.
pub struct SctpAndTcpEndpoint {
    sctp: Box<dyn TransportEndpoint>,
    streams: TcpTransport,
    epoll: OwnedFd,
}

impl SctpAndTcpEndpoint {
    /// Combines the two endpoints.
    ///
    /// # Errors
    /// The system has no free descriptor.
    pub fn new(sctp: Box<dyn TransportEndpoint>, streams: TcpTransport) -> io::Result<Self> {
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

    fn endpoint_of(&self, assoc: AssocId) -> &dyn TransportEndpoint {
        match assoc.is_stream() {
            true => &self.streams,
            false => self.sctp.as_ref(),
        }
    }

    fn endpoint_of_mut(&mut self, assoc: AssocId) -> &mut dyn TransportEndpoint {
        match assoc.is_stream() {
            true => &mut self.streams,
            false => self.sctp.as_mut(),
        }
    }
}

impl TransportEndpoint for SctpAndTcpEndpoint {
    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<TransportEvent>) -> io::Result<()> {
        self.sctp.recv_batch(events)?;
        self.streams.recv_batch(events)
    }

    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()> {
        self.endpoint_of_mut(assoc).send(assoc, message)
    }

    fn send_bundles(
        &mut self,
        assocs: &[AssocId],
        messages: &[MessageToSend],
        taken: &mut Vec<usize>,
    ) {
        if !assocs.iter().any(|assoc| assoc.is_stream()) {
            return self.sctp.send_bundles(assocs, messages, taken);
        }
        for assoc in assocs {
            self.endpoint_of_mut(*assoc)
                .send_bundles(&[*assoc], messages, taken);
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

    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        self.sctp.connect_from_new_port(remote, encapsulation)
    }

    fn connect_stream(&mut self, remote: SocketAddr, over: &StreamProtocol) -> io::Result<AssocId> {
        self.streams.connect_stream(remote, over)
    }

    fn peer_name(&self, assoc: AssocId) -> Option<String> {
        self.endpoint_of(assoc).peer_name(assoc)
    }

    fn replace_security(&mut self, security: Arc<dyn TlsSecurity>) {
        self.streams.replace_security(security);
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        self.endpoint_of(assoc).round_trip(assoc)
    }

    fn measure_round_trip(&mut self, assoc: AssocId) {
        self.endpoint_of_mut(assoc).measure_round_trip(assoc);
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        self.endpoint_of(assoc).remote_addresses(assoc)
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        self.endpoint_of(assoc).confirmed_addresses(assoc)
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
        self.endpoint_of_mut(assoc).shutdown(assoc)
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        self.endpoint_of_mut(assoc).abort(assoc)
    }
}
