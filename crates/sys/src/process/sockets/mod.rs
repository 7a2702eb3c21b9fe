//! TCP and UDP sockets of a tree, out of one host and into another, by the numbers that [`files`](super::files) gives
//! open files.
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | while the tree runs | [`Reader::read`] | [`Sockets::prepare`] |
//! | in the freeze | [`Held::extract`] | [`Sockets::restore`] |
//! | commit | [`Held::give_up`] | [`Sockets::activate`], [`Sockets::settle_awake`], [`Sockets::close`] |
//! | rollback | [`Held::resume`] | dropping [`Sockets`] is silent |
//!
//! Connections whose state can be seen from beside them ([`Told`]) are restored ahead of the freeze ([`Sockets::inject`]);
//! in the freeze only those that went on since then are restored again.
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

/// What a socket was born with, and its options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketStatic {
    /// A TCP connection.
    Connection(Box<TcpStatic>),
    /// A TCP socket that listens, or is not connected.
    Unconnected(Box<TcpUnconnected>),
    /// A UDP socket.
    Datagrams(Box<UdpStatic>),
    /// A TCP connection that its peer has reset: a copy's, where the original has a connection.
    Ended {
        /// Whether the socket is an IPv6 one.
        v6_socket: bool,
    },
    /// A TCP socket whose connection has ended, and which its program has not closed.
    Closed(Box<TcpClosed>),
}

impl SocketStatic {
    /// Own and the peer's address, of a socket that has both.
    #[must_use]
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        match self {
            Self::Connection(fixed) => Some((fixed.local, fixed.remote)),
            Self::Unconnected(_) | Self::Ended { .. } | Self::Closed(_) => None,
            Self::Datagrams(fixed) => Some((fixed.local, fixed.remote?)),
        }
    }

    /// Whether it is an IPv6 socket.
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

    /// What a copy has of a socket that stays with the original.
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

    /// The state that a copy's socket begins with; none where it needs none. What waits to be read is the
    /// original's, and so are multicast groups.
    #[must_use]
    pub fn state_of_a_copy(&self) -> Option<SocketState> {
        match self {
            Self::Unconnected(_) => Some(SocketState::Unconnected),
            Self::Datagrams(_) => Some(SocketState::Datagrams(Vec::new(), Vec::new())),
            Self::Connection(_) | Self::Ended { .. } | Self::Closed(_) => None,
        }
    }
}

/// What a socket had when the tree stood still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketState {
    /// Of a TCP connection.
    Connection(Box<TcpDynamic>),
    /// Of a TCP socket without a connection.
    Unconnected,
    /// Datagrams that were received and not read, and the multicast groups that it had joined.
    Datagrams(Vec<Datagram>, Vec<Membership>),
    /// Of a TCP socket whose connection has ended.
    Closed(Rest),
}
