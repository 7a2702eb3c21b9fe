//! Health of servers: feeds the machine of `proto::health` with sockets, checks and signs of life, and carries out its
//! decisions on where new clients go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_api::control::{ServerHealth, ServiceNode};
use holdfast_daemon::log_limit::LogLimit;
use holdfast_proto::health::{
    Event, Exclusion, Health, HealthConfig, JudgedService, NodeHealth, Output,
};
use holdfast_wire::health_frames::{HealthFrame, ServerProblem, ServerState, ServiceEndpoint};
use holdfast_wire::{Flow, Frame, NodeId, Protocol};

use super::Engine;
use crate::config::{Config, ServiceConfig};
use crate::health::{
    InspectionRequest, NewestConnections, Observation, ObservationReceiver, ObservationSender,
    RunningChecks, SocketObserverThread, observation_channel,
};
use crate::peer_channel::Peers;
use crate::reach::reach_of;

/// Time between two inspections of this node's sockets.
const INSPECTION_INTERVAL: Duration = Duration::from_millis(100);

/// The health machine and its inputs.
pub struct HealthMonitor {
    machine: Health,
    /// Services that take new clients, by their rows.
    services: BTreeMap<u16, ObservedService>,
    observations: ObservationSender,
    /// `None` before the daemon is ready.
    sockets: Option<SocketObserverThread>,
    /// Active checks; none before the daemon is ready.
    checks: BTreeMap<ServiceEndpoint, RunningChecks>,
    inspect_at: Duration,
    /// Received bytes of each peer at the last look for signs of life.
    received_bytes: BTreeMap<NodeId, u64>,
    series: ServerSeries,
    /// Limits of the lines about each node: another node's reports cause lines.
    node_logs: BTreeMap<NodeId, LogLimit>,
    unserved_log: LogLimit,
}

/// The series of the metrics of servers.
#[derive(Default)]
struct ServerSeries {
    /// Pool, service and node of each `holdfast_server_well`.
    well: BTreeSet<(String, String, String)>,
    /// Pool and reason of each `holdfast_server_failures_total`.
    failures: BTreeSet<(String, &'static str)>,
}

struct ObservedService {
    endpoint: ServiceEndpoint,
    stall_after: Option<Duration>,
    /// Number of handshakes that this node has completed.
    handshakes: u64,
    newest: NewestConnections,
}

impl HealthMonitor {
    /// Returns a monitor that observes nothing before [`Engine::start_health`].
    pub fn new(config: &Config, contact: NodeId) -> (HealthMonitor, ObservationReceiver) {
        let (observations, receiver) = observation_channel();
        let machine_config = HealthConfig {
            places_clients: reach_of(config.group.reach).has_contact_node(),
            silent_after: config.channel.silent_after,
            ..HealthConfig::new(config.node.id)
        };
        let judged = living(&config.services).map(judged_service).collect();
        let mut monitor = HealthMonitor {
            services: BTreeMap::new(),
            machine: Health::new(machine_config, contact, judged),
            observations,
            sockets: None,
            checks: BTreeMap::new(),
            inspect_at: Duration::ZERO,
            received_bytes: BTreeMap::new(),
            series: ServerSeries::default(),
            node_logs: BTreeMap::new(),
            unserved_log: LogLimit::default(),
        };
        monitor.observe(&config.services);
        (monitor, receiver)
    }

    /// Observes these services from now on. A service that stays keeps what was observed.
    fn observe(&mut self, services: &[ServiceConfig]) {
        let mut former = std::mem::take(&mut self.services);
        for service in living(services) {
            let endpoint = service.endpoint();
            let known = former.remove(&service.row);
            let known = known.filter(|known| known.endpoint == endpoint);
            let stall_after = service.check.stall_after;
            let observed = match known {
                Some(known) => ObservedService {
                    stall_after,
                    ..known
                },
                None => ObservedService {
                    endpoint,
                    stall_after,
                    handshakes: 0,
                    newest: NewestConnections::default(),
                },
            };
            self.services.insert(service.row, observed);
        }
    }

    /// Judges and observes these services from now on.
    pub fn set_services(&mut self, now: Duration, services: &[ServiceConfig]) {
        self.observe(services);
        let judged = living(services).map(judged_service).collect();
        self.machine.handle_services(now, judged);
        if self.sockets.is_none() {
            return;
        }
        if let Err(error) = self.run_checks(services) {
            tracing::error!(%error, "cannot start the checks of a service: its server is judged without them");
        }
    }

    /// Starts the checks that these services have, and ends all others. Checks that stay go on.
    ///
    /// # Errors
    /// There is no memory for a thread.
    fn run_checks(&mut self, services: &[ServiceConfig]) -> std::io::Result<()> {
        let mut former = std::mem::take(&mut self.checks);
        for service in living(services) {
            let endpoint = service.endpoint();
            let known = former.remove(&endpoint);
            let running = match known.filter(|known| known.are_those_of(service)) {
                Some(known) => Some(known),
                None => RunningChecks::start(service, &self.observations)?,
            };
            self.checks
                .extend(running.map(|running| (endpoint, running)));
        }
        Ok(())
    }

    /// Starts the threads that observe servers. They get the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for a socket.
    fn start(&mut self, services: &[ServiceConfig]) -> std::io::Result<()> {
        self.sockets = Some(SocketObserverThread::start(self.observations.clone())?);
        self.run_checks(services)
    }

    /// Returns the state of a service at every node; nothing if this node is not the contact node.
    pub fn nodes_of(&self, service: &ServiceEndpoint) -> Vec<NodeHealth> {
        self.machine.nodes_of_service(service)
    }

    /// Returns the machine that judges servers and nodes.
    pub fn machine(&mut self) -> &mut Health {
        &mut self.machine
    }

    /// Returns true if one more line about a node's servers may be written.
    fn admits_line_about(&mut self, node: NodeId) -> bool {
        self.node_logs.entry(node).or_default().admits()
    }

    /// Returns true if a node can serve new clients of a service, as far as this node knows.
    pub fn is_served(&self, service: &ServiceEndpoint) -> bool {
        self.machine.is_served(service)
    }

    /// Counts a connection whose handshake has ended at this node, of the service in this row.
    pub fn on_established(&mut self, now: Duration, row: u16, flow: Flow) {
        if let Some(service) = self.services.get_mut(&row) {
            service.handshakes += 1;
            service.newest.add(now, flow);
        }
    }

    /// Returns the time at which to call [`Engine::poll_health`].
    pub fn next_wake(&self, now: Duration) -> Duration {
        self.machine.poll_timeout(now).min(self.inspect_at)
    }

    fn request_inspection(&mut self, now: Duration) {
        self.inspect_at = now + INSPECTION_INTERVAL;
        let Some(sockets) = &self.sockets else {
            return;
        };
        let mut request = InspectionRequest {
            services: Vec::with_capacity(self.services.len()),
            connections: Vec::new(),
        };
        for service in self.services.values_mut() {
            let is_tcp = service.endpoint.protocol == Protocol::Tcp;
            let handshakes = is_tcp.then_some(service.handshakes);
            request.services.push((service.endpoint, handshakes));
            if let Some(age) = service.stall_after {
                request.connections.extend(service.newest.due(now, age));
            }
        }
        sockets.request(request);
    }

    /// Returns the peers that have sent anything since the last call.
    fn take_heard(&mut self, peers: &Peers) -> BTreeSet<NodeId> {
        let mut heard = BTreeSet::new();
        for peer in peers.ids() {
            let received = peers.stats(peer).map_or(0, |stats| stats.received_bytes);
            if self.received_bytes.insert(peer, received) != Some(received) {
                heard.insert(peer);
            }
        }
        heard
    }
}

/// Returns the services that take new clients.
fn living(services: &[ServiceConfig]) -> impl Iterator<Item = &ServiceConfig> {
    services.iter().filter(|service| !service.is_ending)
}

fn judged_service(service: &ServiceConfig) -> JudgedService {
    JudgedService {
        endpoint: service.endpoint(),
        weights: service.weights.clone(),
        stall_after: service.check.stall_after,
        fall: service.check.fall,
        rise: service.check.rise,
        checks: service.check.kinds(),
    }
}

impl Engine {
    /// Handles an observation of this node's servers.
    pub(super) fn handle_observation(&mut self, observation: Observation) {
        let now = self.now();
        let monitor = &mut self.health;
        match observation {
            Observation::Listeners(samples) => {
                for (service, sample) in &samples {
                    monitor.machine.handle_sample(now, service, sample);
                }
            }
            Observation::UnreadConnections(flows) => {
                for service in monitor.services.values_mut() {
                    let connections = service.newest.on_inspected(|flow| flows.contains(flow));
                    let endpoint = service.endpoint;
                    (monitor.machine).handle_unread_connections(now, &endpoint, connections);
                }
            }
            Observation::Check {
                service,
                kind,
                result,
            } => monitor.machine.handle_check(now, &service, kind, result),
        }
    }

    /// Requests an inspection of this node's sockets, looks for signs of life of the peers, and does whatever is due.
    pub(super) fn poll_health(&mut self) {
        let now = self.now();
        if now >= self.health.inspect_at {
            self.health.request_inspection(now);
            self.publish_services();
        }
        if now >= self.health.machine.poll_timeout(now) {
            let heard = self.health.take_heard(&self.peers);
            self.health.machine.handle_timeout(now, &heard);
        }
    }

    /// Handles a frame about the health of servers.
    pub(super) fn handle_health_frame(&mut self, from: NodeId, frame: HealthFrame) {
        let now = self.now();
        self.health.machine.handle_frame(now, from, frame);
    }

    /// Carries out the decisions of the health machine.
    pub(super) fn run_health_machine(&mut self) {
        while let Some(output) = self.health.machine.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    // A node that is not connected gets the state when its channel works again.
                    let _ = self.peers.send(to, &Frame::Health(frame));
                }
                Output::Probe { node } => self.peers.probe(node),
                Output::Place { service, weights } => {
                    let now = self.now();
                    self.placement.set_well_weights(now, &service, &weights);
                    self.placement.place(&mut self.dataplane);
                    self.update_placement_metrics(&service);
                }
                Output::Event(event) => self.on_health_event(event),
            }
        }
    }

    fn on_health_event(&mut self, event: Event) {
        match event {
            Event::ServerChanged { service, state } => {
                let pool = self.pool_of(&service).to_owned();
                match state {
                    ServerState::Serving => tracing::info!(pool, %service, "the server serves"),
                    ServerState::Absent => {
                        tracing::info!(pool, %service, "no server listens here");
                    }
                    ServerState::Failing(problem) => {
                        tracing::warn!(pool, %service, %problem, "the server here gets no new clients");
                        let metrics = self.statistics.metrics();
                        metrics.count_server_failure(&pool, problem.name());
                        let series = &mut self.health.series;
                        series.failures.insert((pool, problem.name()));
                    }
                }
            }
            Event::NodeSilent { node, silence } => {
                let (node, silence_ms) = (self.node_name(node), silence.as_millis());
                tracing::warn!(
                    node,
                    silence_ms,
                    "a node does not answer: it gets no new clients"
                );
            }
            Event::NodeHeard { node } => {
                tracing::info!(node = self.node_name(node), "a silent node answers again");
            }
            Event::Excluded {
                service,
                node,
                reason,
            } => {
                self.update_placement_metrics(&service);
                if !self.health.admits_line_about(node) {
                    return;
                }
                let (pool, node) = (self.pool_of(&service).to_owned(), self.node_name(node));
                match reason {
                    Exclusion::NoServer | Exclusion::Draining => {
                        tracing::info!(pool, %service, node, %reason, "a node gets no new clients");
                    }
                    _ => {
                        tracing::warn!(pool, %service, node, %reason, "a node gets no new clients");
                    }
                }
            }
            Event::Included { service, node } => {
                self.update_placement_metrics(&service);
                if !self.health.admits_line_about(node) {
                    return;
                }
                let (pool, node) = (self.pool_of(&service).to_owned(), self.node_name(node));
                tracing::info!(pool, %service, node, "a node gets new clients again");
            }
            Event::NobodyServes { service } if self.health.unserved_log.admits() => {
                let pool = self.pool_of(&service).to_owned();
                tracing::warn!(
                    pool,
                    %service,
                    "no node serves: new clients go to nodes that hang or are silent, or else to all by weight"
                );
            }
            Event::NobodyServes { .. } => {}
        }
    }

    fn pool_of(&self, endpoint: &ServiceEndpoint) -> &str {
        let mut services = self.config.services.iter();
        let service = services.find(|service| service.endpoint() == *endpoint);
        service.map_or("", |service| &service.pool)
    }

    /// Updates the series of a service, at the contact node.
    fn update_placement_metrics(&mut self, endpoint: &ServiceEndpoint) {
        let pool = self.pool_of(endpoint).to_owned();
        for health in self.health.machine.nodes_of_service(endpoint) {
            let is_well = health.exclusion.is_none();
            let (service, node) = (endpoint.to_string(), self.node_name(health.node));
            let metrics = self.statistics.metrics();
            metrics.set_server_well(&pool, &service, &node, is_well);
            let series = &mut self.health.series;
            series.well.insert((pool.clone(), service, node));
        }
    }

    /// Begins the metric series of new services and nodes, and ends the series of removed ones, after a change of the
    /// services, the nodes or the contact node.
    pub(super) fn publish_servers(&mut self) {
        let former = std::mem::take(&mut self.health.series.well);
        let services: Vec<ServiceEndpoint> = living(&self.config.services)
            .map(ServiceConfig::endpoint)
            .collect();
        for service in &services {
            self.update_placement_metrics(service);
        }
        let (series, metrics) = (&mut self.health.series, self.statistics.metrics());
        for (pool, service, node) in former.difference(&series.well) {
            metrics.forget_server(pool, service, node);
        }
        let services = &self.config.services;
        series.failures.retain(|(pool, reason)| {
            let has_pool = services.iter().any(|service| service.pool == *pool);
            if !has_pool {
                metrics.forget_server_failures(pool, reason);
            }
            has_pool
        });
    }

    /// Starts the observation of this node's servers, with the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for a socket.
    pub(super) fn start_health(&mut self) -> std::io::Result<()> {
        self.publish_servers();
        self.health.start(&self.config.services)
    }

    /// Returns the state of this node's server of a service.
    pub(super) fn server_health(&self, service: &ServiceConfig) -> ServerHealth {
        match self.health.machine.own_server(&service.endpoint()) {
            None => ServerHealth::Unknown,
            Some(ServerState::Serving) => ServerHealth::Serving,
            Some(ServerState::Absent) => ServerHealth::Absent,
            Some(ServerState::Failing(problem)) => ServerHealth::Failing {
                problem: problem.to_string(),
            },
        }
    }

    /// Returns the state of a service at every node; nothing if this node is not the contact node.
    pub(super) fn service_nodes(&self, service: &ServiceConfig) -> Vec<ServiceNode> {
        let nodes = self.health.machine.nodes_of_service(&service.endpoint());
        nodes
            .into_iter()
            .map(|health| ServiceNode {
                node: self.node_name(health.node),
                weight: health.weight,
                placed_weight: health.placed_weight,
                problem: health.exclusion.map(|reason| reason.to_string()),
            })
            .collect()
    }

    /// Returns the message about a node that is connected and does not answer.
    pub(super) fn silence_problem(&self, node: NodeId) -> Option<String> {
        let is_silent = self.health.machine.is_silent(node);
        is_silent.then(|| "does not answer and gets no new clients".to_owned())
    }

    /// Returns messages to the operator about servers and nodes that get no new clients.
    pub(super) fn health_problems(&self) -> Vec<String> {
        let machine = &self.health.machine;
        let (mut problems, mut unreachable) = (Vec::new(), BTreeMap::new());
        for service in &self.config.services {
            let (endpoint, pool) = (service.endpoint(), &service.pool);
            if !machine.is_contact()
                && let Some(ServerState::Failing(problem)) = machine.own_server(&endpoint)
            {
                problems.push(server_message(pool, &endpoint, "here", problem));
            }
            for health in machine.nodes_of_service(&endpoint) {
                let name = self.node_name(health.node);
                match health.exclusion {
                    _ if health.weight == 0 => {}
                    Some(Exclusion::Problem(problem)) => {
                        let place = format!("at {name}");
                        problems.push(server_message(pool, &endpoint, &place, problem));
                    }
                    Some(reason @ (Exclusion::NotConnected | Exclusion::Silent)) => {
                        unreachable.insert(name, reason);
                    }
                    Some(Exclusion::NoServer | Exclusion::Draining) | None => {}
                }
            }
            if machine.is_unserved(&endpoint) {
                problems.push(format!(
                    "no node serves {pool} ({endpoint}): start a server of it, or give a node that has one a weight"
                ));
            }
        }
        let unreachable = unreachable.into_iter();
        problems.extend(unreachable.map(|(name, reason)| {
            format!("{name} gets no new clients: {reason}; look at its daemon and its network")
        }));
        problems
    }
}

fn server_message(
    pool: &str,
    endpoint: &ServiceEndpoint,
    place: &str,
    problem: ServerProblem,
) -> String {
    format!("{pool} ({endpoint}) gets no new clients {place}: {problem}")
}
