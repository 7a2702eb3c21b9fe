//! The user at the other end of a Unix socket.

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

use super::limited_listener::LimitedListener;

/// The user that opened a connection, as the kernel recorded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketUser {
    /// The user's number; none if the kernel does not say.
    pub uid: Option<u32>,
}

impl Connected<IncomingStream<'_, LimitedListener<UnixListener>>> for SocketUser {
    fn connect_info(stream: IncomingStream<'_, LimitedListener<UnixListener>>) -> SocketUser {
        let credentials = stream.io().io().peer_cred();
        SocketUser {
            uid: credentials.ok().map(|credentials| credentials.uid()),
        }
    }
}
