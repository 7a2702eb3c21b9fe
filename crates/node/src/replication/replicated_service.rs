//! One replicated service at the contact node: its legs, and the machine that decides about them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_bpf::replication::shared_with_c::{
    Endpoint, LegPath, LinkPath, ReplicatedService as MapService, SERVICE_COMPARE,
};
use holdfast_bpf::replication::watch::Observation;
use holdfast_bpf::shared_with_c::{NODE_ENCAP, Node};
use holdfast_proto::replication::{
    BackupCopy, CommandError, DropReason, ReplicatedServiceConfig, Replication, WatchLimits,
};
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::{
    ConnectionRecord, LEGS_MAX, ReplicationFrame, ReplicationRoles,
};

use super::map_conversion::leg_set;
use crate::config::ReplicationConfig;

/// Longest wait for the servers of all legs. Replication then begins with the servers that answer.
const PREPARE_MAX: Duration = Duration::from_secs(10);
/// Time between two proposals of the same change of the group's settings.
pub(super) const PROPOSAL_RETRY: Duration = Duration::from_secs(5);
/// Number of dropped legs and of differing outputs that are remembered for the operator.
const REMEMBERED_MAX: usize = 16;

/// A replicated service.
pub(super) struct ReplicatedService {
    /// Name of the service.
    pub name: String,
    pub endpoint: ServiceEndpoint,
    /// Index in the data plane.
    pub index: u16,
    /// Server of each leg.
    pub legs: [Option<(NodeId, SocketAddr)>; LEGS_MAX],
    /// Number of wanted replicas.
    pub replicas: u8,
    pub phase: Phase,
    /// The service in the form of the data plane, as it was set last.
    pub map_service: MapService,
    /// Latest answer of each node with a leg: true if its server listens and its answers come here.
    pub answers: BTreeMap<NodeId, bool>,
    pub history: LegHistory,
    /// Nodes of the legs in the group's settings, the primary first.
    pub saved_legs: Vec<NodeId>,
    /// Last proposal of other legs for the settings, and its time.
    pub proposed_legs: Option<(Duration, Vec<NodeId>)>,
    /// Time of the last proposal to end the replication.
    pub end_proposed_at: Option<Duration>,
}

/// How far a service is replicated.
pub(super) enum Phase {
    /// Waits since this time until the servers of the legs are ready. Clients wait.
    Preparing { since: Duration },
    /// The machine decides.
    Running(Box<Replication>),
}

/// Promoted and dropped legs of a service, for the operator.
#[derive(Debug, Default)]
pub(super) struct LegHistory {
    pub promotions: u64,
    /// Dropped legs, the latest last.
    pub dropped: VecDeque<(NodeId, DropReason)>,
    pub divergence_count: u64,
    /// Differing outputs with client and position, the latest last.
    pub divergences: VecDeque<(NodeId, SocketAddr, u64)>,
}

impl LegHistory {
    pub fn add_dropped(&mut self, node: NodeId, reason: DropReason) {
        if self.dropped.len() == REMEMBERED_MAX {
            self.dropped.pop_front();
        }
        self.dropped.push_back((node, reason));
    }

    pub fn add_divergence(&mut self, node: NodeId, client: SocketAddr, position: u64) {
        self.divergence_count += 1;
        if self.divergences.len() == REMEMBERED_MAX {
            self.divergences.pop_front();
        }
        self.divergences.push_back((node, client, position));
    }
}

impl ReplicatedService {
    /// Returns a service whose legs have not been asked yet. `addresses` has the address of each node.
    pub fn new(
        now: Duration,
        (name, endpoint, index): (String, ServiceEndpoint, u16),
        wanted: &ReplicationConfig,
        addresses: &BTreeMap<NodeId, SocketAddr>,
    ) -> ReplicatedService {
        let port = endpoint.address.port();
        let mut legs = [None; LEGS_MAX];
        for (leg, node) in legs.iter_mut().zip(&wanted.legs) {
            let address = addresses.get(node);
            *leg = address.map(|address| (*node, SocketAddr::new(address.ip(), port)));
        }
        ReplicatedService {
            name,
            endpoint,
            index,
            legs,
            replicas: wanted.replicas,
            phase: Phase::Preparing { since: now },
            map_service: MapService::default(),
            answers: BTreeMap::new(),
            history: LegHistory::default(),
            saved_legs: wanted.legs.clone(),
            proposed_legs: None,
            end_proposed_at: None,
        }
    }

    /// Returns the machine, once it decides.
    pub fn machine(&mut self) -> Option<&mut Replication> {
        match &mut self.phase {
            Phase::Preparing { .. } => None,
            Phase::Running(machine) => Some(machine),
        }
    }

    /// Tells the machine which legs have sent packets.
    pub fn hear_legs(&mut self, now: Duration, observations: &[Observation]) {
        let heard = observations.iter().filter_map(|observed| match observed {
            Observation::LegsHeard { key, legs } if key.service == self.index => Some(*legs),
            _ => None,
        });
        let heard = leg_set(heard.fold(0, |all, legs| all | legs).into());
        let nodes = self.legs.map(|leg| leg.map(|(node, _)| node));
        let Some(machine) = self.machine() else {
            return;
        };
        for node in heard.iter().filter_map(|leg| nodes[leg.position()]) {
            machine.handle_heard(now, node);
        }
    }

    /// Returns the nodes whose servers are, or are to become, legs.
    pub fn leg_nodes(&self) -> BTreeSet<NodeId> {
        match &self.phase {
            Phase::Preparing { .. } => self.legs.iter().flatten().map(|(node, _)| *node).collect(),
            Phase::Running(machine) => machine.roles().nodes.into_iter().flatten().collect(),
        }
    }

    /// Returns the nodes of the legs that serve, the primary first, if the group's settings are to name them and do not. With no leg,
    /// the settings keep the last primary.
    pub fn unsaved_legs(&self, now: Duration) -> Option<Vec<NodeId>> {
        let Phase::Running(machine) = &self.phase else {
            return None;
        };
        let roles = machine.roles();
        let others = roles.live.without(roles.primary);
        let legs = std::iter::once(roles.primary).chain(others.iter());
        let legs = legs.filter(|leg| roles.live.contains(*leg));
        let serving: Vec<NodeId> = legs.filter_map(|leg| roles.nodes[leg.position()]).collect();
        let is_proposed =
            |(at, legs): &(Duration, Vec<NodeId>)| *legs == serving && now < *at + PROPOSAL_RETRY;
        let is_saved = serving == self.saved_legs || serving.is_empty();
        let is_unsaved = !is_saved && !self.proposed_legs.as_ref().is_some_and(is_proposed);
        is_unsaved.then_some(serving)
    }

    /// Returns the service as the data plane needs it; `node` finds the path to a node. Legs without a known path are left out.
    pub fn map_service(&self, node: impl Fn(NodeId) -> Option<Node>) -> MapService {
        let mut service = MapService {
            endpoint: Endpoint::new(self.endpoint.address),
            flags: SERVICE_COMPARE,
            lag_bytes_max: WatchLimits::default().lag_bytes_max,
            ..MapService::default()
        };
        for (path, leg) in service.legs.iter_mut().zip(&self.legs) {
            let Some((id, address)) = leg else {
                continue;
            };
            let Some(node) = node(*id).filter(|node| node.flags & NODE_ENCAP == 0) else {
                continue;
            };
            *path = LegPath {
                endpoint: Endpoint::new(*address),
                path: LinkPath {
                    ifindex: node.ifindex,
                    to_link: node.link,
                    own_link: node.own_link,
                },
            };
        }
        service
    }

    /// Returns true if a node's server can be a leg: it answers, and the path to it is known.
    fn is_leg_ready(&self, node: NodeId) -> bool {
        let mut legs = self.legs.iter().zip(&self.map_service.legs);
        let is_leg = |(leg, path): (&Option<(NodeId, SocketAddr)>, &LegPath)| {
            leg.is_some_and(|(id, _)| id == node) && path.path.ifindex != 0
        };
        self.answers.get(&node) == Some(&true) && legs.any(is_leg)
    }

    /// Returns true if replication begins now: all servers are ready, or the primary's is and the wait was long enough.
    pub fn is_ready(&self, now: Duration) -> bool {
        let Phase::Preparing { since } = self.phase else {
            return false;
        };
        let is_ready = |(node, _): &(NodeId, SocketAddr)| self.is_leg_ready(*node);
        let all = self.legs.iter().flatten().all(is_ready);
        let primary = self.legs[0].as_ref().is_some_and(is_ready);
        all || primary && now >= since + PREPARE_MAX
    }

    /// Lets the machine decide from now on. Legs whose servers are not ready do not serve; their nodes are returned.
    ///
    /// # Errors
    /// No leg is ready.
    pub fn start(
        &mut self,
        now: Duration,
        own: NodeId,
        view: &View,
    ) -> Result<Vec<NodeId>, CommandError> {
        let is_ready = |node: &NodeId| self.is_leg_ready(*node);
        let nodes: Vec<NodeId> = self.legs.iter().flatten().map(|(node, _)| *node).collect();
        let (ready, missing): (Vec<_>, Vec<_>) = nodes.into_iter().partition(is_ready);
        let config = self.machine_config(own);
        let machine = Replication::new(now, config, &ready, view)?;
        self.keep_legs(&ready);
        self.phase = Phase::Running(Box::new(machine));
        Ok(missing)
    }

    /// Removes all other legs. The remaining ones have the first positions.
    fn keep_legs(&mut self, nodes: &[NodeId]) {
        let mut kept = [None; LEGS_MAX];
        let mut paths = [LegPath::default(); LEGS_MAX];
        let legs = self.legs.iter().zip(&self.map_service.legs);
        let legs = legs.filter_map(|(leg, path)| Some((leg.as_ref()?, path)));
        let legs = legs.filter(|((node, _), _)| nodes.contains(node));
        for ((leg, path), slot) in legs.zip(kept.iter_mut().zip(&mut paths)) {
            *slot.0 = Some(*leg);
            *slot.1 = *path;
        }
        self.legs = kept;
        self.map_service.legs = paths;
    }

    /// Continues the connections that an earlier daemon of this node left in the maps.
    ///
    /// # Errors
    /// No leg serves.
    pub fn resume(
        &mut self,
        now: Duration,
        own: NodeId,
        (roles, records): (ReplicationRoles, Vec<ConnectionRecord>),
        view: &View,
    ) -> Result<(), CommandError> {
        let config = self.machine_config(own);
        let mut copy = BackupCopy::new(self.endpoint, config.connections_max);
        copy.handle_frame(ReplicationFrame::Snapshot {
            term: view.epoch,
            service: self.endpoint,
            sequence: 1,
            roles,
            records,
            is_first: true,
            is_last: true,
        });
        let machine = Replication::succeed(now, config, &copy, view)?;
        self.phase = Phase::Running(Box::new(machine));
        Ok(())
    }

    fn machine_config(&self, own: NodeId) -> ReplicatedServiceConfig {
        ReplicatedServiceConfig {
            replicas: self.replicas.into(),
            ..ReplicatedServiceConfig::new(own, self.endpoint)
        }
    }
}
