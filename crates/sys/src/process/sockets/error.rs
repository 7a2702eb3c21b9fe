//! What went wrong with a socket.

use crate::process::files::image::FileId;
use crate::tcp_repair::RepairError;
use crate::udp::UdpError;
use thiserror::Error;

/// Why a socket does not move, or what failed.
#[derive(Debug, Error)]
pub enum SocketError {
    /// TCP.
    #[error("{0}")]
    Tcp(#[from] RepairError),
    /// UDP.
    #[error("{0}")]
    Udp(#[from] UdpError),
    /// The state of a socket that is not there, or another kind of socket's.
    #[error("state of another socket than was prepared")]
    Unknown,
    /// A socket of the tree, by its number.
    #[error("socket {id}: {error}")]
    Of {
        /// Which.
        id: FileId,
        /// What.
        error: Box<SocketError>,
    },
}

impl SocketError {
    /// Says which socket it is about.
    pub(super) fn of(self, id: FileId) -> Self {
        let error = Box::new(self);
        Self::Of { id, error }
    }
}
