//! TCP and UDP sockets of a tree, which move from one host to another. The sockets are identified by the numbers that
//! [`files`](super::files) gives to open files.
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | while the tree runs | [`SocketReader::read`] | [`RestoredSockets::prepare`] |
//! | in the freeze | [`HeldSockets::extract`] | [`RestoredSockets::restore`] |
//! | commit | [`HeldSockets::abandon`] | [`RestoredSockets::activate`], [`RestoredSockets::finish_active_options`], [`RestoredSockets::close`] |
//! | rollback | [`HeldSockets::resume`] | dropping [`RestoredSockets`] is silent |
//!
//! Connections with a state that can be read without stopping the process ([`SentStates`]) are restored before the freeze
//! ([`RestoredSockets::inject`]); in the freeze, only connections that have changed since then are restored again.
//!
//! Connections that wait to be accepted do not move with their listener: see [`HeldSockets::unaccepted`] and
//! [`unaccepted_connection`](crate::tcp_repair::unaccepted_connection).

mod acceptor;
pub(crate) mod crash_recovery;
mod donor;
mod error;
mod loopback_connections;
mod loopback_inject;
mod sent_states;
mod timestamp_clock;

pub use acceptor::RestoredSockets;
pub use donor::{HeldSockets, SocketReader};
pub use error::SocketError;
pub use loopback_connections::{SocketAddresses, SplitReason, split_connections};
pub use sent_states::{ConnectionTransferMode, SentStates};

use crate::tcp_repair::{
    ClosedTcpSocket, PendingInput, TcpDynamicState, TcpStaticState, UnconnectedTcpSocket,
};
use crate::udp::{Datagram, MulticastMembership, UdpStaticState};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Fixed properties of a socket, and its options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketStaticState {
    /// A TCP connection.
    Connection(Box<TcpStaticState>),
    /// A TCP socket that listens, or is not connected.
    Unconnected(Box<UnconnectedTcpSocket>),
    /// A UDP socket.
    Datagrams(Box<UdpStaticState>),
    /// A TCP connection that its peer has reset: a clone's socket has this state if the original's socket is connected.
    Ended {
        /// True for an IPv6 socket.
        v6_socket: bool,
    },
    /// A TCP socket that its program has not closed, after the end of its connection.
    Closed(Box<ClosedTcpSocket>),
}

impl SocketStaticState {
    /// Returns own and peer address of a socket that has both.
    #[must_use]
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        match self {
            Self::Connection(fixed) => Some((fixed.local, fixed.remote)),
            Self::Unconnected(_) | Self::Ended { .. } | Self::Closed(_) => None,
            Self::Datagrams(fixed) => Some((fixed.local, fixed.remote?)),
        }
    }

    /// Returns true for an IPv6 socket.
    #[must_use]
    pub fn is_v6(&self) -> bool {
        match self {
            Self::Connection(fixed) => fixed.v6_socket,
            Self::Unconnected(fixed) => fixed.v6_socket,
            Self::Datagrams(fixed) => fixed.v6_socket,
            Self::Ended { v6_socket } => *v6_socket,
            Self::Closed(fixed) => fixed.v6_socket,
        }
    }

    /// Returns the properties of a clone's socket: connections stay with the original.
    #[must_use]
    pub fn for_clone(self) -> Self {
        match self {
            Self::Connection(fixed) => Self::Ended {
                v6_socket: fixed.v6_socket,
            },
            Self::Closed(fixed) => Self::Ended {
                v6_socket: fixed.v6_socket,
            },
            other => other,
        }
    }

    /// Returns the initial state of a clone's socket; `None` if the socket needs none. Unread data and multicast groups
    /// stay with the original.
    #[must_use]
    pub fn clone_state(&self) -> Option<SocketState> {
        match self {
            Self::Unconnected(_) => Some(SocketState::Unconnected),
            Self::Datagrams(_) => Some(SocketState::Datagrams(Vec::new(), Vec::new())),
            Self::Connection(_) | Self::Ended { .. } | Self::Closed(_) => None,
        }
    }
}

/// State of a socket in the stopped tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketState {
    /// State of a TCP connection.
    Connection(Box<TcpDynamicState>),
    /// A TCP socket without a connection, which has no further state.
    Unconnected,
    /// Datagrams that were received and not read, and the multicast groups that the socket has joined.
    Datagrams(Vec<Datagram>, Vec<MulticastMembership>),
    /// State of a TCP socket after the end of its connection.
    Closed(PendingInput),
}
