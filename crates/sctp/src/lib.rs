//! SCTP for an event loop, and messages over TCP and TLS in the same form.
//!
//! SCTP comes from the kernel if the kernel has it, otherwise from libusrsctp; both implement [`TransportEndpoint`].
//! [`TcpTransport`] offers TCP connections through the same trait, and [`SctpAndTcpEndpoint`] combines both.
//! [`MulticastSocket`] sends and receives announcements. An endpoint is a one-to-many socket (RFC 6458, section 3):
//!
//! 1. wait until [`TransportEndpoint::fd`] is readable,
//! 2. [`TransportEndpoint::recv_batch`] receives messages and notifications,
//! 3. any number of [`TransportEndpoint::send`],
//! 4. [`TransportEndpoint::flush`] before waiting again.
//!
//! [`TransportEndpoint::wait_for_events`] flushes, waits and receives, where nothing else is waited for.
//!
//! System calls are made for batches of packets or messages, not for each one.

mod config;
mod event;
mod event_assembler;
mod kernel;
mod multicast;
mod sctp_and_tcp;
mod socket_api_layout;
mod tcp;
mod usrsctp;

pub use config::{ENCAPSULATION_PORT, FailureDetection, TransportConfig};
pub use event::{AssocId, DownReason, MessageToSend, PathState, TransportEvent};
pub use multicast::{MulticastSocket, ReceivedAnnouncement};
pub use sctp_and_tcp::SctpAndTcpEndpoint;
pub use tcp::{
    ConnectionRules, MessageLength, MessageSplitter, StreamProtocol, TcpLimits, TcpTransport,
    TcpTransportConfig, TlsSecurity,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// The SCTP implementation in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SctpProvider {
    /// The kernel's SCTP.
    Kernel,
    /// libusrsctp, in this process.
    Usrsctp,
}

/// An SCTP endpoint with many associations.
pub trait TransportEndpoint: Send {
    /// Returns a descriptor that is readable when [`recv_batch`](Self::recv_batch) has work to do.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Receives a bounded batch and appends its events to `events`; never blocks. Call this function again while the
    /// descriptor is readable.
    ///
    /// # Errors
    /// The stack's sockets are unusable. A peer cannot cause this error.
    fn recv_batch(&mut self, events: &mut Vec<TransportEvent>) -> io::Result<()>;

    /// Queues a message, which is sent by the next [`flush`](Self::flush) at the latest.
    ///
    /// # Errors
    /// `WouldBlock`: the association's send buffer is full. `NotConnected`: there is no such association. With the
    /// kernel's SCTP both may be reported as [`TransportEvent::SendFailed`] instead, because the kernel gets messages only in
    /// `flush`.
    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()>;

    /// Queues the same messages for many associations, for each in as few packets as possible, regardless of
    /// `no_delay`. Appends to `taken`, for each association, how many of the messages fit, counted from the first. An
    /// unknown association counts as taking all; an event reports its end. The caller encodes once and the bytes are
    /// shared up to this point. Below it, the kernel takes many messages in one system call but copies for each
    /// association, because packets differ by peer; usrsctp needs no system call, and also copies.
    fn send_bundles(
        &mut self,
        assocs: &[AssocId],
        messages: &[MessageToSend],
        taken: &mut Vec<usize>,
    );

    /// Sends everything that is queued.
    ///
    /// # Errors
    /// The stack's sockets are unusable. A lost packet is no error.
    fn flush(&mut self) -> io::Result<()>;

    /// Sends everything that is queued, waits until [`fd`](Self::fd) is readable or `limit` has passed, and appends the
    /// events of a batch to `events`. One step of a program that waits for nothing but this endpoint.
    ///
    /// # Errors
    /// The stack's sockets are unusable.
    fn wait_for_events(
        &mut self,
        limit: Duration,
        events: &mut Vec<TransportEvent>,
    ) -> io::Result<()> {
        self.flush()?;
        let limit = Timespec::try_from(limit).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut descriptor = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        match poll(&mut descriptor, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => self.recv_batch(events),
            Err(error) => Err(error.into()),
        }
    }

    /// Starts an association with the peer that has all these addresses (one port); [`TransportEvent::Up`] or [`TransportEvent::Down`]
    /// follows. Packets are encapsulated in UDP to port `encapsulation`, if given.
    ///
    /// # Errors
    /// There is no such route, or an association with that peer exists already (`AlreadyExists`).
    fn connect(&mut self, remote: &[SocketAddr], encapsulation: Option<u16>)
    -> io::Result<AssocId>;

    /// Starts an association from an additional local port, which lives as long as the association. Only so can one
    /// peer have several associations, which a load generator needs.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId>;

    /// Starts a connection over TCP or TLS, if the endpoint supports them; [`TransportEvent::Up`] or [`TransportEvent::Down`] follows.
    ///
    /// # Errors
    /// `Unsupported`; no such route, or no certificates.
    fn connect_stream(&mut self, remote: SocketAddr, over: &StreamProtocol) -> io::Result<AssocId> {
        let _ = (remote, over);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the name in the certificate of an association's peer.
    fn peer_name(&self, assoc: AssocId) -> Option<String> {
        let _ = assoc;
        None
    }

    /// Replaces the certificates and the admission rules. New connections use the new ones, and connections whose peer
    /// is not admitted any more are ended.
    fn replace_security(&mut self, security: Arc<dyn TlsSecurity>) {
        let _ = security;
    }

    /// Returns the round-trip time of the primary path; 0 before the first measurement. The time excludes delays of the
    /// peer's acknowledgements: usrsctp smooths it over handshake and heartbeats, and TCP reports the minimum of some
    /// minutes. The kernel's SCTP is the exception: its smoothed time is in ticks (1 to 10 ms) and includes such
    /// delays.
    ///
    /// # Errors
    /// There is no such association.
    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration>;

    /// Requests a measurement of the round trip despite traffic: usrsctp sends heartbeats on idle paths only. The other
    /// transports measure with the data that they send.
    fn measure_round_trip(&mut self, assoc: AssocId) {
        let _ = assoc;
    }

    /// Returns the peer's addresses.
    ///
    /// # Errors
    /// There is no such association.
    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>>;

    /// Returns the peer's addresses at which it has answered. The others are only the peer's claim (RFC 9260, section
    /// 5.4) and may belong to anyone. [`TransportEvent::Path`] with [`PathState::Confirmed`] reports a newly confirmed address.
    ///
    /// # Errors
    /// There is no such association.
    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>>;

    /// Returns the addresses at which the endpoint can be reached.
    ///
    /// # Errors
    /// Errors of the stack.
    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>>;

    /// Returns the local UDP port of encapsulated packets.
    fn encapsulation_port(&self) -> Option<u16>;

    /// Returns true if the endpoint also uses IP protocol 132 directly.
    fn is_raw(&self) -> bool;

    /// Ends an association after all sent data has been acknowledged.
    ///
    /// # Errors
    /// There is no such association.
    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()>;

    /// Ends an association at once.
    ///
    /// # Errors
    /// There is no such association.
    fn abort(&mut self, assoc: AssocId) -> io::Result<()>;
}

/// Returns the SCTP implementation that [`open`] uses: the kernel's if this network namespace has it. Determined once
/// per process.
#[must_use]
pub fn provider() -> SctpProvider {
    static PROVIDER: std::sync::OnceLock<SctpProvider> = std::sync::OnceLock::new();
    *PROVIDER.get_or_init(|| {
        if kernel::is_available() {
            SctpProvider::Kernel
        } else {
            SctpProvider::Usrsctp
        }
    })
}

/// Opens an SCTP endpoint of the machine's provider: the kernel, or usrsctp.
///
/// # Errors
/// No usable local address, a port in use, or neither raw nor encapsulated packets are possible.
pub fn open(config: &TransportConfig) -> io::Result<Box<dyn TransportEndpoint>> {
    match provider() {
        SctpProvider::Kernel => Ok(Box::new(kernel::KernelEndpoint::open(config)?)),
        SctpProvider::Usrsctp => Ok(Box::new(usrsctp::UsrsctpEndpoint::open(config)?)),
    }
}
