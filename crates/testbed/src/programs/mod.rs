//! Real programs under their own load, moved between the nodes of a group meanwhile.
//!
//! An [`UnmodifiedProgram`] of the table [`PROGRAMS`] is started at the service address and put under a load from a client. The
//! caller decides on the actions meanwhile, for example [`RunningProgram::move_to_next_node`]. The client must not see any error then: the
//! load itself reports errors, and so do the counters of the client's kernel, which no tool can hide. Clients that
//! connect and disconnect are the subject of `churn`.

mod program_load;
mod program_moves;
mod program_table;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::Protocol;

use crate::cluster::{Cluster, ClusterService, ClusterSpec, IpFamily};
use crate::network_counters::read_host;
pub use program_load::{LoadTool, ProgramLoad};
use program_moves::ProgramLocation;
pub use program_table::{
    MEMCACHED_PROTOCOL, NGINX_PROTOCOL, PROGRAMS, REDIS_PROTOCOL, WEBSOCKET_PROTOCOL,
};

/// Source of a Java server with a thread for each connection, which echoes what it receives.
pub const ECHO_JAVA: &str = include_str!("sources/Echo.java");
/// Source of a web server in Go.
pub const HTTP_GO: &str = include_str!("sources/http.go");

/// Host of the clients.
pub const CLIENT_HOST: &str = "c1";
const PORT: u16 = 7200;
/// Time limit of every wait; the machine may be very busy.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Segments that the clients must receive before the load counts as running.
const PROGRESS_SEGMENTS: u64 = 40;

/// Error text if the client's kernel has counted a broken connection.
pub const BROKEN_CONNECTION: &str = "a connection broke";

/// Counters of the client's kernel that rise when a connection cannot be opened, is reset or resets.
const BREAK_COUNTERS: [&str; 3] = ["Tcp.AttemptFails", "Tcp.EstabResets", "Tcp.OutRsts"];

/// A real program and its load.
#[derive(Debug)]
pub struct UnmodifiedProgram {
    /// Name of the program.
    pub name: &'static str,
    /// The kernel's name (comm) of the program's processes.
    pub process: &'static str,
    /// Number of processes.
    pub processes: usize,
    /// Creates the program's files and returns the words of its command, as arguments of `env`.
    pub prepare: fn(&ProgramSetup<'_>) -> Result<Vec<String>>,
    /// Connections of the load.
    pub connections: usize,
    /// Load of the program.
    pub load: ProgramLoad,
}

/// Place of a program on the machine and in the group.
#[derive(Clone, Copy, Debug)]
pub struct ProgramSetup<'a> {
    /// Folder of the program's files.
    pub folder: &'a Path,
    /// Address at which the program serves.
    pub address: SocketAddr,
}

/// Returns the program of this name in [`PROGRAMS`].
///
/// # Errors
/// There is none.
pub fn find_program_spec(name: &str) -> Result<&'static UnmodifiedProgram> {
    let found = PROGRAMS.iter().find(|program| program.name == name);
    found.with_context(|| format!("there is no program {name} in the table"))
}

/// A program that runs in a group of nodes that migrate processes.
pub struct RunningProgram {
    cluster: Cluster,
    program: &'static UnmodifiedProgram,
    address: SocketAddr,
    location: ProgramLocation,
    /// Counters of the client from the start of the load: none of `BREAK_COUNTERS` may differ from them.
    counters_before: BTreeMap<String, u64>,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOutcome {
    /// Segments that the clients received meanwhile.
    pub segments: u64,
    /// Result that the load reports.
    pub load_result: String,
}

impl RunningProgram {
    /// Brings a group up, and the program in it.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the program is missing or does not start.
    pub fn up(program: &'static UnmodifiedProgram) -> Result<RunningProgram> {
        let mut spec = ClusterSpec::new(format!("program-{}-{}", program.name, std::process::id()));
        spec.migration = true;
        let mut service = ClusterService::new(program.name, Protocol::Tcp, PORT);
        service.weights = program_moves::first_node_weights();
        spec.services = vec![service];
        let cluster = Cluster::up(spec)?;
        let address = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        let mut scene = RunningProgram {
            cluster,
            program,
            address,
            location: ProgramLocation::default(),
            counters_before: BTreeMap::new(),
        };
        let words = (program.prepare)(&ProgramSetup {
            folder: scene.cluster.directory(),
            address,
        })?;
        scene.location = scene.start(&words)?;
        scene.wait_until("the program accepts connections", || {
            let lab = scene.cluster.lab();
            let tried = lab.run_in_net_namespace(CLIENT_HOST, || TcpStream::connect(address));
            Ok(tried?.is_ok())
        })?;
        Ok(scene)
    }

    /// Returns the group of nodes that the program runs in.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the service address of the program.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Calls `action` while the program is under its load; checks that the load runs before and after the call.
    ///
    /// # Errors
    /// The load does not start, `action` fails, or the client saw an error.
    pub fn run_under_load(
        &mut self,
        action: impl FnOnce(&mut RunningProgram) -> Result<()>,
    ) -> Result<LoadOutcome> {
        self.wait_until_established(0)?;
        let load = self.program.load.start(self)?;
        let watched = self.check_during(action);
        let said = load.end();
        match (watched, said) {
            (Ok(segments), Ok(said)) => Ok(LoadOutcome {
                segments,
                load_result: said,
            }),
            (Ok(_), Err(error)) | (Err(error), Ok(_)) => Err(error.context(self.log_tails())),
            (Err(error), Err(said)) => {
                Err(error.context(format!("{said:#}\n{}", self.log_tails())))
            }
        }
    }

    /// Calls `action` with load before and after; returns the number of segments that the clients received.
    fn check_during(
        &mut self,
        action: impl FnOnce(&mut RunningProgram) -> Result<()>,
    ) -> Result<u64> {
        self.wait_until_established(self.program.connections as u64)?;
        self.counters_before = self.client_counters()?;
        self.check_progress()?;
        action(self)?;
        self.check_progress()?;
        Ok(self.client_counters()?["Tcp.InSegs"] - self.counters_before["Tcp.InSegs"])
    }

    /// Waits until the clients have received `PROGRESS_SEGMENTS` more segments; no connection may have broken since the load
    /// began.
    ///
    /// # Errors
    /// The load makes no progress, or a connection has broken.
    pub fn check_progress(&self) -> Result<()> {
        let wanted = self.client_counters()?["Tcp.InSegs"] + PROGRESS_SEGMENTS;
        self.wait_until("the load makes progress", || {
            let now = self.client_counters()?;
            let broken = BREAK_COUNTERS
                .iter()
                .find(|name| now[**name] != self.counters_before[**name]);
            if let Some(name) = broken {
                bail!("{BROKEN_CONNECTION}: the client's counter {name} has changed");
            }
            Ok(now["Tcp.InSegs"] >= wanted)
        })
    }

    fn wait_until_established(&self, connections: u64) -> Result<()> {
        self.wait_until(
            &format!("{connections} connections are established"),
            || Ok(self.client_counters()?.get("Tcp.CurrEstab") == Some(&connections)),
        )
    }

    fn client_counters(&self) -> Result<BTreeMap<String, u64>> {
        let counts = read_host(self.cluster.lab(), CLIENT_HOST)?;
        ensure!(
            BREAK_COUNTERS.iter().all(|name| counts.contains_key(*name)),
            "the client's kernel has no TCP connection counters"
        );
        Ok(counts)
    }

    /// Waits until `condition` returns true.
    fn wait_until(&self, what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !condition().with_context(|| format!("wait until {what}"))? {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: waited until {what}"
            );
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}
