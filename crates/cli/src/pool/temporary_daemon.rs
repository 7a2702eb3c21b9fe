//! The pool daemon of a command: the host's, or a temporary one for the duration of the command.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use holdfast_api::control::BlockingControlClient;
use tempfile::TempDir;

use crate::node::{no_daemon_text, sibling_command};

/// Maximum time for a daemon to start, and to end.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks of a starting or ending daemon.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Options that select the pool daemon
#[derive(Clone, Debug, Args)]
pub struct PoolDaemonArgs {
    /// Directory with the sockets of the host's pool daemon (`rserpoold pool`); if none runs there, the command
    /// starts a temporary one
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/holdfast")]
    run_dir: PathBuf,
    #[arg(
        long,
        value_name = "REGISTRAR",
        help = "A registrar; repeatable [default: the registrar of this host]: ADDRESS[:PORT] over SCTP, \
                tcp://ADDRESS[:PORT], or tls://[NAME@]ADDRESS[:PORT], with the name in its certificate. Starts a \
                temporary daemon"
    )]
    registrar: Vec<String>,
    #[command(flatten)]
    tls: TlsFiles,
    /// Trust registrars that announce themselves by multicast. Starts a temporary daemon
    #[arg(long)]
    announces: bool,
    /// Configuration file of a temporary daemon; docs/configuration.md describes it
    #[arg(long, value_name = "FILE")]
    daemon_config: Option<PathBuf>,
}

/// TLS files of a temporary daemon
#[derive(Clone, Debug, Args)]
struct TlsFiles {
    /// For tls:// registrars: the group's authority (`holdfast ca`)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// The certificate of the registering or resolving host
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    tls_key: Option<PathBuf>,
    /// The authority's revocation list
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    tls_crl: Option<PathBuf>,
}

impl TlsFiles {
    fn arguments(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let files = [
            ("--tls-ca", &self.tls_ca),
            ("--tls-cert", &self.tls_cert),
            ("--tls-key", &self.tls_key),
            ("--tls-crl", &self.tls_crl),
        ];
        let files = files.into_iter();
        files.filter_map(|(flag, file)| Some((flag, file.as_deref()?)))
    }
}

/// A daemon that answers requests.
#[derive(Debug)]
pub struct RunningDaemon {
    directory: PathBuf,
    temporary: Option<TemporaryDaemon>,
}

/// A daemon that ends with this value, and with this process: its standard input is a pipe from here.
#[derive(Debug)]
struct TemporaryDaemon {
    child: Child,
    directory: TempDir,
}

impl PoolDaemonArgs {
    /// Finds the host's daemon, or starts a temporary one.
    ///
    /// # Errors
    /// `rserpoold` is not found, or does not start and reports the reason itself.
    pub fn find_or_start(&self) -> Result<RunningDaemon> {
        let wants_temporary = !self.registrar.is_empty()
            || self.announces
            || self.daemon_config.is_some()
            || self.tls.tls_ca.is_some();
        if !wants_temporary && UnixStream::connect(self.run_dir.join("pool.sock")).is_ok() {
            return Ok(RunningDaemon {
                directory: self.run_dir.clone(),
                temporary: None,
            });
        }
        self.start()
    }

    fn start(&self) -> Result<RunningDaemon> {
        let directory = tempfile::Builder::new()
            .prefix("holdfast-pool-")
            .tempdir()
            .context("a directory for the pool daemon's sockets")?;
        let mut command = sibling_command("rserpoold");
        command.args(["pool", "--with-parent", "--run-dir"]);
        command.arg(directory.path());
        if let Some(config) = &self.daemon_config {
            command.arg("--config").arg(config);
        } else {
            command.args(["--log", "error"]);
        }
        for registrar in &self.registrar {
            command.arg("--registrar").arg(registrar);
        }
        for (flag, file) in self.tls.arguments() {
            command.arg(flag).arg(file);
        }
        if self.announces {
            command.arg("--announces");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let child = command
            .spawn()
            .map_err(|error| anyhow!("{}", no_daemon_text("rserpoold", &error)))?;
        let mut running = RunningDaemon {
            directory: directory.path().to_owned(),
            temporary: Some(TemporaryDaemon { child, directory }),
        };
        running.wait_until_answering()?;
        Ok(running)
    }
}

impl RunningDaemon {
    fn wait_until_answering(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let RunningDaemon {
            directory,
            temporary: own,
        } = self;
        let Some(own) = own else { return Ok(()) };
        let answers = |name: &str| directory.join(name).exists();
        while !answers("pool.sock") || !answers("pool-app.sock") {
            if let Some(status) = own.child.try_wait()? {
                bail!("the pool daemon did not start ({status})");
            }
            if Instant::now() > deadline {
                bail!("the pool daemon does not answer");
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the path at which programs open channels.
    pub fn program_socket(&self) -> PathBuf {
        self.directory.join("pool-app.sock")
    }

    /// Returns true if the daemon still runs, as far as known.
    pub fn is_running(&mut self) -> bool {
        match &mut self.temporary {
            Some(own) => matches!(own.child.try_wait(), Ok(None)),
            None => UnixStream::connect(self.directory.join("pool.sock")).is_ok(),
        }
    }

    /// Returns a client of the daemon's control API.
    ///
    /// # Errors
    /// The system has no descriptors.
    pub fn client(&self) -> Result<BlockingControlClient> {
        let socket: &Path = &self.directory.join("pool.sock");
        BlockingControlClient::new(socket).context("no descriptors for a connection to the daemon")
    }
}

impl Drop for TemporaryDaemon {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + END_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            sleep(POLL_INTERVAL);
        }
        // The directory is removed after the daemon has ended.
        let _ = &self.directory;
    }
}
