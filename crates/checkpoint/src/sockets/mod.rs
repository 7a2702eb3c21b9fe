//! TCP and UDP sockets of a tree, which move from one host to another. The sockets are identified by the numbers that
//! [`files`](super::files) gives to open files.
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | while the tree runs | [`SocketStaticReader::read`] | [`RestoredSockets::prepare`] |
//! | in the freeze | [`FrozenSockets::extract`] | [`RestoredSockets::restore`] |
//! | commit | [`FrozenSockets::abandon`] | [`RestoredSockets::activate`], [`RestoredSockets::finish_active_options`], [`RestoredSockets::close`] |
//! | rollback | [`FrozenSockets::resume`] | dropping [`RestoredSockets`] is silent |
//!
//! Connections with a state that can be read without stopping the process ([`SentConnectionStates`]) are restored before the freeze
//! ([`RestoredSockets::restore_early`]); in the freeze, only connections that have changed since then are restored again.
//!
//! Connections that wait to be accepted do not move with their listener: see [`FrozenSockets::unaccepted`] and
//! [`unaccepted_connection`](holdfast_tcp_repair::unaccepted_connection).

mod acceptor;
pub(crate) mod crash_recovery;
mod donor;
mod error;
mod loopback_connections;
mod loopback_inject;
mod sent_connection_states;
mod timestamp_clock;

pub use acceptor::RestoredSockets;
pub use donor::{FrozenSockets, SocketStaticReader};
pub use error::SocketError;
pub use loopback_connections::{LoopbackSplitReason, SocketAddresses, split_connections};
pub use sent_connection_states::{ConnectionTransferMode, SentConnectionStates};

use holdfast_tcp_repair::udp::{Datagram, MulticastMembership, UdpStaticState};
use holdfast_tcp_repair::{
    EndedTcpSocket, PendingInput, TcpDynamicState, TcpStaticState, UnconnectedTcpSocket,
};
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
    Closed(Box<EndedTcpSocket>),
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
