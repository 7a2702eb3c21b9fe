//! TCP and UDP sockets of a tree, which move from one host to another. The sockets are identified by the numbers that
//! [`files`](super::files) gives to open files.
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | while the tree runs | [`Reader::read`] | [`Sockets::prepare`] |
//! | in the freeze | [`Held::extract`] | [`Sockets::restore`] |
//! | commit | [`Held::give_up`] | [`Sockets::activate`], [`Sockets::settle_awake`], [`Sockets::close`] |
//! | rollback | [`Held::resume`] | dropping [`Sockets`] is silent |
//!
//! Connections with a state that can be read without stopping the process ([`Told`]) are restored before the freeze
//! ([`Sockets::inject`]); in the freeze, only connections that have changed since then are restored again.
//!
//! Connections that wait to be accepted do not move with their listener: see [`Held::unaccepted`] and
//! [`queued`](crate::tcp_repair::queued()).

mod acceptor;
mod clock;
mod donor;
mod error;
pub(crate) mod left;
mod loopback;
mod near;
mod told;

pub use acceptor::Sockets;
pub use donor::{Held, Reader};
pub use error::SocketError;
pub use loopback::{Ends, Halved, halved};
pub use told::{Told, Way};

use crate::tcp_repair::{Rest, TcpClosed, TcpDynamic, TcpStatic, TcpUnconnected};
use crate::udp::{Datagram, Membership, UdpStatic};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Fixed properties of a socket, and its options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketStatic {
    /// A TCP connection.
    Connection(Box<TcpStatic>),
    /// A TCP socket that listens, or is not connected.
    Unconnected(Box<TcpUnconnected>),
    /// A UDP socket.
    Datagrams(Box<UdpStatic>),
    /// A TCP connection that its peer has reset: a clone's socket has this state if the original's socket is connected.
    Ended {
        /// True for an IPv6 socket.
        v6_socket: bool,
    },
    /// A TCP socket that its program has not closed, after the end of its connection.
    Closed(Box<TcpClosed>),
}

impl SocketStatic {
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
    pub fn of_a_copy(self) -> Self {
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
    pub fn state_of_a_copy(&self) -> Option<SocketState> {
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
    Connection(Box<TcpDynamic>),
    /// A TCP socket without a connection, which has no further state.
    Unconnected,
    /// Datagrams that were received and not read, and the multicast groups that the socket has joined.
    Datagrams(Vec<Datagram>, Vec<Membership>),
    /// State of a TCP socket after the end of its connection.
    Closed(Rest),
}
