//! A registrar in a separate process.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU16, Ordering};

use holdfast_api::control::{
    BlockingControlClient, ClientError, ControlClient, PeerEntry, PoolDetail, RegistrarStatus,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Returns the SCTP ports of the next registrar. Inside UDP each registrar has all SCTP ports to itself, and two
/// registrars with equal ports chosen by the system would have one address.
pub fn next_ports() -> (u16, u16) {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let asap = NEXT.fetch_add(2, Ordering::Relaxed);
    (asap, asap + 1)
}

/// A registrar that ends with the test.
pub struct Daemon {
    child: Child,
    config: PathBuf,
    socket: PathBuf,
    client: BlockingControlClient,
}

impl Daemon {
    /// Starts a registrar on loopback, on a UDP port chosen by the system, in `directory`, with `extra_config` appended to its
    /// configuration. `default_udp_port` is the UDP port of hosts that are not configured peers.
    pub fn start(directory: &Path, default_udp_port: u16, extra_config: &str) -> Self {
        let (asap, enrp) = next_ports();
        let text = format!(
            r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = {asap}
enrp_port = {enrp}
raw = false
encapsulation_port = 0
remote_encapsulation_port = {default_udp_port}
run_dir = "{}"
keep_alive_interval_ms = 500
heartbeat_cycle_ms = 500
last_heard_max_ms = 10000
[access]
registrar = ["127.0.0.1"]
[log]
format = "json"
{extra_config}"#,
            directory.display()
        );
        Self::start_configured(directory, &text)
    }

    /// Starts a registrar with this configuration and the run directory `directory`.
    pub fn start_configured(directory: &Path, text: &str) -> Self {
        std::fs::create_dir_all(directory).expect("a directory");
        let config = directory.join("registrar.toml");
        std::fs::write(&config, text).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rserpoold"));
        command.args(["registrar", "--config"]).arg(&config);
        let socket = directory.join("registrar.sock");
        Self {
            child: command.spawn().expect("rserpoold"),
            config,
            client: BlockingControlClient::new(&socket).expect("a client"),
            socket,
        }
    }

    /// Returns the configuration of another registrar that starts with this one as its peer.
    pub fn peer_configuration(&self) -> String {
        let status = self.status().expect("a registrar");
        let (at, udp) = (status.enrp[0], status.encapsulation_port.expect("a port"));
        let (ip, port) = (at.ip(), at.port());
        format!("[[peer]]\naddresses = [\"{ip}\"]\nport = {port}\nencapsulation_port = {udp}\n")
    }

    /// Returns the registrar's status; none as long as it does not answer.
    pub fn status(&self) -> Option<RegistrarStatus> {
        self.request(|client| Box::pin(client.registrar()))
    }

    /// Returns a pool, if the registrar knows it.
    pub fn pool(&self, handle: &'static str) -> Option<PoolDetail> {
        self.request(|client| Box::pin(client.pool(handle)))
    }

    /// Returns another registrar, if this one knows it.
    pub fn peer(&self, id: &str) -> Option<PeerEntry> {
        let list = self.request(|client| Box::pin(client.peers()))?;
        list.peers.into_iter().find(|peer| peer.id == id)
    }

    /// Returns the registrar's metrics.
    pub fn metrics(&self) -> Option<String> {
        self.request(|client| Box::pin(client.metrics()))
    }

    /// Sends `GET path`, and returns the status and body of the answer.
    pub fn get_raw(&self, path: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(&self.socket).expect("a connection");
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }

    /// Returns the content of the configuration file.
    pub fn configuration(&self) -> String {
        std::fs::read_to_string(&self.config).expect("a file")
    }

    /// Replaces the configuration, and has the registrar reload it.
    pub fn reload(&self, text: &str) {
        std::fs::write(&self.config, text).expect("a file");
        self.signal(Signal::SIGHUP);
    }

    /// Sends the process a signal.
    pub fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).expect("a process");
        kill(Pid::from_raw(id), signal).expect("a signal");
    }

    /// Ends the registrar by SIGTERM; returns true if it shut down in an orderly way.
    pub fn stop(&mut self) -> bool {
        self.signal(Signal::SIGTERM);
        let ended = self.child.wait().expect("its end").success();
        ended && !self.socket.exists()
    }

    /// Kills the registrar by `SIGKILL`.
    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("its end");
    }

    fn request<'a, T>(
        &'a self,
        request: impl FnOnce(
            &'a ControlClient,
        ) -> Pin<Box<dyn Future<Output = Result<T, ClientError>> + 'a>>,
    ) -> Option<T> {
        self.client.run(request).ok()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
