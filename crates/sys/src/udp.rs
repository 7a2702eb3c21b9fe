//! UDP sockets: options, addresses and received datagrams, out of one socket and into another.
//!
//! Reception times of queued datagrams are not kept.

mod membership;
mod options;
mod queue;

pub use membership::{Groups, Membership, join, joined};
pub(crate) use options::option_of;
pub use options::{UdpStatic, prepare, read_any, read_static};
pub use queue::{Datagram, drain, peek, peek_with_destinations, replay};

use std::io;
use thiserror::Error;

/// What went wrong with a UDP socket.
#[derive(Debug, Error)]
pub enum UdpError {
    /// Not a UDP socket over IPv4 or IPv6.
    #[error("not a UDP socket over IPv4 or IPv6")]
    NotUdp,
    /// Not bound: nobody could have sent to it.
    #[error("the socket is not bound to a port: there is nothing to move")]
    NotBound,
    /// An encapsulation is attached (`UDP_ENCAP`), such as IPsec's or L2TP's.
    #[error("the kernel decapsulates packets of this socket (UDP_ENCAP): it cannot move")]
    Encapsulation,
    /// A datagram is being put together (`MSG_MORE`, `UDP_CORK`).
    #[error("the socket is corked: send the datagram, or set UDP_CORK to 0, before the move")]
    Corked,
    /// The acceptor has no such device.
    #[error("the socket is bound to device '{0}', which the acceptor has not")]
    DeviceAbsent(String),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Names the step that an IO error comes from.
trait At<T> {
    /// `step` is what was tried.
    fn at(self, step: &'static str) -> Result<T, UdpError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &'static str) -> Result<T, UdpError> {
        self.map_err(|source| UdpError::Kernel { step, source })
    }
}
