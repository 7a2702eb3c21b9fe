//! Requests to a daemon.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use holdfast_api::control::{
    BlockingControlClient, ClientError, ControlClient, REGISTRAR_SOCKET_PATH, SOCKET_PATH,
};

/// Options that select the node's daemon.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The daemon's control socket
    #[arg(long, value_name = "PATH", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

/// Options that select the registrar.
#[derive(Debug, Args)]
pub struct RegistrarDaemonArgs {
    /// The registrar's control socket
    #[arg(long, value_name = "PATH", default_value = REGISTRAR_SOCKET_PATH)]
    socket: PathBuf,
}

impl DaemonArgs {
    /// Returns an asynchronous client of the daemon, without connecting.
    pub fn asynchronous_client(&self) -> ControlClient {
        ControlClient::new(&self.socket)
    }
}

macro_rules! daemon_options {
    ($daemon:ident, $start:literal) => {
        impl $daemon {
            /// Sends a request to the daemon and waits for the answer.
            ///
            /// # Errors
            /// The daemon does not run, or refuses; the error text contains a remedy.
            pub fn ask<'a, T, F>(
                &self,
                client: &'a BlockingControlClient,
                request: impl FnOnce(&'a ControlClient) -> F,
            ) -> Result<T>
            where
                F: Future<Output = Result<T, ClientError>>,
            {
                client
                    .run(request)
                    .map_err(|error| explain_error(&self.socket, $start, error))
            }

            /// Returns a client of the daemon, without connecting.
            ///
            /// # Errors
            /// The system has no descriptors.
            pub fn client(&self) -> Result<BlockingControlClient> {
                BlockingControlClient::new(&self.socket)
                    .context("no descriptors for a connection to the daemon")
            }
        }
    };
}

daemon_options!(DaemonArgs, "holdfast node --config FILE");
daemon_options!(RegistrarDaemonArgs, "holdfast registrar");

fn explain_error(socket: &Path, start: &str, error: ClientError) -> anyhow::Error {
    let path = socket.display();
    let ClientError::NoDaemon { error, .. } = error else {
        return error.into();
    };
    match error.kind() {
        io::ErrorKind::NotFound => anyhow!(
            "no daemon runs here: there is no {path}\n\
             Start one with `{start}`, or name its socket with --socket PATH."
        ),
        io::ErrorKind::ConnectionRefused => anyhow!(
            "the daemon has ended: nobody listens at {path}\n\
             Start it again with `{start}`; its log says why it ended."
        ),
        io::ErrorKind::PermissionDenied => {
            anyhow!("this user may not open {path}\nRun the command as root.")
        }
        _ => anyhow!("cannot reach the daemon at {path}: {error}"),
    }
}
