//! Members of etcd that keep the views of a group that runs itself, each at a client host.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_lab::HostKind;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Cluster;
use super::supervisor::{LaunchSpec, SupervisedProgram};

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Longest wait for a member.
const PATIENCE: Duration = Duration::from_secs(60);

impl Cluster {
    /// Returns the hosts of the etcd members.
    pub fn etcd_hosts(&self) -> Vec<String> {
        let hosts = self.lab().hosts().iter();
        let clients = hosts.filter(|host| host.kind == HostKind::Client);
        let clients: Vec<String> = clients.map(|host| host.name.clone()).collect();
        let first = clients.len().saturating_sub(self.spec.etcd_members.into());
        clients[first..].to_vec()
    }

    /// Returns the URL at which a member serves clients.
    ///
    /// # Errors
    /// There is no such host.
    pub fn etcd_url(&self, member: &str) -> Result<String> {
        self.url(member, CLIENT_PORT)
    }

    /// Returns the member that leads; none while there is none.
    ///
    /// # Errors
    /// A host is missing.
    pub fn etcd_leader(&self) -> Result<Option<String>> {
        let field = |text: &str, name: &str| {
            let (_, rest) = text.split_once(&format!("\"{name}\":\""))?;
            rest.split('"').next().map(str::to_owned)
        };
        for member in self.etcd_hosts() {
            let Some(status) = self.ask_etcd(&member, "v3/maintenance/status")? else {
                continue;
            };
            let leader = field(&status, "leader");
            if leader.is_some() && leader == field(&status, "member_id") {
                return Ok(Some(member));
            }
        }
        Ok(None)
    }

    /// Kills a member with SIGKILL. The member starts again only if it is allowed to.
    ///
    /// # Errors
    /// There is no such host, or the member is down.
    pub fn kill_etcd(&self, member: &str) -> Result<()> {
        let Some(pid) = self.program_pid(member, "etcd")? else {
            bail!("the etcd of {member} is down");
        };
        kill(Pid::from_raw(pid), Signal::SIGKILL)
            .with_context(|| format!("kill the etcd of {member}"))
    }

    /// Sets if a member is restarted when it ends. Turning restarts on starts a stopped member at once.
    pub fn set_etcd_restart(&self, member: &str, restart: bool) {
        let programs = self.programs.iter();
        for etcd in programs.filter(|each| each.host() == member && each.name() == "etcd") {
            etcd.set_restart(restart);
        }
    }

    /// Waits until a majority of the members answers.
    ///
    /// # Errors
    /// The wait takes more than a minute.
    pub fn wait_for_etcd(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let is_healthy = |member: &String| {
            let health = self.ask_etcd(member, "health");
            health.is_ok_and(|health| health.is_some_and(|health| health.contains("true")))
        };
        while !self.etcd_hosts().iter().any(is_healthy) {
            ensure!(Instant::now() < deadline, "exceeded time: etcd answers");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Starts the members, and waits until they answer.
    pub(super) fn start_etcd(&mut self) -> Result<()> {
        let members = self.etcd_hosts();
        if members.is_empty() {
            return Ok(());
        }
        let peers = members.iter();
        let peers = peers.map(|peer| Ok(format!("{peer}={}", self.url(peer, PEER_PORT)?)));
        let peers = peers.collect::<Result<Vec<String>>>()?.join(",");
        for member in &members {
            let client_url = self.etcd_url(member)?;
            let peer_url = self.url(member, PEER_PORT)?;
            let mut command = self.lab().command(member)?;
            command.args(["etcd", "--name", member, "--initial-cluster", &peers]);
            command.arg("--data-dir");
            command.arg(self.directory.path().join(format!("{member}-etcd")));
            command.args(["--listen-client-urls", &client_url]);
            command.args(["--advertise-client-urls", &client_url]);
            command.args(["--listen-peer-urls", &peer_url]);
            command.args(["--initial-advertise-peer-urls", &peer_url]);
            let launch = LaunchSpec::new(member, "etcd", &command, self.directory.path(), true);
            let etcd = SupervisedProgram::start(launch.restart_delay(self.spec.restart_delay))?;
            self.programs.push(etcd);
        }
        self.wait_for_etcd()
    }

    fn url(&self, member: &str, port: u16) -> Result<String> {
        let address = self.address(member, self.spec.underlay)?;
        Ok(format!(
            "http://{}",
            std::net::SocketAddr::new(address, port)
        ))
    }

    /// Returns a member's answer; none if the member does not answer.
    fn ask_etcd(&self, member: &str, path: &str) -> Result<Option<String>> {
        let mut command = self.lab().command(member)?;
        command.args(["curl", "--silent", "--max-time", "2"]);
        if path.starts_with("v3/") {
            command.args(["--data", "{}"]);
        }
        command.arg(format!("{}/{path}", self.etcd_url(member)?));
        let output = command.output().context("ask etcd")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(output.status.success().then_some(text))
    }
}
