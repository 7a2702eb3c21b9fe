//! The control API's server: HTTP on a Unix socket, and on TCP for metrics.

pub mod http_responses;
mod limited_listener;
mod metrics_text;
mod socket_user;

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::serve::Listener;
use tokio::net::{TcpListener, UnixListener};

use limited_listener::{LimitedListener, ListenerLimits};

pub use limited_listener::SourceAddress;
pub use metrics_text::metrics_response;
pub use socket_user::SocketUser;

/// Serves HTTP until the task ends.
pub async fn serve<L: Listener>(listener: L, router: Router)
where
    L::Addr: SourceAddress + std::fmt::Debug,
{
    let listener = LimitedListener::new(listener, ListenerLimits::default());
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the control API has ended");
    }
}

/// Serves HTTP until the task ends. Handlers can extract the caller's [`SocketUser`] as connection information.
pub async fn serve_users(listener: UnixListener, router: Router) {
    let listener = LimitedListener::new(listener, ListenerLimits::default());
    let service = router.into_make_service_with_connect_info::<SocketUser>();
    if let Err(error) = axum::serve(listener, service).await {
        tracing::error!(%error, "the control API has ended");
    }
}

/// Returns a listener for metrics.
///
/// # Errors
/// The address cannot be listened on.
pub fn metrics_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let failed = |error: io::Error| {
        let text = format!("{address}: {error}; correct [metrics] listen");
        io::Error::new(error.kind(), text)
    };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}
