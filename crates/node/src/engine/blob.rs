//! The blobs that travel inside frames: opaque to `wire` and `proto`, coded here once for both sides.

use bytes::Bytes;
use holdfast_sys::tcp_repair::{TcpDynamic, TcpStatic};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// What the acceptor needs before the freeze. The application state is fixed once the program has given the connection
/// up, so it travels here and costs the freeze nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StaticBlob {
    /// The socket; `None` for a flow of a shared UDP socket, which has none of its own.
    pub tcp: Option<TcpStatic>,
    /// What the server program wants its successor to know.
    pub application: ByteBuf,
    /// No program has it: it waits to be accepted.
    pub unaccepted: bool,
}

/// What is taken in the freeze.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DynamicBlob {
    /// Sequence numbers and queues; `None` for UDP.
    pub tcp: Option<TcpDynamic>,
    /// TCP: packets received out of order since *prepare*, whole. UDP: datagrams the donor's program had not read,
    /// payload only.
    pub packets: Vec<ByteBuf>,
}

/// Encodes a blob.
///
/// # Errors
/// Never for these types; the text is for the log.
pub fn encode<T: Serialize>(blob: &T) -> Result<Bytes, String> {
    postcard::to_stdvec(blob)
        .map(Bytes::from)
        .map_err(|error| error.to_string())
}

/// Decodes a peer's blob.
///
/// # Errors
/// The bytes are not such a blob: another version, or damaged.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, String> {
    postcard::from_bytes(bytes)
        .map_err(|error| format!("state of another version of holdfastd, or damaged ({error}); run the same version on all nodes"))
}
