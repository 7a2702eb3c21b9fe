//! Transports of Reliable Server Pooling: SCTP for the standard's own protocols, TCP and TLS for ASAP, multicast for announces. A
//! pool's service is spoken over whatever its servers speak; where that is TCP or UDP, the standard library's sockets are all
//! there is to it.
//!
//! [`Streams`] are connections over TCP behind the same face as SCTP, [`Joined`] is both in one. SCTP comes from the kernel where it has it, else from libusrsctp; both stand behind [`Endpoint`]. An endpoint is a
//! one-to-many socket (RFC 6458, section 3) for an event loop:
//!
//! 1. wait until [`Endpoint::fd`] is readable,
//! 2. [`Endpoint::recv_batch`] takes in what came,
//! 3. any number of [`Endpoint::send`],
//! 4. [`Endpoint::flush`] before waiting again.
//!
//! System calls are made for batches of packets or messages, not for each.

mod assembly;
mod config;
mod event;
mod joined;
mod kernel;
mod layout;
mod multicast;
mod stream;
mod usrsctp;

pub use config::{Config, ENCAPSULATION_PORT, Failure};
pub use event::{AssocId, DownReason, Event, Message, PathState};
pub use joined::Joined;
pub use multicast::{Announced, Multicast};
pub use stream::{
    Frames, MessageLength, Over, Rules, Security, StreamConfig, StreamLimits, Streams,
};

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Whose SCTP there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The kernel's.
    Kernel,
    /// libusrsctp, in this process.
    Usrsctp,
}

/// An SCTP endpoint with many associations.
pub trait Endpoint: Send {
    /// Readable when [`recv_batch`](Self::recv_batch) has work to do.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Takes in what came and appends what it means to `events`; never blocks. Bounded: call it again while the descriptor is
    /// readable.
    ///
    /// # Errors
    /// The stack's sockets are unusable. Nothing that a peer sends causes it.
    fn recv_batch(&mut self, events: &mut Vec<Event>) -> io::Result<()>;

    /// Hands over a message. It leaves with the next [`flush`](Self::flush) at the latest.
    ///
    /// # Errors
    /// `WouldBlock`: the association has as much unsent as its buffer takes. `NotConnected`: there is no such association. With the
    /// kernel's SCTP both may come as [`Event::SendFailed`] instead, since it hears of messages only on flush.
    fn send(&mut self, assoc: AssocId, message: &Message) -> io::Result<()>;

    /// The same messages to many associations, to each in as few packets as hold them, whatever `no_delay` says. Appends to `taken`,
    /// for each association, how many of them it had room for, from the first on. One that is gone takes all: an event says that it
    /// is gone. The caller encodes once and the bytes are shared up to here. Beyond, the kernel takes many in one system call but
    /// copies for each association, since a peer's packets differ; usrsctp needs no system call, and copies likewise.
    fn send_bundles(&mut self, assocs: &[AssocId], messages: &[Message], taken: &mut Vec<usize>);

    /// Puts everything on the wire.
    ///
    /// # Errors
    /// The stack's sockets are unusable. A lost packet is no error.
    fn flush(&mut self) -> io::Result<()>;

    /// Starts an association with the peer that has all these addresses (one port); [`Event::Up`] or [`Event::Down`] follows.
    /// Packets go inside UDP to port `encapsulation`, if given.
    ///
    /// # Errors
    /// No such route, or an association with that peer is there already (`AlreadyExists`).
    fn connect(&mut self, remote: &[SocketAddr], encapsulation: Option<u16>)
    -> io::Result<AssocId>;

    /// The same from a further local port, which lives as long as the association: the only way to several associations with one
    /// peer, such as a load generator needs.
    ///
    /// # Errors
    /// As of [`connect`](Self::connect).
    fn connect_apart(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId>;

    /// Starts a connection over TCP or TLS, where the endpoint has such; [`Event::Up`] or [`Event::Down`] follows.
    ///
    /// # Errors
    /// `Unsupported`; no such route, or no certificates.
    fn connect_stream(&mut self, remote: SocketAddr, over: &Over) -> io::Result<AssocId> {
        let _ = (remote, over);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whose certificate the other side of an association has shown.
    fn name(&self, assoc: AssocId) -> Option<String> {
        let _ = assoc;
        None
    }

    /// Other certificates, or others are admitted: new connections go by that, and those whose other side is admitted no
    /// longer end.
    fn secure_anew(&mut self, security: Arc<dyn Security>) {
        let _ = security;
    }

    /// Round-trip time of the primary path; 0 also before the first measurement. What a peer's delayed acknowledgements add is not in
    /// it: usrsctp's is smoothed over handshake and heartbeats, TCP's is the least of some minutes. The kernel's SCTP gives its
    /// smoothed time in ticks (1 to 10 ms), with such delays in it.
    ///
    /// # Errors
    /// There is no such association.
    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration>;

    /// Has the round trip measured, though there is traffic: usrsctp sends heartbeats on idle paths only. The others measure by
    /// what they send.
    fn measure(&mut self, assoc: AssocId) {
        let _ = assoc;
    }

    /// The peer's addresses.
    ///
    /// # Errors
    /// There is no such association.
    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>>;

    /// Those of the peer's addresses at which it has answered. The others it only says are its own (RFC 9260, section 5.4): they may be
    /// anybody's. [`Event::Path`] tells of one that is [`PathState::Confirmed`].
    ///
    /// # Errors
    /// There is no such association.
    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>>;

    /// Where the endpoint can be reached.
    ///
    /// # Errors
    /// What the stack gives.
    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>>;

    /// The local UDP port of encapsulated packets.
    fn encapsulation_port(&self) -> Option<u16>;

    /// Whether IP protocol 132 is spoken too.
    fn is_raw(&self) -> bool;

    /// Ends an association after what was sent has been acknowledged.
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

/// Whose SCTP [`open`] uses: the kernel's if it has one in this network namespace. Asked once in a process.
#[must_use]
pub fn provider() -> Provider {
    static FOUND: std::sync::OnceLock<Provider> = std::sync::OnceLock::new();
    *FOUND.get_or_init(|| {
        if kernel::is_there() {
            Provider::Kernel
        } else {
            Provider::Usrsctp
        }
    })
}

/// Opens an endpoint.
///
/// # Errors
/// No usable local address, a port in use, or neither raw nor encapsulated packets possible.
pub fn open(config: &Config) -> io::Result<Box<dyn Endpoint>> {
    match provider() {
        Provider::Kernel => Ok(Box::new(kernel::KernelEndpoint::open(config)?)),
        Provider::Usrsctp => Ok(Box::new(usrsctp::UsrsctpEndpoint::open(config)?)),
    }
}
