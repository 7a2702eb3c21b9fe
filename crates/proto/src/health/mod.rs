//! The health of servers: nodes whose server ended or hangs, and nodes that do not answer, get no new clients.
//!
//! Each node judges its own servers by the listening sockets and queues that the kernel lists, by the requests that new
//! connections leave unread, and by active checks. The node reports the judgement to the contact node, on each change
//! and then regularly. The contact node adds the silence of nodes that do not answer, and places new clients of a
//! service at the nodes that remain. If none remains, it places clients at nodes that hang or are silent, or else at all.
//!
//! A failure counts at once. Recovery counts at once after the first failure; after further ones, a growing hold-down
//! comes first. Existing flows stay where they are.
//!
//! ```text
//!   node                                    contact node
//!   sockets, queues, checks                 silence of channels
//!         │                                       │
//!         ▼                                       ▼
//!   server_health ───── Report ────────────► placement ──► Output::Place
//!                ◄───── Placement ────────────────┘
//! ```
//!
//! A node that gains new clients may receive the last packet of a handshake that began at another node. Each node
//! therefore learns the shares, and passes such a packet on by the previous ones.

mod accept_queue_history;
mod config;
mod event;
mod hold_down;
mod node_reach;
mod placement;
mod server_health;
#[cfg(test)]
mod tests;

pub use config::{HealthConfig, JudgedService};
pub use event::{CheckKind, Event, Exclusion, ListenerSample, NodeHealth, Output, QueueSample};

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::{
    HealthFrame, ReportedServer, ServerProblem, ServerState, ServiceEndpoint, ServiceShares,
};
use node_reach::{NodeReach, ReachChange, exclusion_by_state};
use placement::{Placement, PlacementDecision};
use server_health::ServerHealth;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Fewest inspected connections with unread requests that show a hanging server.
const UNREAD_CONNECTIONS_MIN: u32 = 3;

/// The health machine of one node.
#[derive(Debug)]
pub struct Health {
    config: HealthConfig,
    contact: NodeId,
    services: BTreeMap<ServiceEndpoint, Service>,
    /// The other nodes that this node knows.
    nodes: BTreeMap<NodeId, NodeReach>,
    /// Nodes that have sent anything since the last inspection of the channels.
    heard: BTreeSet<NodeId>,
    /// Nodes that are being drained, this node included.
    draining: BTreeSet<NodeId>,
    inspected_at: Duration,
    report_at: Duration,
    is_reported: bool,
    /// Earliest time at which an early report of another node counts.
    early_reports_at: Option<Duration>,
    /// True once nodes that have not connected yet are excluded.
    is_grace_over: bool,
    /// True if an input may have changed the exclusions.
    is_dirty: bool,
    outputs: VecDeque<Output>,
}

/// A service with its server at this node, and its new clients' shares in the group.
#[derive(Debug)]
struct Service {
    settings: JudgedService,
    server: ServerHealth,
    placement: Placement,
}

impl Health {
    /// Returns a machine for a group with this contact node, whose shares are in force as the operator wishes.
    pub fn new(config: HealthConfig, contact: NodeId, services: Vec<JudgedService>) -> Health {
        let mut machine = Health {
            config,
            contact,
            services: BTreeMap::new(),
            nodes: BTreeMap::new(),
            heard: BTreeSet::new(),
            draining: BTreeSet::new(),
            inspected_at: Duration::ZERO,
            report_at: Duration::ZERO,
            is_reported: false,
            early_reports_at: None,
            is_grace_over: false,
            is_dirty: true,
            outputs: VecDeque::new(),
        };
        machine.set_services(services);
        machine
    }

    /// Takes a changed list of services. A service that stays keeps its judgement, its shares in force and the results of
    /// the checks that stay.
    pub fn handle_services(&mut self, now: Duration, services: Vec<JudgedService>) {
        self.set_services(services);
        self.update(now, true);
    }

    fn set_services(&mut self, services: Vec<JudgedService>) {
        let mut former = std::mem::take(&mut self.services);
        for settings in services {
            let service = match former.remove(&settings.endpoint) {
                Some(mut known) => {
                    known.server.keep_checks(&settings);
                    Service { settings, ..known }
                }
                None => Service {
                    server: ServerHealth::default(),
                    placement: Placement::configured(&settings),
                    settings,
                },
            };
            self.services.insert(service.settings.endpoint, service);
        }
        self.is_dirty = true;
        self.is_reported = false;
    }

    /// Takes changed wishes of the operator for one service's shares, which come into force at once.
    pub fn handle_weights(
        &mut self,
        now: Duration,
        service: &ServiceEndpoint,
        weights: BTreeMap<NodeId, u32>,
    ) {
        if let Some(service) = self.services.get_mut(service) {
            service.settings.weights = weights;
            self.is_dirty = true;
        }
        self.update(now, true);
    }

    /// Takes a change of the contact node. If this node has the role now, the shares that the former contact node has
    /// announced stay in force until the nodes report: each report changes them.
    pub fn handle_contact_node(&mut self, now: Duration, contact: NodeId) {
        if contact == self.contact {
            return;
        }
        self.contact = contact;
        for reach in self.nodes.values_mut() {
            // Reports from an earlier time as the contact node say nothing about the servers of today.
            reach.forget_reports_before(now.saturating_sub(self.config.report_interval));
        }
        let is_contact = self.is_contact();
        for service in self.services.values_mut() {
            service.placement.on_contact_node(is_contact);
        }
        self.is_reported = false;
        self.is_dirty = true;
        self.inspected_at = now;
        self.update(now, false);
    }

    /// Takes the listening sockets of a service at this node.
    pub fn handle_sample(
        &mut self,
        now: Duration,
        service: &ServiceEndpoint,
        sample: &ListenerSample,
    ) {
        if let Some(service) = self.services.get_mut(service) {
            service.server.on_sample(now, sample);
        }
        self.judge_service(now, service);
    }

    /// Takes the number of new connections of a service at this node whose requests the server has not read in time.
    pub fn handle_unread_connections(
        &mut self,
        now: Duration,
        service: &ServiceEndpoint,
        connections: u32,
    ) {
        if let Some(service) = self.services.get_mut(service) {
            service.server.on_unread_connections(connections);
        }
        self.judge_service(now, service);
    }

    /// Takes the result of an active check.
    pub fn handle_check(
        &mut self,
        now: Duration,
        service: &ServiceEndpoint,
        kind: CheckKind,
        result: Result<(), ServerProblem>,
    ) {
        if let Some(Service {
            server, settings, ..
        }) = self.services.get_mut(service)
        {
            server.on_check(settings, kind, result);
        }
        self.judge_service(now, service);
    }

    /// Records that this node's server of a service has moved to another node.
    pub fn handle_departure(&mut self, now: Duration, service: &ServiceEndpoint) {
        if let Some(service) = self.services.get_mut(service) {
            service.server.on_departure();
        }
        self.judge_service(now, service);
    }

    /// Records that the channel to a node works.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        self.nodes.entry(peer).or_default().on_connected();
        self.is_dirty = true;
        if peer == self.contact {
            self.is_reported = false;
        }
        self.update(now, false);
        if self.places_clients() {
            let shares = |service: &Service| ServiceShares {
                service: service.settings.endpoint,
                weights: share_list(&service.placement.placed),
                is_served: !service.placement.is_unserved,
            };
            let services = self.services.values().map(shares).collect();
            let frame = HealthFrame::Placement { services };
            self.outputs.push_back(Output::Send { to: peer, frame });
        }
    }

    /// Records that the channel to a node failed.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.nodes.entry(peer).or_default().on_lost();
        self.is_dirty = true;
        self.update(now, false);
    }

    /// Takes the nodes that are being drained: as long as another node can serve, they get no new clients.
    pub fn handle_draining_nodes(&mut self, now: Duration, draining: BTreeSet<NodeId>) {
        if draining != self.draining {
            self.draining = draining;
            self.is_dirty = true;
            self.update(now, false);
        }
    }

    /// Takes a frame of another node.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: HealthFrame) {
        match frame {
            HealthFrame::Report { servers } => {
                let servers = servers.into_iter();
                let by_service = servers
                    .map(|server| (server.service, server.state))
                    .collect();
                let reach = self.nodes.entry(from).or_default();
                match reach.on_report(now, by_service, &self.config) {
                    Some(at) => {
                        let other = self.early_reports_at;
                        self.early_reports_at = Some(other.map_or(at, |other| other.min(at)));
                    }
                    None => {
                        self.is_dirty = true;
                        self.update(now, false);
                    }
                }
            }
            HealthFrame::Placement { services } => {
                if from == self.contact && self.config.places_clients {
                    for shares in services {
                        self.obey(shares);
                    }
                }
            }
        }
    }

    /// Brings the contact node's shares into force at this node.
    fn obey(&mut self, shares: ServiceShares) {
        let Some(service) = self.services.get_mut(&shares.service) else {
            return;
        };
        service.placement.is_unserved = !shares.is_served;
        let mut weights = shares.weights;
        weights.retain(|(node, weight)| *weight > 0 && service.settings.weights.contains_key(node));
        let weights: BTreeMap<NodeId, u32> = weights.into_iter().collect();
        if weights == service.placement.placed || weights.is_empty() {
            return;
        }
        service.placement.placed.clone_from(&weights);
        self.outputs.push_back(Output::Place {
            service: shares.service,
            weights,
        });
    }

    /// Does whatever is due. `heard` are the nodes that have sent anything since the last call.
    pub fn handle_timeout(&mut self, now: Duration, heard: &BTreeSet<NodeId>) {
        if self.is_contact() {
            self.heard.extend(heard);
            self.inspect(now);
        }
        if !self.is_grace_over && now >= self.config.startup_grace {
            self.is_grace_over = true;
            self.is_dirty = true;
        }
        if now >= self.report_at {
            self.is_reported = false;
        }
        if self.early_reports_at.is_some_and(|at| now >= at) {
            let nodes = self.nodes.values_mut();
            let later = nodes.filter_map(|reach| reach.count_early_report(now, &self.config));
            self.early_reports_at = later.min();
            self.is_dirty = true;
        }
        self.judge(now);
    }

    /// Inspects the channels to the other nodes, if it is time.
    fn inspect(&mut self, now: Duration) {
        let interval = self.config.inspection_interval();
        let elapsed = now.saturating_sub(self.inspected_at);
        if elapsed < interval {
            return;
        }
        self.inspected_at = now;
        let heard = std::mem::take(&mut self.heard);
        // After a delay of this node's own daemon, the others' messages may wait to be read.
        let elapsed = elapsed.min(interval * 2);
        for (node, reach) in &mut self.nodes {
            let (node, is_heard) = (*node, heard.contains(node));
            let change = reach.on_inspection(now, elapsed, is_heard, &self.config);
            if reach.needs_probe() {
                self.outputs.push_back(Output::Probe { node });
            }
            if let Some(change) = change {
                self.is_dirty = true;
                self.outputs.push_back(Output::Event(match change {
                    ReachChange::Silent(silence) => Event::NodeSilent { node, silence },
                    ReachChange::Heard => Event::NodeHeard { node },
                }));
            }
        }
    }

    /// Judges this node's servers again.
    fn judge(&mut self, now: Duration) {
        let services: Vec<ServiceEndpoint> = self.services.keys().copied().collect();
        for service in &services {
            self.judge_service(now, service);
        }
        self.update(now, false);
    }

    /// Judges this node's server of a service again.
    fn judge_service(&mut self, now: Duration, endpoint: &ServiceEndpoint) {
        let Some(service) = self.services.get_mut(endpoint) else {
            return;
        };
        if let Some(state) = service.server.judge(now, &service.settings, &self.config) {
            self.is_dirty = true;
            self.is_reported = false;
            self.outputs.push_back(Output::Event(Event::ServerChanged {
                service: *endpoint,
                state,
            }));
            self.update(now, false);
        }
    }

    /// Reports what has changed and places new clients accordingly.
    fn update(&mut self, now: Duration, at_once: bool) {
        if !self.is_contact() {
            return self.report(now);
        }
        let is_due = |service: &Service| service.placement.pending_at.is_some_and(|at| now >= at);
        if !self.is_dirty && !self.services.values().any(is_due) {
            return;
        }
        self.is_dirty = false;
        let never_connected = NodeReach::default();
        let (mut announced, mut changed) = (Vec::new(), BTreeSet::new());
        for (endpoint, service) in &mut self.services {
            let was_unserved = service.placement.is_unserved;
            let (config, nodes, draining) = (&self.config, &self.nodes, &self.draining);
            let own_state = service.server.judgement();
            service.update_exclusions(&mut self.outputs, |node| {
                let reach = nodes.get(&node).unwrap_or(&never_connected);
                let (exclusion, is_known) = match node == config.node {
                    true => (exclusion_by_state(own_state), own_state.is_some()),
                    false => (
                        reach.exclusion(now, endpoint, config),
                        reach.has_reported(endpoint),
                    ),
                };
                // When this daemon starts, the other nodes serve, and are about to say so.
                let is_known = is_known || now < config.startup_grace;
                let is_drained = draining.contains(&node);
                let exclusion = exclusion.or(is_drained.then_some(Exclusion::Draining));
                (exclusion, is_known)
            });
            if service.placement.is_unserved != was_unserved {
                changed.insert(*endpoint);
            }
        }
        if !self.config.places_clients {
            return;
        }
        for (endpoint, service) in &mut self.services {
            let shares = service.placement.shares(&service.settings);
            let lead = self.config.announcement_lead;
            let decision = service.placement.decide(now, shares, lead, at_once);
            let weights = match &decision {
                PlacementDecision::Keep if changed.contains(endpoint) => &service.placement.placed,
                PlacementDecision::Keep => continue,
                PlacementDecision::Announce(weights) | PlacementDecision::Place(weights) => weights,
            };
            announced.push(ServiceShares {
                service: *endpoint,
                weights: share_list(weights),
                is_served: !service.placement.is_unserved,
            });
            if let PlacementDecision::Place(weights) = decision {
                let service = *endpoint;
                self.outputs.push_back(Output::Place { service, weights });
            }
        }
        if announced.is_empty() {
            return;
        }
        for (node, reach) in &self.nodes {
            if reach.is_connected() {
                let services = announced.clone();
                let frame = HealthFrame::Placement { services };
                self.outputs.push_back(Output::Send { to: *node, frame });
            }
        }
    }

    /// Reports this node's servers to the contact node, if there is anything to report.
    fn report(&mut self, now: Duration) {
        if self.is_reported {
            return;
        }
        self.is_reported = true;
        self.report_at = now + self.config.report_interval;
        let server = |(service, known): (&ServiceEndpoint, &Service)| {
            let state = known.server.judgement()?;
            let service = *service;
            Some(ReportedServer { service, state })
        };
        let servers: Vec<ReportedServer> = self.services.iter().filter_map(server).collect();
        if !servers.is_empty() {
            let frame = HealthFrame::Report { servers };
            let to = self.contact;
            self.outputs.push_back(Output::Send { to, frame });
        }
    }

    /// Returns the next action for the daemon.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which to call [`Health::handle_timeout`].
    pub fn poll_timeout(&self, now: Duration) -> Duration {
        let services = self.services.values();
        let recoveries = services.clone().filter_map(|s| s.server.recovery_at(now));
        let pending = services.filter_map(|service| service.placement.pending_at);
        let regular = match self.is_contact() {
            true => self.inspected_at + self.config.inspection_interval(),
            false => self.report_at,
        };
        let early = self.early_reports_at;
        (recoveries.chain(pending).chain(early)).fold(regular, Duration::min)
    }

    /// Returns true if this node decides where new clients go.
    pub fn is_contact(&self) -> bool {
        self.contact == self.config.node
    }

    fn places_clients(&self) -> bool {
        self.is_contact() && self.config.places_clients
    }

    /// Returns the judgement on this node's server of a service; `None` if nothing is known yet.
    pub fn own_server(&self, service: &ServiceEndpoint) -> Option<ServerState> {
        self.services.get(service)?.server.judgement()
    }

    /// Returns the state of a service at each node, as the contact node sees it; nothing at another node.
    pub fn nodes_of_service(&self, service: &ServiceEndpoint) -> Vec<NodeHealth> {
        let Some(service) = self.services.get(service).filter(|_| self.is_contact()) else {
            return Vec::new();
        };
        let health = |(node, weight): (&NodeId, &u32)| NodeHealth {
            node: *node,
            weight: *weight,
            placed_weight: service.placement.placed.get(node).copied().unwrap_or(0),
            exclusion: service.placement.excluded.get(node).copied(),
        };
        service.settings.weights.iter().map(health).collect()
    }

    /// Returns true if a node is connected and does not answer, as the contact node sees it.
    pub fn is_silent(&self, node: NodeId) -> bool {
        self.is_contact() && self.nodes.get(&node).is_some_and(NodeReach::is_silent)
    }

    /// Returns true if a node can serve a service's new clients, as the contact node sees it, or has said last. True as
    /// long as nothing is known.
    pub fn is_served(&self, service: &ServiceEndpoint) -> bool {
        let service = self.services.get(service);
        service.is_none_or(|service| !service.placement.is_unserved)
    }

    /// Returns true if no node can serve a service's new clients; false if this node is not the contact node.
    pub fn is_unserved(&self, service: &ServiceEndpoint) -> bool {
        self.is_contact()
            && (self.services.get(service)).is_some_and(|service| service.placement.is_unserved)
    }
}

impl Service {
    /// Asks for the exclusion of each node, and whether anything is known of its server; reports changes.
    fn update_exclusions(
        &mut self,
        outputs: &mut VecDeque<Output>,
        exclusion: impl Fn(NodeId) -> (Option<Exclusion>, bool),
    ) {
        let service = self.settings.endpoint;
        let mut excluded = BTreeMap::new();
        self.placement.unknown.clear();
        let mut can_serve = false;
        for (node, weight) in &self.settings.weights {
            let (reason, is_known) = exclusion(*node);
            if is_known {
                self.placement.inherited.remove(node);
            } else if !self.placement.inherited.contains(node) {
                self.placement.unknown.insert(*node);
            }
            let is_able = matches!(reason, None | Some(Exclusion::Draining));
            can_serve |= is_able && *weight > 0;
            let was_excluded = self.placement.excluded.contains_key(node);
            excluded.extend(reason.map(|reason| (*node, reason)));
            let node = *node;
            let event = match reason {
                _ if *weight == 0 => continue,
                Some(reason) if !was_excluded => Event::Excluded {
                    service,
                    node,
                    reason,
                },
                None if was_excluded => Event::Included { service, node },
                _ => continue,
            };
            outputs.push_back(Output::Event(event));
        }
        self.placement.excluded = excluded;
        let was_unserved = std::mem::replace(&mut self.placement.is_unserved, !can_serve);
        if !can_serve && !was_unserved {
            outputs.push_back(Output::Event(Event::NobodyServes { service }));
        }
    }
}

fn share_list(weights: &BTreeMap<NodeId, u32>) -> Vec<(NodeId, u32)> {
    weights
        .iter()
        .map(|(node, weight)| (*node, *weight))
        .collect()
}
