//! What an endpoint tells, and what it is asked to send.

use bytes::Bytes;
use std::net::SocketAddr;

/// An association of one endpoint: the number of the local port it belongs to (0 is the endpoint's own) in the upper half, that
/// of the stack in the lower. A number may be used again after [`Event::Down`]. The highest bit is never set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssocId(pub u64);

/// In the place of a local port: a connection of [`Streams`](super::Streams). No port's number is as large.
const STREAM: u32 = 1 << 30;

impl AssocId {
    pub(super) fn of_stream(number: u32) -> Self {
        Self::new(STREAM, number)
    }

    /// Whether it is a connection over TCP, with TLS or without.
    #[must_use]
    pub fn is_stream(self) -> bool {
        self.port() == STREAM
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
pub struct Message {
    /// Payload protocol identifier, in host order: 11 is ASAP, 12 is ENRP (RFC 5354, section 6).
    pub ppid: u32,
    /// Stream.
    pub stream: u16,
    /// Deliver without regard to the order within the stream.
    pub unordered: bool,
    /// The bytes; a clone shares them.
    pub data: Bytes,
}

impl Message {
    /// An ordered message on stream 0.
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

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A whole message came.
    Message {
        /// From which association.
        assoc: AssocId,
        /// The message. Its bytes share a buffer with others of the batch: copy what is kept for long.
        message: Message,
    },
    /// An association is there.
    Up {
        /// Which.
        assoc: AssocId,
        /// Streams to send on.
        outbound_streams: u16,
        /// Streams the peer may send on.
        inbound_streams: u16,
    },
    /// The peer started anew with the same addresses: what was not acknowledged is lost, the association goes on.
    Restarted {
        /// Which.
        assoc: AssocId,
    },
    /// An association is gone; its number means nothing any more.
    Down {
        /// Which.
        assoc: AssocId,
        /// Why.
        reason: DownReason,
    },
    /// A path of an association changed.
    Path {
        /// Which association.
        assoc: AssocId,
        /// The peer's address.
        address: SocketAddr,
        /// What it is now.
        state: PathState,
    },
    /// A message was given up, with its association as a rule. Messages of more than one fragment may come back in pieces.
    SendFailed {
        /// Which association.
        assoc: AssocId,
        /// The message, or what is left of it.
        message: Message,
        /// Whether some of it was sent: the peer may have it.
        sent: bool,
    },
    /// A connection over TCP did not come up, or was let in no longer. If it was told of, or begun here, [`Event::Down`] follows.
    Refused {
        /// The other side.
        remote: SocketAddr,
        /// Why.
        why: String,
    },
}

/// Why an association ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// Both sides had finished.
    Shutdown,
    /// The peer is out of reach, or either side aborted.
    Lost,
    /// It never came up.
    NotStarted,
}

/// What a path is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// The peer answers there.
    Reachable,
    /// It does not.
    Unreachable,
    /// It has answered there for the first time.
    Confirmed,
    /// The peer added the address.
    Added,
    /// The peer removed it.
    Removed,
    /// It is the primary path.
    Primary,
}

impl PathState {
    /// `spc_state`, counted from 0.
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
