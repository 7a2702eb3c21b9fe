//! State of UDP sockets: options, addresses and received datagrams, read from one socket and restored to another.
//!
//! Reception times of queued datagrams are not kept.

mod membership;
mod options;
mod queue;

pub use membership::{Groups, Membership, join, joined};
pub(crate) use options::option_of;
pub use options::{UdpStatic, prepare, read_any, read_static};
pub use queue::{Datagram, drain, peek, peek_with_destinations, replay};

use crate::wide_options::WideError;
use std::io;
use std::net::SocketAddr;
use thiserror::Error;

/// Failure to read or restore a UDP socket.
#[derive(Debug, Error)]
pub enum UdpError {
    /// The descriptor is not a UDP socket over IPv4 or IPv6.
    #[error("not a UDP socket over IPv4 or IPv6")]
    NotUdp,
    /// The socket is not bound, so no datagram can have been sent to it.
    #[error("the socket is not bound to a port: there is nothing to move")]
    NotBound,
    /// An encapsulation is attached (`UDP_ENCAP`), such as IPsec's or L2TP's.
    #[error("the kernel decapsulates packets of this socket (UDP_ENCAP): it cannot move")]
    Encapsulation,
    /// A datagram is under construction (`MSG_MORE`, `UDP_CORK`).
    #[error("the socket is corked: send the datagram, or set UDP_CORK to 0, before the move")]
    Corked,
    /// The acceptor has no such device.
    #[error("the socket is bound to device '{0}', which the acceptor has not")]
    DeviceAbsent(String),
    /// An eBPF program filters the socket's received datagrams.
    #[error(
        "an eBPF program is attached to the socket (SO_ATTACH_BPF), which the kernel does not give out: attach a classic filter (SO_ATTACH_FILTER), or detach it"
    )]
    ExtendedFilter,
    /// Timestamps are numbered (`SOF_TIMESTAMPING_OPT_ID`), and the kernel does not tell the current number.
    #[error(
        "timestamps of the socket are numbered (SOF_TIMESTAMPING_OPT_ID), and the kernel does not tell how far: ask for timestamps without numbers"
    )]
    NumberedTimestamps,
    /// Timestamps come from a hardware clock of this host (`SOF_TIMESTAMPING_BIND_PHC`).
    #[error(
        "timestamps of the socket are of a hardware clock of this host (SOF_TIMESTAMPING_BIND_PHC): ask for those of the system's clock"
    )]
    HardwareClock,
    /// Another socket of the host uses the address.
    #[error("{0} is in use there: end what has it")]
    AddressInUse(SocketAddr),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// The step, usually a system call or socket option.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl From<WideError> for UdpError {
    fn from(error: WideError) -> Self {
        match error {
            WideError::ExtendedFilter => Self::ExtendedFilter,
            WideError::NumberedTimestamps => Self::NumberedTimestamps,
            WideError::HardwareClock => Self::HardwareClock,
            WideError::DeviceAbsent(name) => Self::DeviceAbsent(name),
            WideError::Kernel(step, source) => Self::Kernel { step, source },
        }
    }
}

/// Adds the failed step's name to an IO error.
trait At<T> {
    /// Converts the error; `step` names the failed step.
    fn at(self, step: &'static str) -> Result<T, UdpError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &'static str) -> Result<T, UdpError> {
        self.map_err(|source| UdpError::Kernel { step, source })
    }
}
