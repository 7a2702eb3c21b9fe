//! Errors of moving sockets.

use crate::files::image::FileId;
use holdfast_tcp_repair::RepairError;
use holdfast_tcp_repair::udp::UdpError;
use thiserror::Error;

/// Reason why a socket cannot move, or a step that failed.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Error of a TCP socket.
    #[error("{0}")]
    Tcp(#[from] RepairError),
    /// Error of a UDP socket.
    #[error("{0}")]
    Udp(#[from] UdpError),
    /// State for a socket that does not exist, or for another kind of socket.
    #[error("the state does not match the prepared socket")]
    Unknown,
    /// Error of a socket of the tree.
    #[error("socket {id}: {error}")]
    Socket {
        /// Number of the socket.
        id: FileId,
        /// The error at that socket.
        error: Box<SocketError>,
    },
}

impl SocketError {
    /// Adds the number of the socket that has the error.
    pub(super) fn with_id(self, id: FileId) -> Self {
        let error = Box::new(self);
        Self::Socket { id, error }
    }
}
