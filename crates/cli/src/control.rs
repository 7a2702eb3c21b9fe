//! The way to the daemon.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use holdfast_api::control::{
    BlockingClient, Client, ClientError, REGISTRAR_SOCKET_PATH, SOCKET_PATH,
};
use serde::Serialize;

/// Which daemon is spoken to.
#[derive(Debug, Args)]
pub struct Daemon {
    /// The daemon's control socket
    #[arg(long, value_name = "PATH", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

/// Which registrar is spoken to.
#[derive(Debug, Args)]
pub struct RegistrarDaemon {
    /// The registrar's control socket
    #[arg(long, value_name = "PATH", default_value = REGISTRAR_SOCKET_PATH)]
    socket: PathBuf,
}

macro_rules! ways {
    ($daemon:ident, $start:literal) => {
        impl $daemon {
            /// Asks the daemon.
            ///
            /// # Errors
            /// The daemon does not run, or refuses; the text says what to do.
            pub fn ask<'a, T, F>(
                &self,
                client: &'a BlockingClient,
                request: impl FnOnce(&'a Client) -> F,
            ) -> Result<T>
            where
                F: Future<Output = Result<T, ClientError>>,
            {
                client
                    .run(request)
                    .map_err(|error| explain(&self.socket, $start, error))
            }

            /// A client of the daemon; nothing is opened yet.
            ///
            /// # Errors
            /// The system gives no descriptors.
            pub fn client(&self) -> Result<BlockingClient> {
                BlockingClient::new(&self.socket)
                    .context("no descriptors for a connection to the daemon")
            }
        }
    };
}

ways!(Daemon, "holdfast node --config FILE");
ways!(RegistrarDaemon, "holdfast registrar");

fn explain(socket: &Path, start: &str, error: ClientError) -> anyhow::Error {
    let path = socket.display();
    let ClientError::Absent { error, .. } = error else {
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

/// Prints a value as JSON.
///
/// # Errors
/// The value has no form in JSON.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    put(&format!(
        "{}\n",
        serde_json::to_string_pretty(value).context("encode the answer")?
    ))
}

/// Writes to standard output. Where nobody reads any more (`| head`), the process ends.
///
/// # Errors
/// The output cannot be written.
pub fn put(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    let written = output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => Ok(written?),
    }
}
