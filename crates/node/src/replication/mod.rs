//! Replication of connections (paper 003): the replicator at the contact node, and the part of nodes with a leg.
//!
//! [`ReplicationDriver`] loads the replication programs beside the steering data plane, feeds the machine of
//! `proto::replication` of each replicated service, and carries out its outputs. The settings of the group name the legs of each
//! service; the driver proposes new settings when legs are dropped or promoted.
//!
//! | part | purpose |
//! | --- | --- |
//! | `replicated_service` | one service: its legs, its machine, its history |
//! | `programs` | loaded programs, their events, outputs that concern the data plane alone |
//! | `map_conversion` | maps of the programs to events of the machine |
//! | `closed_connections` | connections that have ended, whose entries remain for a while |
//! | `abandoned_handshakes` | handshakes that clients never complete |
//! | `service_settings` | the services that this node replicates, or has a leg for |
//! | `decisions` | outputs of the machines |
//! | `leg_routes` | nodes with a leg: route of the answers, state of the server |
//! | `report` | reports to the operator |

mod abandoned_handshakes;
mod closed_connections;
mod decisions;
mod leg_routes;
mod map_conversion;
mod programs;
mod replicated_service;
mod report;
mod service_settings;

pub(crate) use leg_routes::REPLY_ROUTING_TABLE;
pub(crate) use report::unreplicated_report;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use holdfast_bpf::replication::monotonic_now;
use holdfast_bpf::replication::shared_with_c::{
    CONNECTION_CLOSED, Connection, ConnectionKey, HANDSHAKE_ANSWERED,
};
use holdfast_bpf::replication::watch::ConnectionWatch;
use holdfast_proto::replication::{DataPlaneEvent, WatchLimits};
use holdfast_proto::view::View;
use holdfast_wire::group_data::GroupChange;
use holdfast_wire::health_frames::{ServerProblem, ServerState, ServiceEndpoint};
use holdfast_wire::replication_frames::{LegIndex, ReplicationFrame};
use holdfast_wire::{Frame, NodeId};

use crate::config::Config;
use crate::dataplane::Dataplane;
use crate::metrics::Metrics;
use crate::peer_channel::Peers;
use abandoned_handshakes::AbandonedHandshakes;
use closed_connections::ClosedConnections;
use leg_routes::LegRoutes;
use map_conversion::{
    data_plane_event, handshake_record, observation_event, observation_interval, watch_limits,
};
use programs::{LoadedPrograms, LoadingPrograms};
use replicated_service::{PROPOSAL_RETRY, Phase, ReplicatedService};

/// Time between two questions to the nodes with legs; the answers are signs of life.
const QUERY_INTERVAL: Duration = Duration::from_millis(50);

/// Wait of a service for the nodes of its legs.
struct ReturnWait {
    /// Time at which the service is continued without the missing nodes.
    deadline: Duration,
    /// True once the deadline has passed.
    is_over: bool,
}

/// The replication of services, at the contact node and at nodes with a leg.
pub(crate) struct ReplicationDriver {
    own: NodeId,
    own_address: IpAddr,
    /// Directory of the programs' pins.
    pins: PathBuf,
    /// Index of the interface at which packets of clients and legs arrive.
    interface: u32,
    peers: Peers,
    metrics: Metrics,
    /// None while nothing is replicated here, or the programs are being loaded.
    programs: Option<LoadedPrograms>,
    loading: Option<LoadingPrograms>,
    services: BTreeMap<ServiceEndpoint, ReplicatedService>,
    /// Services of an earlier daemon that are continued when the nodes of their legs are in the group's list again.
    returning: BTreeMap<ServiceEndpoint, ReturnWait>,
    watch: ConnectionWatch,
    closed: ClosedConnections,
    abandoned: AbandonedHandshakes,
    view: View,
    /// Names and addresses of all nodes.
    nodes: BTreeMap<NodeId, (String, SocketAddr)>,
    observe_at: Duration,
    query_at: Duration,
    leg_routes: LegRoutes,
    /// Changes of the group's settings that follow from the machines' decisions.
    proposals: VecDeque<GroupChange>,
}

impl ReplicationDriver {
    /// Returns a driver that replicates nothing yet.
    pub fn new(
        config: &Config,
        interface: u32,
        peers: Peers,
        metrics: Metrics,
        view: View,
    ) -> Self {
        Self {
            own: config.node.id,
            own_address: config.node.address,
            pins: config.node.bpffs.join("replication"),
            interface,
            peers,
            metrics,
            programs: None,
            loading: None,
            services: BTreeMap::new(),
            returning: BTreeMap::new(),
            watch: ConnectionWatch::new(watch_limits(&WatchLimits::default())),
            closed: ClosedConnections::default(),
            abandoned: AbandonedHandshakes::default(),
            view,
            nodes: BTreeMap::new(),
            observe_at: Duration::ZERO,
            query_at: Duration::ZERO,
            leg_routes: LegRoutes::default(),
            proposals: VecDeque::new(),
        }
    }

    /// Returns the servers of this node that are legs: their processes cannot move.
    pub fn leg_servers(&self) -> BTreeSet<SocketAddr> {
        self.leg_routes.servers()
    }

    /// Makes the server at a node the primary.
    ///
    /// # Errors
    /// The reason for the operator.
    pub fn promote(
        &mut self,
        now: Duration,
        endpoint: &ServiceEndpoint,
        node: NodeId,
    ) -> Result<(), String> {
        let service = self.services.get_mut(endpoint);
        let machine = service.and_then(ReplicatedService::machine);
        let machine = machine.ok_or("the replication of the service has not begun; try again")?;
        let mut legs = machine.leg_reports().into_iter();
        let leg: LegIndex = (legs.find(|leg| leg.node == node))
            .map(|leg| leg.leg)
            .ok_or(
                "the service has no leg at this node; `holdfast replicate status` lists its legs",
            )?;
        machine
            .promote(now, leg)
            .map_err(|error| error.to_string())?;
        self.run(now);
        Ok(())
    }

    /// Waits until the programs are loaded or have events.
    pub async fn readable(&self) {
        match (&self.programs, &self.loading) {
            (_, Some(loading)) => loading.done().await,
            (Some(programs), None) => programs.readable().await,
            (None, None) => std::future::pending().await,
        }
    }

    /// Attaches the programs if they have been loaded. Returns true if [`ReplicationDriver::apply`] is to be called again.
    pub fn attach_loaded(&mut self) -> bool {
        let loaded = self.loading.as_ref();
        let Some(loaded) = loaded.and_then(|loading| loading.take(self.interface)) else {
            return false;
        };
        self.loading = None;
        match loaded {
            Ok(programs) => self.programs = Some(programs),
            Err(error) => tracing::error!(%error, "cannot load the replication programs"),
        }
        self.programs.is_some()
    }

    /// Ends waits for nodes with a leg that are due. Returns true if [`ReplicationDriver::apply`] is to be called again.
    pub fn end_return_waits(&mut self, now: Duration) -> bool {
        let mut has_ended = false;
        for wait in self.returning.values_mut() {
            has_ended |= !wait.is_over && now >= wait.deadline;
            wait.is_over |= now >= wait.deadline;
        }
        has_ended
    }

    /// Handles the programs' events.
    pub fn read_events(&mut self, now: Duration) {
        let Some(programs) = &self.programs else {
            return;
        };
        for event in programs.take_events() {
            let half_open = &programs.replicator.half_open;
            let event_for_machine =
                data_plane_event(&event, |key| half_open.get(key).ok().flatten());
            let mut services = self.services.values_mut();
            let service = services.find(|service| service.index == event.key.service);
            let machine = service.and_then(ReplicatedService::machine);
            if let (Some(machine), Some(event)) = (machine, event_for_machine) {
                machine.handle_data_plane(now, event);
            }
        }
        self.run(now);
    }

    /// Records a sign of life of a node.
    pub fn handle_heard(&mut self, now: Duration, node: NodeId) {
        for service in self.services.values_mut() {
            if let Some(machine) = service.machine() {
                machine.handle_heard(now, node);
            }
        }
    }

    /// Takes a frame of another node. Only the contact node asks about legs, and only nodes with legs are heard.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: &ReplicationFrame) {
        match *frame {
            ReplicationFrame::ServerQuery { service } if from == self.view.contact_node => {
                let answer = self.leg_routes.answer(service, self.own_address);
                if let Err(error) = self.peers.send(from, &Frame::Replication(answer)) {
                    tracing::debug!(%from, %error, "the answer about a leg was dropped");
                }
            }
            ReplicationFrame::ServerAnswer {
                service,
                listens,
                is_routed,
            } => {
                let Some(service) = self.services.get_mut(&service) else {
                    return;
                };
                service.answers.insert(from, listens && is_routed);
                if let Some(machine) = service.machine()
                    && !listens
                {
                    let ended = ServerState::Failing(ServerProblem::ListenerClosed);
                    machine.handle_server(now, from, &ended);
                }
                self.run(now);
            }
            _ => {}
        }
    }

    /// Returns the time at which to call [`ReplicationDriver::poll`]; none while nothing is replicated here.
    pub fn next_wake(&self) -> Option<Duration> {
        let machines = self
            .services
            .values()
            .filter_map(|service| match &service.phase {
                Phase::Preparing { .. } => None,
                Phase::Running(machine) => machine.poll_timeout(),
            });
        let own = (!self.services.is_empty()).then(|| self.observe_at.min(self.query_at));
        let waits = self.returning.values().filter(|wait| !wait.is_over);
        let waits = waits.map(|wait| wait.deadline);
        machines.chain(own).chain(waits).min()
    }

    /// Does whatever is due.
    pub fn poll(&mut self, now: Duration, dataplane: &Dataplane) {
        if self.services.is_empty() {
            return;
        }
        if now >= self.query_at {
            self.query_at = now + QUERY_INTERVAL;
            self.query_legs();
            self.refresh_paths(dataplane);
            self.begin_ready(now);
            self.end_stopped(now);
        }
        if now >= self.observe_at {
            let started = Instant::now();
            self.read_events(now);
            self.observe(now);
            self.observe_at = now + observation_interval(started.elapsed());
        }
        for service in self.services.values_mut() {
            if let Some(machine) = service.machine()
                && machine.poll_timeout().is_some_and(|at| at <= now)
            {
                machine.handle_timeout(now);
            }
        }
        self.run(now);
    }

    fn query_legs(&self) {
        for (endpoint, service) in &self.services {
            for node in service.leg_nodes() {
                self.query(node, *endpoint);
            }
        }
    }

    /// Asks a node about its leg. A node without a channel is silent.
    fn query(&self, node: NodeId, service: ServiceEndpoint) {
        let query = ReplicationFrame::ServerQuery { service };
        let _ = self.peers.send(node, &Frame::Replication(query));
    }

    /// Gives the programs changed paths to the legs.
    pub(super) fn refresh_paths(&mut self, dataplane: &Dataplane) {
        let Some(programs) = &self.programs else {
            return;
        };
        let node = |id: NodeId| {
            dataplane
                .programs
                .nodes
                .get(&u32::from(id.0))
                .ok()
                .flatten()
        };
        for service in self.services.values_mut() {
            let map_service = service.map_service(node);
            if map_service == service.map_service {
                continue;
            }
            match programs.replicator.set_service(service.index, &map_service) {
                Ok(()) => service.map_service = map_service,
                Err(error) => {
                    tracing::error!(service = service.name, %error, "cannot set the paths to the legs");
                }
            }
        }
    }

    /// Begins the replication of services whose servers are ready.
    fn begin_ready(&mut self, now: Duration) {
        let Some(programs) = &self.programs else {
            return;
        };
        for service in self.services.values_mut() {
            if service.replicas == 0 || !service.is_ready(now) {
                continue;
            }
            match service.start(now, self.own, &self.view) {
                Ok(missing) if missing.is_empty() => {}
                Ok(missing) => {
                    tracing::warn!(
                        service = service.name,
                        ?missing,
                        "replication begins without some legs: no server listens there, or its answers are not routed here"
                    );
                    let replicator = &programs.replicator;
                    if let Err(error) = replicator.set_service(service.index, &service.map_service)
                    {
                        tracing::error!(service = service.name, %error, "cannot set the legs of a service");
                    }
                }
                Err(error) => {
                    tracing::error!(service = service.name, %error, "replication cannot begin");
                }
            }
        }
    }

    /// Lets the group end the replication of stopped services without connections.
    fn end_stopped(&mut self, now: Duration) {
        let Some(programs) = &self.programs else {
            return;
        };
        if self.services.values().all(|service| service.replicas > 0) {
            return;
        }
        let connections = programs.replicator.connections.entries();
        for service in self.services.values_mut() {
            let known = match &service.phase {
                Phase::Preparing { .. } => 0,
                Phase::Running(machine) => machine.connection_count(),
            };
            let is_open = |(key, connection): &(ConnectionKey, Connection)| {
                key.service == service.index && connection.flags & CONNECTION_CLOSED == 0
            };
            let has_connections = known > 0 || connections.iter().any(is_open);
            let proposed_at = service.end_proposed_at;
            let is_due = proposed_at.is_none_or(|at| now >= at + PROPOSAL_RETRY);
            if service.replicas > 0 || has_connections || !is_due {
                continue;
            }
            if let Ok(name) = service.name.parse() {
                service.end_proposed_at = Some(now);
                self.proposals.push_back(GroupChange::EndReplication(name));
            }
        }
    }

    /// Looks at all connections for silent, stopped and slow legs.
    fn observe(&mut self, now: Duration) {
        let Some(programs) = &self.programs else {
            return;
        };
        let replicator = &programs.replicator;
        let connections = replicator.connections.entries();
        let handshakes = replicator.half_open.entries();
        let roles_of = |service| replicator.roles(service);
        let time = monotonic_now();
        let mut observations = self.watch.observe(time, &connections, roles_of);
        observations.extend(self.watch.observe_handshakes(time, &handshakes, roles_of));
        for service in self.services.values_mut() {
            service.hear_legs(now, &observations);
        }
        let observed = observations.iter().filter_map(observation_event);
        // Events may have been lost, or read by an earlier daemon that could not handle them any more.
        let answered = handshakes.iter();
        let answered = answered.filter(|(_, handshake)| handshake.state == HANDSHAKE_ANSWERED);
        let opened = answered.map(|(key, handshake)| {
            let record = handshake_record(key.client(), handshake);
            (key.service, DataPlaneEvent::Opened { record })
        });
        let closed = self.closed.update(now, replicator, &connections);
        let closed = closed.into_iter().map(|key| (key.service, key.client()));
        let known = self.services.values().flat_map(|service| {
            let machine = match &service.phase {
                Phase::Running(machine) => Some(machine),
                Phase::Preparing { .. } => None,
            };
            let clients = machine.into_iter().flat_map(|machine| machine.clients());
            clients.map(|client| (service.index, client))
        });
        let abandoned = (self.abandoned).find(time, replicator, (&connections, &handshakes), known);
        let closed = closed.chain(abandoned);
        let closed = closed.map(|(service, client)| (service, DataPlaneEvent::Closed { client }));
        for (index, event) in observed.chain(opened).chain(closed) {
            let mut services = self.services.values_mut();
            let service = services.find(|service| service.index == index);
            if let Some(machine) = service.and_then(ReplicatedService::machine) {
                machine.handle_data_plane(now, event);
            }
        }
        self.publish_metrics();
    }
}
