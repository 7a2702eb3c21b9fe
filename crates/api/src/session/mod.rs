//! A program's session with the daemon of its host.
//!
//! Each session has one thread that talks to the daemon, for both interfaces: the asynchronous interface waits by
//! wakers, the blocking one by parking or in poll(2). So the protocol is implemented once ([`session_core`]), and a program
//! with busy threads still answers the daemon.

mod notifications;
mod session_core;
mod session_thread;
mod shared;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
mod to_daemon_queue;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use notifications::{
    FlowNotifications, HandedOffConnection, Notifier, ServiceInbox, block_on, lock,
};
pub(crate) use session_core::RegisteredService;
pub(crate) use shared::{FlowRegistration, ServiceSlot, SessionHandle, SharedSessionCore};
pub use udp::{Association, UdpEvent};
pub(crate) use udp::{ManagedUdpSocket, UdpServiceState};

use crate::Protocol;
use crate::app::Channel;

/// A socket that the session keeps alive while its connection is in transit.
pub(crate) type SharedDescriptor = Arc<dyn AsFd + Send + Sync>;

/// A program's session with the daemon of its host. Clones are the same session, which ends with the last clone,
/// service and connection.
///
/// A session outlives the daemon: when the daemon dies, connections are still served, connections in a handoff wait
/// silently, and the session reconnects when the daemon returns.
#[derive(Clone, Debug)]
pub struct Session {
    pub(crate) handle: Arc<SessionHandle>,
    /// See [`Session::without_handoffs`].
    handoff_refusal: Option<Arc<str>>,
}

/// Maximum time for a daemon's first answer after it accepted the connection.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason that there is no session.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No daemon listens on the socket.
    #[error(
        "no daemon at {path}: {error} (is holdfastd running, and may this user open the socket?)"
    )]
    NoDaemon {
        /// The socket's path.
        path: String,
        /// The system's error.
        error: io::Error,
    },
    /// The daemon accepted the connection but did not open a session.
    #[error("the daemon at {path} did not open the session: {reason}")]
    Refused {
        /// The socket's path.
        path: String,
        /// The daemon's behaviour.
        reason: String,
    },
}

impl Session {
    /// Opens a session with the daemon at `path` ([`app::SOCKET_PATH`](crate::app::SOCKET_PATH) by default) under the
    /// name of this program's file. Waits for the daemon's answer, 5 seconds at most.
    ///
    /// # Errors
    /// See [`ConnectError`]. A program that should also serve without Holdfast continues with [`Session::detached`] or
    /// [`Session::connect_later`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let path_text = path.as_ref().display().to_string();
        let channel = Channel::connect(&path).map_err(|error| ConnectError::NoDaemon {
            path: path_text.clone(),
            error,
        })?;
        let session = Self::start(path.as_ref(), Some(channel));
        match session
            .handle
            .shared
            .wait_open(Instant::now() + OPEN_TIMEOUT)
        {
            Ok(()) => Ok(session),
            Err(reason) => Err(ConnectError::Refused {
                path: path_text,
                reason,
            }),
        }
    }

    /// Returns a session with a daemon that need not run yet: until it does, the program serves without Holdfast.
    pub fn connect_later(path: impl AsRef<Path>) -> Self {
        Self::start(path.as_ref(), None)
    }

    /// Returns a session without a daemon: the program serves, no handoff is requested, and every handoff fails at
    /// once.
    pub fn detached() -> Self {
        Self {
            handle: SessionHandle::new(&program_name()),
            handoff_refusal: None,
        }
    }

    /// Returns a session over an existing channel; when the channel breaks, the session reconnects at `path`.
    pub fn from_channel(channel: Channel, path: impl AsRef<Path>) -> Self {
        Self::start(path.as_ref(), Some(channel))
    }

    /// Returns true if a daemon has opened the session.
    pub fn is_open(&self) -> bool {
        self.handle.shared.with_core(|core| core.is_open())
    }

    /// Returns the name of this node, if a daemon has told it.
    pub fn node(&self) -> Option<String> {
        self.handle.shared.node()
    }

    /// Returns the same session for services whose connections cannot continue in another process: each request to hand
    /// one of them off is declined with `reason`, and a connection that another node hands to them is refused with
    /// `reason`. Both answers reach the operator; the program takes no part.
    pub fn without_handoffs(&self, reason: &str) -> Self {
        Self {
            handle: Arc::clone(&self.handle),
            handoff_refusal: Some(reason.into()),
        }
    }

    /// Puts a socket under Holdfast's management: a TCP listener or a bound UDP socket, of std for the blocking
    /// interface or of tokio for the asynchronous one. `pool` is the pool handle by which other nodes know the service.
    ///
    /// # Errors
    /// When the socket's address cannot be read; `InvalidInput` for a UDP socket without a specific address.
    pub fn serve<S: Socket>(&self, pool: &str, socket: S) -> io::Result<S::Service> {
        socket.serve(self, pool)
    }

    fn start(path: &Path, channel: Option<Channel>) -> Self {
        let handle = SessionHandle::new(&program_name());
        session_thread::start(Arc::clone(&handle.shared), path.to_owned(), channel);
        Self {
            handle,
            handoff_refusal: None,
        }
    }

    /// Returns the registration of a service of this session.
    pub(crate) fn registered_service(
        &self,
        pool: &str,
        protocol: Protocol,
        local: SocketAddr,
    ) -> RegisteredService {
        RegisteredService {
            pool: pool.to_owned(),
            protocol,
            addresses: vec![local],
            handoff_refusal: self.handoff_refusal.clone(),
        }
    }
}

/// A socket that [`Session::serve`] accepts.
pub trait Socket: Sized {
    /// The managed service made from the socket.
    type Service;

    /// See [`Session::serve`].
    ///
    /// # Errors
    /// Same as [`Session::serve`].
    fn serve(self, session: &Session, pool: &str) -> io::Result<Self::Service>;
}

fn program_name() -> String {
    let file = std::env::current_exe().ok();
    let name = file
        .as_deref()
        .and_then(Path::file_name)
        .map(|name| name.to_string_lossy().into_owned());
    // Limit the name to fit every list; the kernel's limit for a file name is 255 bytes.
    name.unwrap_or_else(|| "program".into())
        .chars()
        .take(64)
        .collect()
}
