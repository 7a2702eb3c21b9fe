//! The nodes of a group are drained, rebooted and filled again, one after the other, while clients of unmodified servers go
//! on.

mod display;
mod node_cycle;
mod report;

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use holdfast_testbed::cluster::{Cluster, ClusterSpec, SelfRunningGroupSpec};
use holdfast_testbed::server_fleet::{
    ClientPlan, FleetClients, FleetSpec, ServerFleet, ServerKind, ServerLocations, count_by_node,
};

pub use display::DrainDisplay;
use node_cycle::{NodeCycle, Period};
pub use node_cycle::{NodeResult, PhaseErrors};
pub use report::DrainDemoReport;

/// Number of nodes. All are voters, so that each can become contact node.
pub const NODES: u16 = 5;

/// Parameters of the demonstration.
#[derive(Clone, Debug, Serialize)]
pub struct DrainDemoSpec {
    /// Name of the lab.
    pub name: String,
    /// Number of nodes that are drained, the contact node first.
    pub nodes_to_drain: u16,
    /// Number of servers of each of four kinds.
    pub servers_per_kind: u16,
    /// Clients of the servers.
    pub clients: ClientPlan,
    /// Time under load before the first drain, in which the same waits are measured.
    pub control: Duration,
    /// True if daemons run with real-time priority, if allowed.
    pub realtime: bool,
}

impl Default for DrainDemoSpec {
    /// Returns the parameters of `holdfast demo drain`: five nodes, twenty servers.
    fn default() -> DrainDemoSpec {
        DrainDemoSpec {
            name: format!("demo-{}", std::process::id()),
            nodes_to_drain: NODES,
            servers_per_kind: 5,
            clients: ClientPlan {
                connections: 4,
                interval: Duration::from_millis(50),
                new_per_s: 2,
            },
            control: Duration::from_secs(20),
            realtime: true,
        }
    }
}

/// An event of the running demonstration.
#[derive(Clone, Debug)]
pub enum DrainEvent {
    /// A step begins or ends.
    Step(String),
    /// The kinds of the servers at each node.
    Servers(Vec<(String, Vec<ServerKind>)>),
    /// A server has moved.
    Moved {
        /// Name of the server.
        server: String,
        /// Donor.
        from: String,
        /// Acceptor.
        to: String,
        /// Time for which the server stood still, milliseconds.
        freeze_ms: Option<f64>,
    },
    /// A server has stayed at its node, for this reason.
    Stayed {
        /// Name of the server.
        server: String,
        /// Name of the node at which the server stays.
        node: String,
        /// The reason for which the server stays.
        reason: String,
    },
    /// The demonstration has ended.
    Ended,
}

/// A function that receives the events.
pub type EventHandler<'a> = &'a (dyn Fn(&DrainEvent) + Sync);

/// Runs `holdfast demo drain`, and passes each event to `watch`.
///
/// # Errors
/// The demonstration came to no result: no lab, a server that is missing or does not start, a node that does not come
/// back. A result that breaks a promise is no error: [`field@DrainDemoReport::problems`] lists it.
pub fn run(spec: &DrainDemoSpec, watch: EventHandler<'_>) -> Result<DrainDemoReport> {
    let started = Instant::now();
    let servers = FleetSpec {
        kinds: ServerKind::four_kinds().into(),
        per_kind: spec.servers_per_kind,
    };
    watch(&DrainEvent::Step(first_step(&servers)));
    let mut cluster = Cluster::up(cluster_spec(spec, &servers))?;
    let fleet = ServerFleet::start(&cluster, &servers)?;
    let outcome = run_drains(spec, &mut cluster, &fleet, watch);
    let (nodes, clients) = outcome.map_err(|error| fleet.with_logs(&cluster, error))?;
    let left = fleet.locate_all(&cluster)?;
    let (work, errors) = clients.stop()?;
    watch(&DrainEvent::Ended);
    Ok(DrainDemoReport::new(
        spec,
        servers.kinds,
        report::Measured {
            nodes,
            servers_left: count_by_node(&left, &cluster.nodes()),
            work,
            errors,
            total: started.elapsed(),
        },
    ))
}

/// Drains the nodes. Returns their results, and the clients, which still run.
fn run_drains(
    spec: &DrainDemoSpec,
    cluster: &mut Cluster,
    fleet: &ServerFleet,
    watch: EventHandler<'_>,
) -> Result<(Vec<NodeResult>, FleetClients)> {
    let clients = FleetClients::start(cluster, fleet, spec.clients)?;
    let locations = fleet.locate_all(cluster)?;
    watch(&servers_event(cluster, fleet, &locations));
    let control = run_control(spec, &clients, watch);
    let wanted = count_by_node(&locations, &cluster.nodes());
    let nodes = cluster.nodes().into_iter();
    let mut results = Vec::new();
    for node in nodes.take(spec.nodes_to_drain.into()) {
        let mut cycle = NodeCycle {
            cluster: &mut *cluster,
            fleet,
            clients: &clients,
            control,
            watch,
            servers: wanted[&node],
            node,
        };
        let result = cycle.run()?;
        let is_safe = result.safe_to_reboot;
        results.push(result);
        // A reboot would break connections.
        if !is_safe {
            break;
        }
    }
    Ok((results, clients))
}

/// Lets the clients work without a drain.
fn run_control(spec: &DrainDemoSpec, clients: &FleetClients, watch: EventHandler<'_>) -> Period {
    let work = clients.work();
    watch(&DrainEvent::Step(format!(
        "{} connections, {} new clients a second and {} players go on without a drain for {} s",
        work.connections,
        new_clients_per_s(spec),
        work.players,
        spec.control.as_secs()
    )));
    let begin = Instant::now();
    sleep(spec.control);
    Period {
        begin,
        end: Instant::now(),
    }
}

/// Returns the number of new clients of all servers per second.
fn new_clients_per_s(spec: &DrainDemoSpec) -> u32 {
    let kinds = ServerKind::four_kinds();
    let with_clients = kinds.iter().filter(|kind| **kind != ServerKind::OpenArena);
    with_clients.count() as u32 * u32::from(spec.servers_per_kind) * spec.clients.new_per_s
}

fn cluster_spec(spec: &DrainDemoSpec, servers: &FleetSpec) -> ClusterSpec {
    let mut cluster = ClusterSpec::new(&spec.name);
    cluster.nodes = NODES;
    cluster.self_running = Some(SelfRunningGroupSpec { backups: NODES - 1 });
    cluster.migration = true;
    cluster.services = servers.services();
    cluster.is_realtime = spec.realtime;
    cluster
}

fn first_step(servers: &FleetSpec) -> String {
    let names: Vec<&str> = servers.kinds.iter().map(|kind| kind.name()).collect();
    let hint = match servers.kinds.contains(&ServerKind::OpenArena) {
        true => "",
        false => {
            " (HOLDFAST_OPENARENA names no folder with OpenArena's server: memcached takes its place)"
        }
    };
    format!(
        "starting a group of {NODES} nodes that runs itself, and {} servers of each kind: {}{hint}",
        servers.per_kind,
        names.join(", ")
    )
}

/// Returns the kinds of the servers at each node.
fn servers_event(
    cluster: &Cluster,
    fleet: &ServerFleet,
    locations: &ServerLocations,
) -> DrainEvent {
    let is_at = |name: &str, node: &str| locations.get(name).is_some_and(|at| at.node == node);
    let kinds_at = |node: String| {
        let here = fleet.servers().iter();
        let here = here.filter(|server| is_at(&server.name, &node));
        let mut kinds: Vec<ServerKind> = here.map(|server| server.kind).collect();
        kinds.sort_unstable();
        (node, kinds)
    };
    DrainEvent::Servers(cluster.nodes().into_iter().map(kinds_at).collect())
}
