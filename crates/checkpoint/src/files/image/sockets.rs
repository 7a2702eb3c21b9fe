//! Unix and netlink sockets.

use super::{ByteString, FileId};
use holdfast_sys::socket_filter::SocketFilter;
use serde::{Deserialize, Serialize};

/// A netlink socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetlinkSocket {
    /// Socket type: `SOCK_RAW` or `SOCK_DGRAM`.
    pub socket: i32,
    /// Port ID; 0 if not bound.
    pub port: u32,
    /// Multicast groups that the socket has joined.
    pub groups: Vec<u32>,
    /// Options: level, name, value.
    pub options: Vec<SocketOption>,
    /// Filter of received messages.
    pub filter: SocketFilter,
}

/// A socket option with an `int` or raw value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// Level, such as `SOL_SOCKET`.
    pub level: i32,
    /// Option name, such as `SO_PASSCRED`.
    pub name: i32,
    /// Value in the kernel's layout.
    pub value: ByteString,
}

/// A Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixSocket {
    /// Socket type: `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    pub socket: i32,
    /// Name that the socket is bound to.
    pub name: UnixName,
    /// State of the connection.
    pub link: UnixConnectionState,
    /// User and group of the process that created the socket.
    pub owner: (u32, u32),
    /// User and group of the peer process at `connect` or `listen`; of a listener, its own at `listen`.
    pub peer: Option<(u32, u32)>,
    /// Directions that are shut down: 1 reading, 2 writing.
    pub shutdown: u8,
    /// Options: level, name, value.
    pub options: Vec<SocketOption>,
    /// Filter of received messages.
    pub filter: SocketFilter,
    /// Messages that were received and not read.
    pub queue: Vec<UnixMessage>,
}

/// The name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnixName {
    /// The socket is not bound.
    None,
    /// A name in the abstract namespace.
    Abstract(ByteString),
    /// A file in the file system.
    Path {
        /// Name as passed to `bind`, possibly relative.
        name: String,
        /// Path of the file; `None` if it was unlinked.
        file: Option<String>,
        /// Owner, group and permissions of the file.
        access: (u32, u32, u32),
    },
}

/// Connection state of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnixConnectionState {
    /// Not connected.
    Unconnected,
    /// Connected to another socket of the image.
    Peer(FileId),
    /// Connected to a datagram service outside the tree, such as the system log, by the path that the service is bound
    /// to.
    Service(String),
    /// Connected to a socket that no longer exists.
    PeerClosed,
    /// Listening, with this backlog.
    Listening(u32),
    /// Waiting to be accepted by this listener, at this position in its queue.
    PendingAccept(FileId, u32),
}

/// A message in the queue of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixMessage {
    /// Bytes of the stream, or one datagram.
    pub bytes: ByteString,
    /// Descriptors in flight with the message.
    pub files: Vec<FileId>,
    /// PID, user and group of the sender, if the kernel keeps them.
    pub credentials: Option<(i32, u32, u32)>,
    /// Name of the sender of a datagram.
    pub sender_name: ByteString,
}
