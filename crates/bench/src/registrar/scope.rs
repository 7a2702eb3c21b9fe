//! Registrars of one scope: `rserpoold registrar`, each a process with a configuration of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{BlockingControlClient, PeerList, RegistrarStatus};
use tempfile::TempDir;

use super::role_process::{BenchProcessors, cpu_time};
use super::{Encapsulation, hidden_command};
use holdfast_testbed::cluster::find_program;

/// Time limit for registrars to start, to connect and to synchronise.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// First SCTP port of the first registrar, inside UDP; the ports of the others follow.
const FIRST_PORT: usize = 20_000;

/// Parameters of a scope.
#[derive(Clone, Copy, Debug)]
pub struct ScopeSpec {
    /// Number of registrars.
    pub registrars: usize,
    /// True if an update is handed to the transport once for all peers (`registrar.send_to_all_at_once`).
    pub one_send: bool,
    /// Time for which requests are collected, microseconds (`registrar.batch_delay_us`); by default the registrar's own
    /// choice.
    pub pause_us: Option<u32>,
    /// True if each re-registration is announced, even without a change (`registrar.refresh_delay_ms = 0`).
    pub announce_each: bool,
    /// Encapsulation of SCTP.
    pub encapsulation: Encapsulation,
}

/// Registrars that know each other, the first on a processor of its own.
#[derive(Debug)]
pub struct RegistrarScope {
    registrars: Vec<RegistrarProcess>,
    announce_each: bool,
    _directory: TempDir,
}

/// Address and process of a registrar.
#[derive(Clone, Copy, Debug)]
pub struct RegistrarTarget {
    /// ASAP address.
    pub server: SocketAddr,
    /// UDP port, 0 for SCTP directly over IP.
    pub encapsulation: u16,
    /// Process id, for the measurement of processor time.
    pub pid: u32,
}

struct RegistrarProcess {
    process: ChildGuard,
    client: BlockingControlClient,
    /// Status at the time when the registrar became ready.
    status: RegistrarStatus,
}

/// A process that is killed when this value is dropped.
struct ChildGuard(Child);

impl std::fmt::Debug for RegistrarProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "registrar {} at {:?}", self.status.id, self.status.asap)
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl RegistrarScope {
    /// Starts the registrars, one after the other, and waits until all know all others.
    ///
    /// # Errors
    /// `rserpoold` is missing, or the registrars do not become ready or do not find each other.
    pub fn start(spec: &ScopeSpec) -> Result<RegistrarScope> {
        let processors = BenchProcessors::allowed()?;
        let directory = tempfile::tempdir().context("a directory for the registrars")?;
        let mut scope = RegistrarScope {
            registrars: Vec::new(),
            announce_each: spec.announce_each,
            _directory: directory,
        };
        for place in 0..spec.registrars {
            let processor = match place {
                0 => processors.measured,
                _ => processors.others,
            };
            let path = scope._directory.path().join(place.to_string());
            let text = scope.configuration(spec, &path);
            let registrar = RegistrarProcess::spawn(&path, &text, processor)?;
            scope.registrars.push(registrar);
        }
        scope.wait_for_peers()?;
        Ok(scope)
    }

    fn configuration(&self, spec: &ScopeSpec, run_dir: &Path) -> String {
        let (raw, encapsulation) = match spec.encapsulation {
            Encapsulation::Ip => (true, false),
            Encapsulation::Udp => (false, true),
        };
        // Inside UDP, each process may choose any SCTP port: two with the same port would share an address, and count
        // as one.
        let (asap, enrp) = match spec.encapsulation {
            Encapsulation::Ip => (0, 0),
            Encapsulation::Udp => {
                let first = FIRST_PORT + 2 * self.registrars.len();
                (first, first + 1)
            }
        };
        let one_send = spec.one_send;
        let mut text = format!(
            r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = {asap}
enrp_port = {enrp}
raw = {raw}
encapsulation = {encapsulation}
encapsulation_port = 0
send_to_all_at_once = {one_send}
run_dir = "{}"
[access]
registrar = ["127.0.0.1"]
# One host stands for hundreds.
[limits]
messages_per_second = 10000000
associations_per_host = 100000
[log]
filter = "error"
"#,
            run_dir.display()
        );
        let mut add = |line: String| {
            let with = format!("[registrar]\n{line}");
            text = text.replacen("[registrar]", &with, 1);
        };
        if let Some(pause) = spec.pause_us {
            add(format!("batch_delay_us = {pause}"));
        }
        if spec.announce_each {
            add("refresh_delay_ms = 0".to_owned());
        }
        for registrar in &self.registrars {
            text += &registrar.peer_configuration(spec.encapsulation);
        }
        text
    }

    fn wait_for_peers(&self) -> Result<()> {
        let others = self.registrars.len() - 1;
        wait_for_registrars(
            &self.registrars,
            "registrars do not find each other",
            |registrar| {
                let peers: PeerList = registrar.client.run(|client| client.peers())?;
                let met = peers
                    .peers
                    .iter()
                    .filter(|peer| peer.connected && peer.active);
                Ok(met.count() == others)
            },
        )
    }

    /// Waits until every registrar knows this number of elements.
    ///
    /// # Errors
    /// The wait takes more than a minute.
    pub fn wait_for_elements(&self, elements: u64) -> Result<()> {
        wait_for_registrars(
            &self.registrars,
            "registrars are not synchronised",
            |registrar| Ok(registrar.status()?.elements == elements),
        )
    }

    /// Returns the address and process of a registrar; the first has number 0.
    #[must_use]
    pub fn registrar_target(&self, place: usize) -> Option<RegistrarTarget> {
        let registrar = self.registrars.get(place)?;
        let status = &registrar.status;
        Some(RegistrarTarget {
            server: *status.asap.first()?,
            encapsulation: status.encapsulation_port.unwrap_or(0),
            pid: registrar.process.0.id(),
        })
    }

    /// Checks that the first registrar has counted exactly these re-registrations and the one at `users_at`
    /// exactly these resolutions, and that the others have received every update of the first: one for each
    /// registration, unless registrations without a change are announced together.
    ///
    /// # Errors
    /// An operation is missing, or there was one without a request.
    pub fn check_counters(
        &self,
        reregistrations: u64,
        resolutions: u64,
        users_at: usize,
    ) -> Result<()> {
        let Some((first, others)) = self.registrars.split_first() else {
            return Ok(());
        };
        let counted = first.status()?.counters;
        let asked = self.registrars.get(users_at).context("no such registrar")?;
        let resolved = asked.status()?.counters.resolutions;
        ensure!(
            (counted.reregistrations, resolved) == (reregistrations, resolutions),
            "{reregistrations} re-registrations and {resolutions} resolutions were answered, but the registrars \
             counted {resolved} and {counted:?}"
        );
        let refused = counted.refusals + counted.resolutions_refused + counted.rate_limited;
        ensure!(
            refused + counted.sends_refused + counted.malformed == 0,
            "{counted:?}"
        );
        let each = counted.registrations + reregistrations;
        wait_for_registrars(
            others,
            "registrars have not received all updates",
            |other| {
                let updates_sent = first.status()?.counters.updates_sent;
                ensure!(
                    updates_sent <= each,
                    "{updates_sent} updates were sent for {each} registrations"
                );
                let counted = other.status()?.counters;
                ensure!(
                    counted.resynchronisations == 0,
                    "a registrar had to resynchronise: {counted:?}"
                );
                let all = updates_sent == each || !self.announce_each;
                Ok(all && counted.updates_received == updates_sent)
            },
        )
    }
}

fn wait_for_registrars(
    registrars: &[RegistrarProcess],
    timeout_message: &str,
    condition: impl Fn(&RegistrarProcess) -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + READY_TIMEOUT;
    for registrar in registrars {
        while !condition(registrar)? {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: {timeout_message}: {registrar:?}"
            );
            sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

impl RegistrarProcess {
    fn spawn(run_dir: &Path, configuration: &str, processor: usize) -> Result<RegistrarProcess> {
        fs::create_dir_all(run_dir)?;
        let config = run_dir.join("registrar.toml");
        fs::write(&config, configuration)?;
        let program: PathBuf = find_program("rserpoold")?;
        let mut command: Command = hidden_command("pinned")?;
        command.arg(processor.to_string()).arg("--").arg(program);
        command.args(["registrar", "--config"]).arg(&config);
        command.stdin(Stdio::null());
        let mut process = ChildGuard(command.spawn().context("start a registrar")?);
        let client = BlockingControlClient::new(run_dir.join("registrar.sock"))?;
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            match client.run(|client| client.registrar()) {
                Ok(status) if status.ready => {
                    return Ok(RegistrarProcess {
                        process,
                        client,
                        status,
                    });
                }
                Ok(_) => {}
                Err(error) => ensure!(
                    process.0.try_wait()?.is_none(),
                    "a registrar has ended: {error}"
                ),
            }
            ensure!(
                Instant::now() < deadline,
                "exceeded time: a registrar is not ready"
            );
            sleep(Duration::from_millis(5));
        }
    }

    /// Returns the configuration of this registrar as a peer of later ones.
    fn peer_configuration(&self, carrier: Encapsulation) -> String {
        let status = &self.status;
        let mut text = String::new();
        for at in &status.enrp {
            let (ip, port) = (at.ip(), at.port());
            text += &format!("[[peer]]\naddresses = [\"{ip}\"]\nport = {port}\n");
            if let (Encapsulation::Udp, Some(port)) = (carrier, status.encapsulation_port) {
                text += &format!("encapsulation_port = {port}\n");
            }
        }
        text
    }

    fn status(&self) -> Result<RegistrarStatus> {
        Ok(self.client.run(|client| client.registrar())?)
    }
}

impl RegistrarTarget {
    /// Returns the processor time that the registrar has used.
    ///
    /// # Errors
    /// The process has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.pid)
    }
}
