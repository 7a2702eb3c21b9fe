//! Sockets that are not of the Internet.

use super::{Bytes, FileId};
use crate::socket_filter::SocketFilter;
use serde::{Deserialize, Serialize};

/// A netlink socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetlinkSocket {
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    pub socket: i32,
    /// Its address; 0 is not bound.
    pub port: u32,
    /// Groups it has joined.
    pub groups: Vec<u32>,
    /// Options: level, name, value.
    pub options: Vec<SocketOption>,
    /// What filters received messages.
    pub filter: SocketFilter,
}

/// A socket option with an `int` or raw value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// Such as `SOL_SOCKET`.
    pub level: i32,
    /// Such as `SO_PASSCRED`.
    pub name: i32,
    /// In the kernel's layout.
    pub value: Bytes,
}

/// A Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixSocket {
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    pub socket: i32,
    /// Its name.
    pub name: UnixName,
    /// How it is connected.
    pub link: UnixLink,
    /// Who made the socket: user and group.
    pub owner: (u32, u32),
    /// User and group of who connected or listened at the other end; of a listener, who listened.
    pub peer: Option<(u32, u32)>,
    /// Halves that are shut: 1 reading, 2 writing.
    pub shutdown: u8,
    /// Options that differ from a new socket's.
    pub options: Vec<SocketOption>,
    /// What filters received messages.
    pub filter: SocketFilter,
    /// Received and not read.
    pub queue: Vec<UnixMessage>,
}

/// The name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnixName {
    /// Not bound.
    None,
    /// A name without a file.
    Abstract(Bytes),
    /// A file.
    Path {
        /// As it was bound, maybe relative.
        name: String,
        /// Where the file is; none if it was removed.
        file: Option<String>,
        /// Its owner, group and permissions.
        access: (u32, u32, u32),
    },
}

/// What a Unix socket is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnixLink {
    /// Nothing.
    Alone,
    /// Another socket of the image.
    To(FileId),
    /// A datagram service outside the tree, by the file it is bound to, such as the system log.
    Service(String),
    /// A socket that is gone.
    Gone,
    /// It listens; connections that wait, at most.
    Listening(u32),
    /// It waits to be accepted by this listener, at this place in its queue.
    Waiting(FileId, u32),
}

/// What is in the queue of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixMessage {
    /// Bytes of the stream, or a datagram.
    pub bytes: Bytes,
    /// Descriptors with it.
    pub files: Vec<FileId>,
    /// The sender's PID, user and group, where they are kept.
    pub credentials: Option<(i32, u32, u32)>,
    /// The sender's name, of a datagram.
    pub from: Bytes,
}
