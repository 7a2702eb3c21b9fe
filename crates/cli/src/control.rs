//! The way to the daemon.

use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use holdfast_api::control::{BlockingClient, Client, ClientError, SOCKET_PATH};
use serde::Serialize;

/// Which daemon is spoken to.
#[derive(Debug, Args)]
pub struct Daemon {
    /// The daemon's control socket
    #[arg(long, value_name = "PATH", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

impl Daemon {
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
        client.run(request).map_err(|error| self.explain(error))
    }

    /// A client of the daemon; nothing is opened yet.
    ///
    /// # Errors
    /// The system gives no descriptors.
    pub fn client(&self) -> Result<BlockingClient> {
        BlockingClient::new(&self.socket).context("no descriptors for a connection to the daemon")
    }

    fn explain(&self, error: ClientError) -> anyhow::Error {
        let path = self.socket.display();
        let ClientError::Absent { error, .. } = error else {
            return error.into();
        };
        match error.kind() {
            io::ErrorKind::NotFound => anyhow!(
                "no daemon runs here: there is no {path}\n\
                 Start one with `holdfast node --config FILE`, or name its socket with --socket PATH."
            ),
            io::ErrorKind::ConnectionRefused => anyhow!(
                "the daemon has ended: nobody listens at {path}\n\
                 Start it again with `holdfast node --config FILE`; its log says why it ended."
            ),
            io::ErrorKind::PermissionDenied => {
                anyhow!("this user may not open {path}\nRun the command as root.")
            }
            _ => anyhow!("cannot reach the daemon at {path}: {error}"),
        }
    }
}

/// Prints a value as JSON.
///
/// # Errors
/// The value has no form in JSON.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    println!(
        "{}",
        serde_json::to_string_pretty(value).context("encode the answer")?
    );
    Ok(())
}
