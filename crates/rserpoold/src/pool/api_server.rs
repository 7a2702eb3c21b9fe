//! The second thread: control API, programs' channels, streams.

use std::io::{self, Read};

use holdfast_api::app::Listener;
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::control::serve;
use holdfast_daemon::polled_socket::PolledSocket;
use holdfast_daemon::socket_path::{SocketPath, SocketPermissions, acquire};
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::requests::PoolRequest;
use super::{control, program_channels};
use crate::asap_over_tcp::tls_security;
use crate::config::pool::PoolConfig;
use crate::mailbox::{Mailbox, wait_stop_signal};

/// Sockets of the thread, and the runtime that serves them.
pub(super) struct PoolApiServer {
    runtime: Runtime,
    socket_paths: [SocketPath; 2],
}

impl PoolApiServer {
    /// Binds the sockets of `config`, and serves them once it [runs](Server::run). `with_parent` ends the daemon with
    /// its standard input.
    ///
    /// # Errors
    /// Another daemon has a socket, or its directory cannot be written.
    pub(super) fn bind(
        config: &PoolConfig,
        mailbox: &Mailbox<PoolRequest>,
        with_parent: bool,
    ) -> io::Result<PoolApiServer> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let runtime_guard = runtime.enter();
        let access = SocketPermissions {
            mode: 0o600,
            group: None,
        };
        let bind = |path: &std::path::Path| UnixListener::bind(path);
        let (listener, control_path) = acquire(&config.control_socket(), access, bind)?;
        let bind = |path: &std::path::Path| Listener::bind(path);
        let (programs, program_path) = acquire(&config.program_socket(), access, bind)?;
        programs.set_nonblocking(true)?;
        let programs = PolledSocket::new(programs)?;
        runtime.spawn(serve(listener, control::router(mailbox.clone())));
        runtime.spawn(program_channels::accept_programs(programs, mailbox.clone()));
        runtime.spawn(stop_on_signal(mailbox.clone()));
        if let Some(tls) = config.tls.clone() {
            runtime.spawn(reload_tls_on_signal(mailbox.clone(), tls));
        }
        if with_parent {
            let to = mailbox.clone();
            std::thread::Builder::new()
                .name("parent".to_owned())
                .spawn(move || stop_with_parent(&to))?;
        }
        drop(runtime_guard);
        Ok(PoolApiServer {
            runtime,
            socket_paths: [control_path, program_path],
        })
    }

    /// Serves until the process ends, in a separate thread. Returns the sockets' files, which are removed when the
    /// value is dropped, and a handle for starting tasks there.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub(super) fn run(self) -> io::Result<([SocketPath; 2], Handle)> {
        let PoolApiServer {
            runtime,
            socket_paths: paths,
        } = self;
        let handle = runtime.handle().clone();
        std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
        Ok((paths, handle))
    }
}

async fn stop_on_signal(mailbox: Mailbox<PoolRequest>) {
    wait_stop_signal().await;
    mailbox.send(PoolRequest::Stop).await;
}

/// Reloads the certificates with each SIGHUP. An error in the files leaves the current certificates in use.
async fn reload_tls_on_signal(mailbox: Mailbox<PoolRequest>, tls: TlsConfig) {
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => {
            tracing::error!(%error, "cannot handle SIGHUP: certificates change only at a restart");
            return;
        }
    };
    while hangup.recv().await.is_some() {
        match tls_security(Some(&tls)) {
            Ok(Some(security)) => {
                tracing::info!("reloaded the certificates");
                mailbox.send(PoolRequest::ReloadTls(security)).await;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "cannot reload the certificates: the current ones stay in use")
            }
        }
    }
}

/// Ends the daemon when the other end of its standard input is closed.
fn stop_with_parent(mailbox: &Mailbox<PoolRequest>) {
    let mut input = io::stdin().lock();
    let mut buffer = [0; 64];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    mailbox.send_blocking(PoolRequest::Stop);
}
