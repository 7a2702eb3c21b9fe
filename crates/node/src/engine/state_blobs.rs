//! State blobs carried in frames. Opaque to `wire` and `proto`; encoded and decoded here for both sides.

use bytes::Bytes;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::failure::{Failure, NodeFault, ProtocolViolation, Text};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// State that the acceptor needs before the freeze. The application state is fixed once the program has given the
/// connection up, so it is sent here and adds nothing to the freeze.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StaticBlob {
    /// Options of the socket; `None` for a flow of a shared UDP socket.
    pub tcp: Option<TcpStaticState>,
    /// Application state for the program at the acceptor.
    pub application_state: ByteBuf,
    /// True if no program has the connection: it waits to be accepted.
    pub is_unaccepted: bool,
}

/// State that the donor extracts in the freeze.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DynamicBlob {
    /// Sequence numbers and queues; `None` for UDP.
    pub tcp: Option<TcpDynamicState>,
    /// For TCP, whole packets received out of order since *prepare*. For UDP, payloads of datagrams that the donor's
    /// program had not read.
    pub packets: Vec<ByteBuf>,
}

/// Encodes a state blob of a flow for a frame.
///
/// # Errors
/// Never for these types.
pub fn encode<T: Serialize>(blob: &T) -> Result<Bytes, Failure> {
    postcard::to_stdvec(blob)
        .map(Bytes::from)
        .map_err(|error| NodeFault::NotEncoded(Text::of(error)).into())
}

/// Decodes a state blob of a flow from a peer's frame.
///
/// # Errors
/// The bytes are damaged or from another version.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Failure> {
    postcard::from_bytes(bytes)
        .map_err(|error| ProtocolViolation::FlowStateUnreadable(Text::of(error)).into())
}
