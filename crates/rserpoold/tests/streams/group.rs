//! Registrars and pool daemons in separate processes that use TLS with certificates of one group.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_api::control::{BlockingControlClient, ClientError, Resolution, ResolveQuery};
use holdfast_api::pool::{Element, ElementService, RegistrationRequest};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::daemon::{Daemon as Registrar, next_ports};
use crate::wait_for;

/// A certificate authority, and the directory of all files.
pub struct TestGroup {
    directory: TempDir,
    authority: CertificateAuthority,
}

impl TestGroup {
    pub fn new() -> TestGroup {
        let directory = tempfile::tempdir().expect("a directory");
        let authority = CertificateAuthority::init(&directory.path().join("ca"), "pools");
        TestGroup {
            authority: authority.expect("an authority"),
            directory,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Lets the group's authority issue a certificate with this name.
    pub fn issue(&self, name: &str) {
        let issued = self.authority.issue(name, &[], NODE_DAYS);
        issued.expect("a certificate");
    }

    /// Revokes a certificate; its files are kept, as its owner would keep them.
    pub fn revoke(&self, name: &str) {
        let ca = self.path("ca");
        for extension in ["pem", "key"] {
            let from = ca.join(format!("{name}.{extension}"));
            std::fs::copy(&from, ca.join(format!("kept-{name}.{extension}"))).expect("a copy");
        }
        self.authority.revoke(name).expect("a revocation");
        for extension in ["pem", "key"] {
            let to = ca.join(format!("{name}.{extension}"));
            std::fs::copy(ca.join(format!("kept-{name}.{extension}")), to).expect("a copy");
        }
    }

    /// Returns the `[tls]` section for the certificate of this name.
    pub fn tls_section(&self, name: &str) -> String {
        let ca = self.path("ca");
        let file = |file: &str| ca.join(file).display().to_string();
        format!(
            "[tls]\nca = \"{}\"\ncert = \"{}\"\nkey = \"{}\"\ncrl = \"{}\"\n",
            file("ca.pem"),
            file(&format!("{name}.pem")),
            file(&format!("{name}.key")),
            file("ca.crl"),
        )
    }

    /// Starts a registrar with this certificate, on UDP and TCP ports chosen by the system.
    pub fn start_registrar(&self, name: &str, extra_config: &str) -> Registrar {
        self.issue(name);
        let (asap, enrp) = next_ports();
        let (tls, directory) = (self.tls_section(name), self.path(&format!("{name}.run")));
        let text = format!(
            r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = {asap}
enrp_port = {enrp}
raw = false
encapsulation_port = 0
run_dir = {directory:?}
keep_alive_interval_ms = 500
heartbeat_cycle_ms = 500
last_heard_max_ms = 10000
[access]
register = ["tls:web"]
resolve = ["tls:*", "127.0.0.7"]
registrar = ["127.0.0.1"]
[tcp]
port = 0
tls_port = 0
handshake_ms = 2000
message_ms = 2000
{tls}{extra_config}"#
        );
        let registrar = Registrar::start_configured(&directory, &text);
        wait_for("a registrar that serves", || {
            registrar.status().filter(|status| status.ready).map(drop)
        });
        registrar
    }
}

/// Returns the address of a registrar for TLS; [`tcp_address`] returns the one for plain TCP.
pub fn tls_address(registrar: &Registrar) -> SocketAddr {
    registrar.status().expect("a registrar").tls[0]
}

pub fn tcp_address(registrar: &Registrar) -> SocketAddr {
    registrar.status().expect("a registrar").tcp[0]
}

/// A pool daemon that ends with the test.
pub struct PoolDaemon {
    child: Child,
    directory: PathBuf,
    client: BlockingControlClient,
}

impl PoolDaemon {
    /// Starts a pool daemon at the address `listen` with these registrars; `extra_config` contains its certificates.
    pub fn start(
        directory: &Path,
        listen: &str,
        registrars: &[String],
        extra_config: &str,
    ) -> PoolDaemon {
        std::fs::create_dir_all(directory).expect("a directory");
        let config = directory.join("pool.toml");
        let text = format!(
            "[pool]\nlisten = [\"{listen}\"]\nraw = false\nencapsulation_port = 0\nregistrars = {registrars:?}\nrun_dir = {directory:?}\n{extra_config}"
        );
        let mut file = std::fs::File::create(&config).expect("a file");
        file.write_all(text.as_bytes()).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_rserpoold"))
            .args(["pool", "--with-parent", "--config"])
            .arg(config)
            .stdin(Stdio::piped())
            .spawn()
            .expect("rserpoold");
        let pool = PoolDaemon {
            child,
            directory: directory.to_owned(),
            client: BlockingControlClient::new(directory.join("pool.sock")).expect("a client"),
        };
        wait_for("a pool daemon", || {
            let exists = |name: &str| directory.join(name).exists();
            (exists("pool.sock") && exists("pool-app.sock")).then_some(())
        });
        pool
    }

    pub fn register(&self, address: &str) -> Element {
        let service = ElementService::Tcp(address.parse().expect("an address"));
        let registration = RegistrationRequest::new("web", service);
        Element::register(self.directory.join("pool-app.sock"), registration).expect("a channel")
    }

    /// Resolves the pool `web` through a registrar.
    pub fn resolve(&self) -> Result<Resolution, ClientError> {
        let query = ResolveQuery::default();
        self.client
            .run(|client| Box::pin(async move { client.resolve("web", &query).await }))
    }

    pub fn send_sighup(&self) {
        let id = Pid::from_raw(self.child.id().cast_signed());
        kill(id, Signal::SIGHUP).expect("a signal");
    }
}

impl Drop for PoolDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
