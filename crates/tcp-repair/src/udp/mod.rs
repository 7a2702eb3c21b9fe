//! State of UDP sockets: options, addresses and received datagrams, read from one socket and restored to another.
//!
//! Reception times of queued datagrams are not kept.

mod datagram_queue;
mod multicast_membership;
mod options;

pub use datagram_queue::{Datagram, drain, peek, peek_with_destinations, replay_packet};
pub use multicast_membership::{HostMulticastGroups, MulticastMembership, join, memberships};
pub use options::option_by_id;
pub use options::{UdpStaticState, prepare, read_static, read_static_unbound_too};

use crate::non_integer_options::NonIntegerOptionsError;
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
    #[error("the socket is bound to device '{0}', which the acceptor does not have")]
    DeviceAbsent(String),
    /// An eBPF program filters the socket's received datagrams.
    #[error(
        "an eBPF program is attached to the socket (SO_ATTACH_BPF), which cannot be read from the kernel: attach a \
         classic filter (SO_ATTACH_FILTER), or detach it"
    )]
    EbpfFilter,
    /// Timestamps are numbered (`SOF_TIMESTAMPING_OPT_ID`), and the kernel does not tell the current number.
    #[error(
        "the socket's timestamps are numbered (SOF_TIMESTAMPING_OPT_ID), and the next number cannot be read from the \
         kernel: request timestamps without numbers"
    )]
    NumberedTimestamps,
    /// Timestamps come from a hardware clock of this host (`SOF_TIMESTAMPING_BIND_PHC`).
    #[error(
        "the socket's timestamps come from a hardware clock of this host (SOF_TIMESTAMPING_BIND_PHC): request \
         timestamps of the system clock"
    )]
    HardwareClock,
    /// Another socket of the host uses the address.
    #[error("{0} is in use at the acceptor: end the program that uses it")]
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

impl From<NonIntegerOptionsError> for UdpError {
    fn from(error: NonIntegerOptionsError) -> Self {
        match error {
            NonIntegerOptionsError::EbpfFilter => Self::EbpfFilter,
            NonIntegerOptionsError::NumberedTimestamps => Self::NumberedTimestamps,
            NonIntegerOptionsError::HardwareClock => Self::HardwareClock,
            NonIntegerOptionsError::DeviceAbsent(name) => Self::DeviceAbsent(name),
            NonIntegerOptionsError::Kernel(step, source) => Self::Kernel { step, source },
        }
    }
}

/// Adds the failed step's name to an IO error.
trait StepContext<T> {
    /// Converts the error; `step` names the failed step.
    fn at_step(self, step: &'static str) -> Result<T, UdpError>;
}

impl<T> StepContext<T> for io::Result<T> {
    fn at_step(self, step: &'static str) -> Result<T, UdpError> {
        self.map_err(|source| UdpError::Kernel { step, source })
    }
}
