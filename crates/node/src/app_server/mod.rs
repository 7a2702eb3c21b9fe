//! The socket of server programs: sessions with messages and descriptors (`holdfast_api::app`).
//!
//! One task per session reads. [`AppServer::send`] writes at once, and queues a message only if the program is slow to
//! read. A session that violates the protocol gets an error and is closed, without effect on other sessions. The engine
//! interprets the messages, except `Open`, which is answered here.
//!
//! Everything runs on one thread, inside a `tokio::task::LocalSet`.

mod session;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use holdfast_api::app::{Channel, EncodeError, FromDaemon, Listener, ToDaemon, encode};
use holdfast_daemon::polled_socket::PolledSocket;
use holdfast_daemon::socket_path::{SocketPath, SocketPermissions, acquire};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::task::JoinHandle;

use crate::config::AppSocketConfig;
use crate::engine_queue::{EngineQueue, EngineQueueReceiver, engine_queue};
use session::AppSession;

/// Maximum number of sessions of one user, and of connections that have not sent `Open`; further connections are
/// refused.
const SESSIONS_PER_USER_MAX: usize = 1024;
const UNOPENED_PER_USER_MAX: usize = 256;

/// Id of one program's connection; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// An event of the server programs. The order for one session: `Opened`, any number of `Message`, `Closed`.
#[derive(Debug)]
pub enum AppEvent {
    /// A program opened a session.
    Opened {
        /// Session that the program opened.
        session: SessionId,
        /// Name given by the program.
        name: String,
        /// Process id as reported by the kernel.
        pid: u32,
    },
    /// A program sent a message (never `Open`), with as many descriptors as the message names. A `HandOff` may have
    /// fewer, if this process can open no more; the last ones are missing then.
    Message {
        /// Session of the program that sent the message.
        session: SessionId,
        /// Message of the program.
        message: ToDaemon,
        /// Descriptors in the order of the message's items; closed when dropped.
        descriptors: Vec<OwnedFd>,
    },
    /// The session has ended: the program closed it, died, or violated the protocol.
    Closed {
        /// Session that has ended.
        session: SessionId,
    },
}

/// Reason why a message was not sent.
#[derive(Debug, thiserror::Error)]
pub enum AppSendError {
    /// The session does not exist, or is ending.
    #[error("session {} is closed", .0.0)]
    Closed(SessionId),
    /// The message is too long.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// Server of the socket to which server programs connect.
pub struct AppServer {
    table: Rc<SessionTable>,
    events: EngineQueueReceiver<AppEvent>,
    accept_task: JoinHandle<()>,
    _path: SocketPath,
}

/// State shared by the sessions' tasks.
struct SessionTable {
    node: String,
    allowed_uids: Vec<u32>,
    events: Rc<EngineQueue<AppEvent>>,
    sessions: RefCell<BTreeMap<SessionId, Rc<AppSession>>>,
    next_session_id: Cell<u64>,
}

impl AppServer {
    /// Listens at `path` for the node with this name. Must be called within a `LocalSet`.
    ///
    /// # Errors
    /// Another daemon listens there, the path cannot be written, or the configured group does not exist.
    pub fn bind(path: &Path, config: &AppSocketConfig, node: &str) -> io::Result<AppServer> {
        let access = SocketPermissions {
            mode: match config.allowed_uids.is_empty() {
                true => 0o660,
                false => 0o666,
            },
            group: config.group.as_deref().map(group_id).transpose()?,
        };
        let (listener, path) = acquire(path, access, |path| Listener::bind(path))?;
        listener.set_nonblocking(true)?;
        let listener = PolledSocket::new(listener)?;
        let (sender, events) = engine_queue();
        let table = Rc::new(SessionTable {
            node: node.to_owned(),
            allowed_uids: config.allowed_uids.clone(),
            events: sender,
            sessions: RefCell::default(),
            next_session_id: Cell::new(1),
        });
        let accepting = tokio::task::spawn_local(accept(table.clone(), listener));
        Ok(AppServer {
            table,
            events,
            accept_task: accepting,
            _path: path,
        })
    }

    /// Returns the next event. Dropping the future loses nothing.
    pub async fn recv(&self) -> AppEvent {
        self.events.recv().await
    }

    /// Returns the next event, if one is queued.
    pub fn try_recv(&self) -> Option<AppEvent> {
        self.events.try_recv()
    }

    /// Sends a message with descriptors, without waiting. Messages that the program does not accept yet are queued in
    /// order.
    ///
    /// # Errors
    /// The session is closed, or the message is too long. The descriptors are closed in either case.
    pub fn send(
        &self,
        session: SessionId,
        message: &FromDaemon,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), AppSendError> {
        let sessions = self.table.sessions.borrow();
        let session_found = sessions.get(&session);
        let session_found = session_found.ok_or(AppSendError::Closed(session))?;
        match session_found.send(encode(message)?, descriptors) {
            true => Ok(()),
            false => Err(AppSendError::Closed(session)),
        }
    }

    /// Returns the number of messages that the program has yet to read.
    pub fn queued_messages(&self, session: SessionId) -> usize {
        let sessions = self.table.sessions.borrow();
        sessions
            .get(&session)
            .map_or(0, |session| session.queued_messages())
    }

    /// Ends a program's session; [`AppEvent::Closed`] follows.
    pub fn close(&self, session: SessionId) {
        if let Some(session) = self.table.sessions.borrow().get(&session) {
            session.close("the daemon closed the session".to_owned());
        }
    }
}

impl Drop for AppServer {
    fn drop(&mut self) {
        self.accept_task.abort();
        for session in self.table.sessions.take().into_values() {
            session.close("the daemon is stopping".to_owned());
        }
    }
}

async fn accept(table: Rc<SessionTable>, listener: PolledSocket<Listener>) {
    loop {
        match listener.read(Listener::accept).await {
            Ok(channel) => {
                if let Err(error) = open_session(&table, channel) {
                    tracing::warn!(%error, "refused a server program");
                }
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept server programs");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn open_session(table: &Rc<SessionTable>, channel: Channel) -> io::Result<()> {
    // The process id is 0 if the program is in a PID namespace that this process cannot see into.
    let credentials = getsockopt(&channel, sockopt::PeerCredentials)?;
    let (uid, pid) = (credentials.uid(), credentials.pid().unsigned_abs());
    channel.set_nonblocking(true)?;
    if !table.admits(uid) {
        let text = format!("user {uid} may not open sessions; add it to [app] allowed_uids");
        session::send_refusal(&channel, &text);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    if let Some(text) = table.exceeded_limit(uid) {
        session::send_refusal(&channel, &text);
        return Err(io::Error::new(io::ErrorKind::QuotaExceeded, text));
    }
    let id = SessionId(table.next_session_id.get());
    table.next_session_id.set(id.0 + 1);
    let session = Rc::new(AppSession::new(channel, uid)?);
    table.sessions.borrow_mut().insert(id, session.clone());
    let table = table.clone();
    tokio::task::spawn_local(async move { session::run(&table, id, pid, &session).await });
    Ok(())
}

impl SessionTable {
    fn admits(&self, uid: u32) -> bool {
        uid == 0 || self.allowed_uids.is_empty() || self.allowed_uids.contains(&uid)
    }
}

impl SessionTable {
    /// Returns the reason why a user may open no more sessions, if any.
    fn exceeded_limit(&self, uid: u32) -> Option<String> {
        let sessions = self.sessions.borrow();
        let user_sessions = || sessions.values().filter(|session| session.uid == uid);
        let unopened = user_sessions().filter(|session| !session.opened.get());
        if user_sessions().count() >= SESSIONS_PER_USER_MAX {
            Some(format!(
                "user {uid} has the maximum of {SESSIONS_PER_USER_MAX} sessions"
            ))
        } else if unopened.count() >= UNOPENED_PER_USER_MAX {
            Some(format!(
                "user {uid} has {UNOPENED_PER_USER_MAX} connections without an open session"
            ))
        } else {
            None
        }
    }
}

/// Returns the number of the group called `name`.
///
/// # Errors
/// There is no such group.
pub(crate) fn group_id(name: &str) -> io::Result<u32> {
    match nix::unistd::Group::from_name(name)? {
        Some(group) => Ok(group.gid.as_raw()),
        None => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no group `{name}`; create it, or correct [app] group"),
        )),
    }
}
