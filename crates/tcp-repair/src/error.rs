//! Reasons that a connection cannot be moved, and failures while moving one.

use crate::non_integer_options::NonIntegerOptionsError;
use holdfast_sys::tcp_info::TcpState;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use thiserror::Error;

/// A state or feature of a socket that cannot be moved. The check precedes any change, so the connection
/// continues where it is. Each text says how to remove the obstacle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum UnmovableReason {
    /// The descriptor is not a TCP stream socket over IPv4 or IPv6.
    #[error("not a TCP socket over IPv4 or IPv6: only TCP connections can be handed off this way")]
    NotTcp,
    /// The socket is a listener.
    #[error("a listening socket cannot move: hand off the connections it accepted")]
    Listening,
    /// The three-way handshake is not complete.
    #[error(
        "the handshake is not complete (state {0:?}): try again once the connection is established"
    )]
    Handshake(TcpState),
    /// Both sides have closed, the connection was reset, or the state is TIME-WAIT.
    #[error("the connection is closed, reset or in TIME-WAIT: there is nothing left to move")]
    Closed,
    /// Urgent data was received and not read.
    #[error("urgent data is waiting: read it (MSG_OOB, or SO_OOBINLINE and read) and try again")]
    UrgentData,
    /// The socket uses Multipath TCP (RFC 8684).
    #[error(
        "Multipath TCP cannot move: listen with IPPROTO_TCP instead of IPPROTO_MPTCP (or set net.mptcp.enabled=0)"
    )]
    Mptcp,
    /// The connection uses TCP MD5 signatures (RFC 2385).
    #[error(
        "the connection has TCP MD5 keys (RFC 2385), which cannot be read from the kernel: use TLS or IPsec"
    )]
    Md5,
    /// The connection uses the TCP authentication option (RFC 5925).
    #[error(
        "the connection has TCP-AO keys (RFC 5925), which cannot be read from the kernel: use TLS or IPsec"
    )]
    TcpAo,
    /// An upper layer protocol is attached, such as kernel TLS.
    #[error(
        "the kernel handles '{0}' on this connection (TCP_ULP), and its state cannot be read: use an implementation \
         in user space"
    )]
    UpperLayerProtocol(String),
    /// An eBPF program filters the socket's received packets.
    #[error(
        "an eBPF program is attached to the socket (SO_ATTACH_BPF), which cannot be read from the kernel: attach a \
         classic filter (SO_ATTACH_FILTER), or detach it"
    )]
    EbpfFilter,
    /// The socket has a peek offset (`SO_PEEK_OFF`).
    #[error("the socket has a peek offset (SO_PEEK_OFF): set it to -1")]
    PeekOffset,
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
    /// An address is valid on this host's link only.
    #[error(
        "{0} is a link-local address, which is invalid on another link: use a routable address"
    )]
    HostOnlyAddress(std::net::IpAddr),
    /// The socket is bound to a device that the acceptor lacks.
    #[error(
        "the socket is bound to device '{0}', which the acceptor does not have: create it there, or do not bind to it"
    )]
    DeviceAbsent(String),
    /// The congestion control algorithm is not available at the acceptor.
    #[error(
        "congestion control '{0}' is not available at the acceptor: load it there (modprobe tcp_{0})"
    )]
    CongestionControlAbsent(String),
    /// A connection attempt failed, and the program has not read the error yet.
    #[error(
        "a connection was refused or timed out, and the program has not read the error yet: try again"
    )]
    NeverConnected,
    /// The socket belongs to a network namespace other than the caller's.
    #[error(
        "the socket belongs to another network namespace: run the daemon in the namespace of its servers"
    )]
    OtherNamespace,
}

/// Failure to save or restore a connection.
#[derive(Debug, Error)]
pub enum RepairError {
    /// The connection cannot be moved, and was not touched.
    #[error("{0}")]
    Unmovable(#[from] UnmovableReason),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// The step, as the kernel names it.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another socket of the host uses the address.
    #[error(
        "{0} is in use at the acceptor: end the program that uses it, or try again if connections of that port have \
         just closed"
    )]
    AddressInUse(SocketAddr),
    /// The state contradicts itself, or the kernel's state.
    #[error("inconsistent state: {0}")]
    Inconsistent(&'static str),
}

impl From<NonIntegerOptionsError> for RepairError {
    fn from(error: NonIntegerOptionsError) -> Self {
        match error {
            NonIntegerOptionsError::EbpfFilter => UnmovableReason::EbpfFilter.into(),
            NonIntegerOptionsError::NumberedTimestamps => {
                UnmovableReason::NumberedTimestamps.into()
            }
            NonIntegerOptionsError::HardwareClock => UnmovableReason::HardwareClock.into(),
            NonIntegerOptionsError::DeviceAbsent(name) => {
                UnmovableReason::DeviceAbsent(name).into()
            }
            NonIntegerOptionsError::Kernel(step, source) => Self::Kernel { step, source },
        }
    }
}

/// Adds the failed step's name to an IO error.
pub(super) trait StepContext<T> {
    /// Converts the error; `step` names the failed step as the kernel does.
    fn at_step(self, step: &'static str) -> Result<T, RepairError>;
}

impl<T> StepContext<T> for io::Result<T> {
    fn at_step(self, step: &'static str) -> Result<T, RepairError> {
        self.map_err(|source| RepairError::Kernel { step, source })
    }
}

/// Adds the address to a failure to bind.
pub(super) fn map_bind_error(
    outcome: io::Result<()>,
    address: SocketAddr,
) -> Result<(), RepairError> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(RepairError::AddressInUse(address))
        }
        outcome => outcome.at_step("bind"),
    }
}
