//! A running group in a lab: daemons on every node, server programs, and ways to disturb them.

mod etcd;
mod node_config_file;
mod node_stall;
pub mod priority;
mod readiness;
mod reboot;
mod self_running;
mod spec;
mod static_neighbours;
mod supervisor;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_api::control::{BlockingControlClient, ControlClient};
use holdfast_lab::{HostKind, Lab, LabSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub use node_stall::{STALLS_MAX, is_node_stall};
pub use spec::{ClusterService, ClusterSpec, ExampleServer, IpFamily, SelfRunningGroupSpec};
use supervisor::{LaunchSpec, SupervisedProgram};

/// Environment variable that advances the TCP clock of every connection that a daemon gives away, in units of its
/// timestamps: for tests of handoffs between hosts with different clocks.
pub const CLOCK_SHIFT_VARIABLE: &str = "HOLDFAST_TEST_CLOCK_SHIFT";

/// Environment variable that makes a cluster keep its files (configurations, certificates, logs).
pub const KEEP_LOGS_VARIABLE: &str = "HOLDFAST_KEEP_LOGS";

/// Lines of each log shown after a failure.
const LOG_LINES_SHOWN: usize = 25;

/// A running group. When dropped, the group is taken down with all its parts; after a panic its logs are shown.
pub struct Cluster {
    spec: ClusterSpec,
    priority_prefix: [&'static str; 3],
    /// `None` only while the cluster is dropped.
    lab: Option<Lab>,
    directory: tempfile::TempDir,
    daemons: Vec<SupervisedProgram>,
    programs: Vec<SupervisedProgram>,
}

impl Cluster {
    /// Brings a group up; returns when every daemon is connected to every other and has its server programs.
    ///
    /// # Errors
    /// The lab fails, or a program is missing or does not start; the text has the end of its log.
    pub fn up(spec: ClusterSpec) -> Result<Self> {
        // Remains of a killed run would occupy addresses and names.
        holdfast_lab::prune().context("remove labs of killed runs")?;
        let directory = tempfile::Builder::new().prefix("holdfast-").tempdir()?;
        let mut lab_spec = LabSpec::new(&spec.name)
            .nodes(spec.nodes)
            .clients(spec.clients)
            .segments(spec.segments)
            .topology(spec.topology.clone());
        lab_spec.reach = spec.reach;
        lab_spec.processors = spec.processors;
        let lab = Lab::up(&lab_spec).context("bring the lab up")?;
        let mut cluster = Self {
            priority_prefix: priority::priority_prefix(spec.is_realtime),
            spec,
            lab: Some(lab),
            directory,
            daemons: Vec::new(),
            programs: Vec::new(),
        };
        match cluster.start() {
            Ok(()) => Ok(cluster),
            Err(error) => Err(cluster.with_logs(error)),
        }
    }

    fn start(&mut self) -> Result<()> {
        let authority_dir = self.directory.path().join("ca");
        let authority = CertificateAuthority::init(&authority_dir, node_config_file::GROUP_NAME)?;
        for node in self.nodes() {
            authority.issue(&node, &[], NODE_DAYS)?;
            let path = self.config_path(&node);
            fs::write(&path, node_config_file::node_config(self, &node)?)?;
        }
        self.add_static_neighbours()?;
        self.start_etcd()?;
        if self.is_self_running() {
            self.create_group("n1")?;
        }
        for node in self.nodes() {
            let daemon = self.daemon_launch(&node)?;
            self.daemons.push(SupervisedProgram::start(daemon)?);
        }
        readiness::wait_for_daemons(self)?;
        if self.is_self_running() {
            self.add_services()?;
            readiness::wait_for_services(self)?;
        }
        for node in self.nodes() {
            for program in &self.spec.programs {
                let order = self.program_launch(&node, program)?;
                self.programs.push(SupervisedProgram::start(order)?);
            }
        }
        readiness::wait_for_programs(self)?;
        self.wait_for_placement()
    }

    fn daemon_launch(&self, node: &str) -> Result<LaunchSpec> {
        let mut command = self.lab().command(node)?;
        command.args(self.priority_prefix);
        command
            .arg(find_program("holdfastd")?)
            .arg("--config")
            .arg(self.config_path(node));
        command.envs(&self.spec.daemon_environment);
        if let Some(ticks) = self.spec.clock_shift.get(node) {
            command.env(CLOCK_SHIFT_VARIABLE, ticks.to_string());
        }
        let launch = LaunchSpec::new(node, "holdfastd", &command, self.directory.path(), true);
        Ok(launch.restart_delay(self.spec.restart_delay))
    }

    fn program_launch(&self, node: &str, program: &ExampleServer) -> Result<LaunchSpec> {
        let mut command = self.lab().command(node)?;
        command.args(self.priority_prefix);
        command
            .arg(find_program(program.name())?)
            .args(program.arguments(self));
        command.env("RUST_LOG", &self.spec.program_log);
        Ok(LaunchSpec::new(
            node,
            program.name(),
            &command,
            self.directory.path(),
            false,
        ))
    }

    fn config_path(&self, node: &str) -> PathBuf {
        self.directory.path().join(format!("{node}.toml"))
    }

    /// Returns the directory in which a node's daemon keeps its state.
    fn state_dir(&self, node: &str) -> PathBuf {
        self.directory.path().join(node)
    }

    /// Returns the directory of a node's check scripts, which the services of a group that runs itself may name. The
    /// directory does not exist at first.
    pub fn checks_dir(&self, node: &str) -> PathBuf {
        self.directory.path().join(format!("{node}-checks"))
    }

    /// Returns the specification of the cluster.
    pub fn spec(&self) -> &ClusterSpec {
        &self.spec
    }

    /// Returns the cluster's lab: for commands in its hosts, for cuts and heals.
    pub fn lab(&self) -> &Lab {
        self.lab
            .as_ref()
            .expect("the lab exists until the cluster is dropped")
    }

    /// Returns a prefix for a client's command that gives the client priority over the machine's other work; see
    /// [`priority`].
    pub fn priority_prefix(&self) -> [&'static str; 3] {
        self.priority_prefix
    }

    /// Returns the directory of the cluster's files: configurations, `ca/`, logs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the names of the nodes: `n1`, `n2`, ...
    pub fn nodes(&self) -> Vec<String> {
        let hosts = self.lab().hosts().iter();
        hosts
            .filter(|host| host.kind == HostKind::Node)
            .map(|host| host.name.clone())
            .collect()
    }

    /// Returns the service address that clients connect to.
    pub fn service_address(&self, family: IpFamily) -> IpAddr {
        let (v4, v6) = self.lab().service_address();
        family.select_address(v4, v6)
    }

    /// Returns a host's own address.
    ///
    /// # Errors
    /// There is no such host.
    pub fn address(&self, host: &str, family: IpFamily) -> Result<IpAddr> {
        let (v4, v6) = self.lab().address(host)?;
        Ok(family.select_address(v4, v6))
    }

    /// Returns the path on the machine of a file in a host's `/run`.
    ///
    /// # Errors
    /// There is no such host.
    pub fn run_path(&self, host: &str, name: &str) -> Result<PathBuf> {
        self.path_in_host(host, &format!("run/holdfast/{name}"))
    }

    /// Returns the `/proc` of a host, which has the process ids that the host's daemon uses.
    ///
    /// # Errors
    /// There is no such host.
    pub fn proc_path(&self, host: &str) -> Result<PathBuf> {
        self.path_in_host(host, "proc")
    }

    /// Returns the path on the machine of a path in a host.
    fn path_in_host(&self, host: &str, path: &str) -> Result<PathBuf> {
        let init = self.lab().init_process(host)?;
        Ok(format!("/proc/{init}/root/{path}").into())
    }

    /// Returns a client of a node's control API.
    ///
    /// # Errors
    /// There is no such node.
    pub fn control_client(&self, node: &str) -> Result<ControlClient> {
        Ok(ControlClient::new(self.run_path(node, "control.sock")?))
    }

    /// Returns a client of a node's control API for code without an asynchronous runtime.
    ///
    /// # Errors
    /// There is no such node, or the system gives no descriptors.
    pub fn blocking_control_client(&self, node: &str) -> Result<BlockingControlClient> {
        Ok(BlockingControlClient::new(
            self.run_path(node, "control.sock")?,
        )?)
    }

    /// Returns the process id of a node's daemon on the machine; none while the daemon is down.
    ///
    /// # Errors
    /// There is no such node.
    pub fn daemon_pid(&self, node: &str) -> Result<Option<i32>> {
        self.pid_of_program(node, "holdfastd")
    }

    /// Returns the process id on the machine of a program (`fileserver`, `echo`) on a node; none while the program is
    /// down.
    ///
    /// # Errors
    /// There is no such node.
    pub fn program_pid(&self, node: &str, program: &str) -> Result<Option<i32>> {
        self.pid_of_program(node, program)
    }

    fn pid_of_program(&self, node: &str, name: &str) -> Result<Option<i32>> {
        let is_it = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|comm| comm.trim_end() == name)
        };
        Ok(self.lab().processes(node)?.into_iter().find(is_it))
    }

    /// Kills a node's daemon with SIGKILL. The supervisor starts another after
    /// [`ClusterSpec::restart_delay`], unless restarts are off.
    ///
    /// # Errors
    /// There is no such node, or its daemon is down.
    pub fn kill_daemon(&self, node: &str) -> Result<()> {
        self.signal_daemon(node, Signal::SIGKILL)
    }

    /// Sends a signal to a node's daemon.
    ///
    /// # Errors
    /// There is no such node, or its daemon is down.
    pub fn signal_daemon(&self, node: &str, signal: Signal) -> Result<()> {
        let Some(pid) = self.daemon_pid(node)? else {
            bail!("the daemon of {node} is down");
        };
        kill(Pid::from_raw(pid), signal)
            .with_context(|| format!("send {signal} to the daemon of {node}"))
    }

    /// Sets if a node's daemon is restarted when it ends. Turning restarts on starts a stopped daemon at once.
    pub fn set_daemon_restart(&self, node: &str, restart: bool) {
        for daemon in self.daemons.iter().filter(|daemon| daemon.host() == node) {
            daemon.set_restart(restart);
        }
    }

    /// Returns the number of times that a node's daemon has been started.
    pub fn daemon_starts(&self, node: &str) -> u32 {
        let daemon = self.daemons.iter().find(|daemon| daemon.host() == node);
        daemon.map_or(0, SupervisedProgram::starts)
    }

    /// Waits until every daemon answers, is connected to every other, and has its server programs. In a group that runs
    /// itself, all nodes are in the view and have the services.
    ///
    /// # Errors
    /// The wait takes more than a minute.
    pub fn wait_ready(&self) -> Result<()> {
        readiness::wait_for_daemons(self)?;
        if self.is_self_running() {
            readiness::wait_for_services(self)?;
        }
        readiness::wait_for_programs(self)
    }

    /// Waits until the contact node places new clients of the server programs at all nodes with a weight.
    ///
    /// # Errors
    /// The wait takes more than a minute.
    pub fn wait_for_placement(&self) -> Result<()> {
        readiness::wait_for_placement(self)
    }

    /// Returns the ends of all logs.
    pub fn log_tails(&self) -> String {
        let all = self.daemons.iter().chain(&self.programs);
        all.map(|supervised| supervised.log_tail(LOG_LINES_SHOWN))
            .collect()
    }

    /// Adds the ends of all logs to an error.
    pub fn with_logs(&self, error: anyhow::Error) -> anyhow::Error {
        anyhow::anyhow!("{error:#}\n{}", self.log_tails())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log_tails());
        }
        if std::env::var_os(KEEP_LOGS_VARIABLE).is_some() {
            self.directory.disable_cleanup(true);
            eprintln!(
                "{KEEP_LOGS_VARIABLE}: files are in {}",
                self.directory.path().display()
            );
        }
        for supervised in self.daemons.iter().chain(&self.programs) {
            supervised.stop_restarting();
        }
        // Dropping the lab kills every process in it, so that the supervisors see their children end.
        drop(self.lab.take());
    }
}

/// Finds a program of this workspace: in the directory named by `HOLDFAST_BIN_DIR`, in the directory of the running
/// program, or in the one above (Cargo puts tests one level deeper).
///
/// # Errors
/// The program is in none of them.
pub fn find_program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("find the path of this program")?;
    let named = std::env::var_os("HOLDFAST_BIN_DIR").map(PathBuf::from);
    let near = own.ancestors().skip(1).take(2).map(Path::to_owned);
    let candidate = named
        .into_iter()
        .chain(near)
        .map(|directory| directory.join(name));
    candidate.into_iter().find(|path| path.is_file()).with_context(|| {
        format!(
            "the program {name} is not beside {}; build it with `cargo build --workspace --bins --tests` (same profile), or set \
             HOLDFAST_BIN_DIR",
            own.display()
        )
    })
}
