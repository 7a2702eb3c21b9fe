//! Unmodified servers of several kinds, spread over the nodes of a group, each at a service of its own, with clients.
//!
//! Each server runs in a folder of its own, by whose name the server is found at any node: the working directory of a process
//! moves with the process.

mod clients;
mod kinds;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationStatus, ServiceStatus};

use crate::cluster::{Cluster, ClusterService, IpFamily};
use crate::detached_program::{output_path, start_detached};
use crate::process_moves::move_process;
use crate::programs::ProgramSetup;

pub use clients::{ClientErrors, ClientPlan, ClientWaits, ClientWork, FleetClients};
pub use kinds::ServerKind;

/// Port of the first server; each further server has the next one.
const FIRST_PORT: u16 = 7200;
/// Time limit of a wait; the machine may be very busy.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Lines of a server's output that an error shows.
const OUTPUT_LINES_SHOWN: usize = 8;

/// Size of a fleet.
#[derive(Clone, Debug)]
pub struct FleetSpec {
    /// Kinds of the servers.
    pub kinds: Vec<ServerKind>,
    /// Number of servers of each kind.
    pub per_kind: u16,
}

/// One server of a fleet.
#[derive(Clone, Debug)]
pub struct FleetServer {
    /// Name of the server, of its service and of its folder, such as `redis-1`.
    pub name: String,
    /// Kind of the server.
    pub kind: ServerKind,
    /// Service address and port.
    pub address: SocketAddr,
    folder: PathBuf,
}

/// Node of a server, and the server's PID there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerLocation {
    /// Name of the node.
    pub node: String,
    /// PID of the server's first process at the node.
    pub pid: i32,
}

/// Locations of servers, by name.
pub type ServerLocations = BTreeMap<String, ServerLocation>;

/// The running servers of a fleet.
pub struct ServerFleet {
    servers: Vec<FleetServer>,
}

impl FleetSpec {
    /// Returns name, kind and port of each server. Kinds take turns.
    fn servers(&self) -> impl Iterator<Item = (String, ServerKind, u16)> {
        let numbers = (1..=self.per_kind).flat_map(|number| {
            let kinds = self.kinds.iter();
            kinds.map(move |kind| (format!("{}-{number}", kind.name()), *kind))
        });
        let ports = FIRST_PORT..;
        ports
            .zip(numbers)
            .map(|(port, (name, kind))| (name, kind, port))
    }

    /// Returns the services of the servers, for the specification of the cluster.
    #[must_use]
    pub fn services(&self) -> Vec<ClusterService> {
        let services = self.servers();
        services
            .map(|(name, kind, port)| ClusterService::new(&name, kind.transport(), port))
            .collect()
    }
}

impl ServerFleet {
    /// Starts the servers, at the nodes in turn, and waits until new clients of each go to its node. The cluster has the
    /// services of the specification.
    ///
    /// # Errors
    /// A server is not installed, or does not start; the text has the ends of all logs.
    pub fn start(cluster: &Cluster, spec: &FleetSpec) -> Result<ServerFleet> {
        let nodes = cluster.nodes();
        let mut fleet = ServerFleet {
            servers: Vec::new(),
        };
        for ((name, kind, port), node) in spec.servers().zip(nodes.iter().cycle()) {
            let folder = cluster.directory().join(&name);
            fs::create_dir(&folder)?;
            let address = SocketAddr::new(cluster.service_address(IpFamily::V4), port);
            let setup = ProgramSetup {
                folder: &folder,
                address,
            };
            let words = kind.prepare(&setup)?;
            start_detached(cluster.lab(), node, &folder, &words)
                .with_context(|| format!("start {name} at {node}"))?;
            fleet.servers.push(FleetServer {
                name,
                kind,
                address,
                folder,
            });
        }
        let started = fleet.locate_all(cluster);
        let placed = started.and_then(|locations| fleet.wait_for_placement(cluster, &locations));
        placed.map_err(|error| fleet.with_logs(cluster, error))?;
        Ok(fleet)
    }

    /// Returns all servers of the fleet, in the order of their start.
    #[must_use]
    pub fn servers(&self) -> &[FleetServer] {
        &self.servers
    }

    /// Returns the servers that the nodes know now. A server on the move may be missing, and a server that has moved within
    /// the last second may be, too.
    ///
    /// # Errors
    /// A daemon does not answer.
    pub fn locate(&self, cluster: &Cluster) -> Result<ServerLocations> {
        let mut locations = ServerLocations::new();
        for node in cluster.nodes() {
            let control = cluster.blocking_control_client(&node)?;
            let known = control.run(|client| client.balance())?;
            let proc = cluster.proc_path(&node)?;
            for process in known.processes {
                if let Some(server) = self.server_of_process(&proc, process.pid) {
                    let (node, pid) = (node.clone(), process.pid);
                    locations.insert(server.name.clone(), ServerLocation { node, pid });
                }
            }
        }
        Ok(locations)
    }

    /// Returns the server whose folder is a process's working directory; none if the process has ended.
    fn server_of_process(&self, proc: &Path, pid: i32) -> Option<&FleetServer> {
        let folder = fs::read_link(proc.join(pid.to_string()).join("cwd")).ok()?;
        let name = folder.file_name()?;
        self.servers
            .iter()
            .find(|server| name == server.name.as_str())
    }

    /// Waits until the nodes know where every server is.
    ///
    /// # Errors
    /// The wait takes two minutes.
    pub fn locate_all(&self, cluster: &Cluster) -> Result<ServerLocations> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let locations = self.locate(cluster)?;
            let mut servers = self.servers.iter();
            let Some(missing) = servers.find(|one| !locations.contains_key(&one.name)) else {
                return Ok(locations);
            };
            ensure!(
                Instant::now() < deadline,
                "exceeded time: {} is at no node",
                missing.name
            );
            sleep(POLL_INTERVAL);
        }
    }

    /// Waits until the contact node sends new clients of each server to the server's node alone.
    ///
    /// # Errors
    /// The wait takes two minutes.
    pub fn wait_for_placement(&self, cluster: &Cluster, locations: &ServerLocations) -> Result<()> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let contact = cluster.wait_for_agreement(None, WAIT_TIMEOUT)?.contact_node;
        let contact = contact.context("the group has no contact node")?;
        let control = cluster.blocking_control_client(&contact)?;
        loop {
            let services = control.run(|client| client.status())?.services;
            let is_placed = |server: &&FleetServer| {
                let service = services.iter().find(|one| one.address == server.address);
                let location = locations.get(&server.name);
                service.zip(location).is_some_and(|(service, location)| {
                    placed_nodes(service).eq([location.node.as_str()])
                })
            };
            let Some(elsewhere) = self.servers.iter().find(|one| !is_placed(one)) else {
                return Ok(());
            };
            ensure!(
                Instant::now() < deadline,
                "exceeded time: new clients of {} do not go to its node alone",
                elsewhere.name
            );
            sleep(POLL_INTERVAL);
        }
    }

    /// Moves a server to a node, and waits until that node knows the server.
    ///
    /// # Errors
    /// There is no such server, the move failed, or the wait takes two minutes.
    pub fn move_server(&self, cluster: &Cluster, name: &str, to: &str) -> Result<MigrationStatus> {
        let locations = self.locate_all(cluster)?;
        let from = locations.get(name).context("there is no such server")?;
        let status = move_process(cluster, from.pid, &from.node, to)
            .with_context(|| format!("move {name}"))?;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self
            .locate(cluster)?
            .get(name)
            .is_none_or(|at| at.node != to)
        {
            ensure!(
                Instant::now() < deadline,
                "exceeded time: {to} does not know {name} after its move"
            );
            sleep(POLL_INTERVAL);
        }
        Ok(status)
    }

    /// Adds the ends of the outputs of all servers and daemons to an error.
    #[must_use]
    pub fn with_logs(&self, cluster: &Cluster, error: anyhow::Error) -> anyhow::Error {
        let outputs = self.servers.iter().map(|server| {
            let output = fs::read_to_string(output_path(&server.folder)).unwrap_or_default();
            let lines: Vec<&str> = output.lines().collect();
            let last = &lines[lines.len().saturating_sub(OUTPUT_LINES_SHOWN)..];
            format!("--- output of {}:\n{}\n", server.name, last.join("\n"))
        });
        let outputs: String = outputs.collect();
        cluster.with_logs(anyhow::anyhow!("{error:#}\n{outputs}"))
    }
}

/// Returns the nodes that get new clients of a service.
fn placed_nodes(service: &ServiceStatus) -> impl Iterator<Item = &str> {
    let nodes = service.nodes.iter();
    nodes
        .filter(|node| node.placed_weight > 0)
        .map(|node| node.node.as_str())
}

/// Returns the number of servers at each of these nodes.
#[must_use]
pub fn count_by_node(locations: &ServerLocations, nodes: &[String]) -> BTreeMap<String, usize> {
    let count = |node: &String| {
        let here = locations.values().filter(|at| at.node == *node);
        (node.clone(), here.count())
    };
    nodes.iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_take_turns_at_services_of_their_own() {
        let spec = FleetSpec {
            kinds: vec![ServerKind::Redis, ServerKind::OpenArena],
            per_kind: 2,
        };
        let names: Vec<String> = spec.services().into_iter().map(|one| one.pool).collect();
        assert_eq!(names, ["redis-1", "openarena-1", "redis-2", "openarena-2"]);
        let ports: Vec<u16> = spec.services().iter().map(|one| one.port).collect();
        assert_eq!(ports, [7200, 7201, 7202, 7203]);
    }
}
