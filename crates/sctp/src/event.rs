//! Events and messages of an endpoint.

use bytes::Bytes;
use std::net::SocketAddr;

/// ID of an association of one endpoint: the number of its local port (0 is the endpoint's own) in the upper half, the
/// stack's number in the lower half. An ID may be reused after [`TransportEvent::Down`]. The highest bit is never set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssocId(pub u64);

/// Port number that marks a connection of [`TcpTransport`](super::TcpTransport), larger than any local port's
/// number.
const STREAM_PORT: u32 = 1 << 30;

impl AssocId {
    pub(super) fn from_stream_number(number: u32) -> Self {
        Self::new(STREAM_PORT, number)
    }

    /// Returns true for a connection over TCP, with or without TLS.
    #[must_use]
    pub fn is_stream(self) -> bool {
        self.port() == STREAM_PORT
    }

    pub(super) fn new(port: u32, id: u32) -> Self {
        Self(u64::from(port) << 32 | u64::from(id))
    }

    pub(super) fn port(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) fn id(self) -> u32 {
        self.0 as u32
    }
}

/// A message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageToSend {
    /// Payload protocol identifier, in host order: 11 is ASAP, 12 is ENRP (RFC 5354, section 6).
    pub ppid: u32,
    /// SCTP stream number.
    pub stream: u16,
    /// Deliver without regard to the order within the stream.
    pub unordered: bool,
    /// Payload; a clone shares the bytes.
    pub data: Bytes,
}

impl MessageToSend {
    /// Makes an ordered message on stream 0.
    #[must_use]
    pub fn new(ppid: u32, data: Bytes) -> Self {
        Self {
            ppid,
            stream: 0,
            unordered: false,
            data,
        }
    }
}

/// Notification from an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// A whole message arrived.
    Message {
        /// Association that the message arrived on.
        assoc: AssocId,
        /// The message. Its bytes share a buffer with others of the batch: copy bytes that are kept for long.
        message: MessageToSend,
    },
    /// An association is established.
    Up {
        /// ID of the association.
        assoc: AssocId,
        /// Number of streams to send on.
        outbound_streams: u16,
        /// Number of streams that the peer may send on.
        inbound_streams: u16,
    },
    /// The peer restarted the association from the same addresses: unacknowledged data is lost, the association
    /// continues.
    Restarted {
        /// ID of the association.
        assoc: AssocId,
    },
    /// An association has ended; its ID becomes invalid.
    Down {
        /// ID of the association.
        assoc: AssocId,
        /// Reason for the end.
        reason: DownReason,
    },
    /// A path of an association changed.
    Path {
        /// ID of the association.
        assoc: AssocId,
        /// The peer's address.
        address: SocketAddr,
        /// New state of the path.
        state: PathState,
    },
    /// A message was discarded, usually with its association. Messages of several fragments may be reported in pieces.
    SendFailed {
        /// ID of the association.
        assoc: AssocId,
        /// The message, or its remaining part.
        message: MessageToSend,
        /// True if part of it was sent: the peer may have received it.
        was_sent: bool,
    },
    /// A TCP connection was not established, or its peer is not admitted any more. If the connection was reported as up
    /// or was started here, [`TransportEvent::Down`] follows.
    Refused {
        /// Address of the other side.
        remote: SocketAddr,
        /// Reason for the refusal.
        reason: String,
    },
}

/// Reason for an association's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// Both sides shut the association down.
    Shutdown,
    /// The peer is unreachable, or either side aborted.
    Lost,
    /// The association was never established.
    NotStarted,
}

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// The peer answers at the address.
    Reachable,
    /// The peer does not answer at the address.
    Unreachable,
    /// The peer answered at the address for the first time.
    Confirmed,
    /// The peer added the address.
    Added,
    /// The peer removed the address.
    Removed,
    /// The path became the primary path.
    Primary,
}

impl PathState {
    /// Converts `spc_state`, counted from 0.
    pub(super) fn from_number(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::Reachable,
            1 => Self::Unreachable,
            2 => Self::Removed,
            3 => Self::Added,
            4 => Self::Primary,
            5 => Self::Confirmed,
            _ => return None,
        })
    }
}
