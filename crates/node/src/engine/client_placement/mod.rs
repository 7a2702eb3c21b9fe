//! Placement of new clients: by weights and a pool policy, or at the successor of a service's server.

mod successors;

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_api::control::ErrorBody;
use holdfast_bpf::shared_with_c::Successor;
use holdfast_proto::node_pool::{NodePool, NodePoolConfig, NodeShares, depends_on_loads};
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::{MoveId, NodeId};

use super::operator_view::error_body;
use crate::config::ServiceConfig;
use crate::dataplane::Dataplane;

/// Shares of new flows by node; 0 for a node that gets none.
type NodeWeights = BTreeMap<NodeId, u32>;

/// The choice of the nodes that get each service's new clients.
pub struct ClientPlacement {
    /// The services by their rows.
    services: BTreeMap<u16, ServiceConfig>,
    /// Each node's weight by the operator's wish, by the service's row.
    weights: BTreeMap<u16, NodeWeights>,
    /// Each node's weight as the judgement on its server leaves it; without nodes whose servers are not well.
    well_weights: BTreeMap<u16, NodeWeights>,
    /// The shares of the nodes by each service's policy.
    pool: NodePool<u16>,
    /// True if the contact node's judgement on servers decides which nodes get new clients.
    follows_health: bool,
    /// Number of changes of the weights.
    epoch: u32,
    /// Services of each move to this node, by row, with the successor known before the move.
    previous_successors: BTreeMap<MoveId, BTreeMap<u16, Option<Successor>>>,
    /// Times in seconds at which handshakes no longer end at the donor, by the service's row.
    forward_until_s: BTreeMap<u16, u32>,
}

impl ClientPlacement {
    /// Returns the placement by the configured weights, which the maps have already. If the placement follows the health of
    /// servers, a node that joins later has no new clients before [`ClientPlacement::set_well_weights`] names it.
    pub fn new(services: &[ServiceConfig], follows_health: bool) -> Self {
        let mut placement = Self {
            services: BTreeMap::new(),
            weights: BTreeMap::new(),
            well_weights: BTreeMap::new(),
            pool: NodePool::new(NodePoolConfig::default()),
            follows_health,
            epoch: 0,
            previous_successors: BTreeMap::new(),
            forward_until_s: BTreeMap::new(),
        };
        for service in services {
            placement.set_service(Duration::ZERO, service);
        }
        while placement.pool.poll_output().is_some() {}
        placement
    }

    /// Returns the weights of the first service.
    pub fn first_weights(&self) -> impl Iterator<Item = (NodeId, u32)> {
        let weights = self.weights.values().next().into_iter().flatten();
        weights.map(|(id, weight)| (*id, *weight))
    }

    /// Returns the number of changes of the weights.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns true if the policy of some service selects by load, so that the nodes must report theirs.
    pub fn needs_loads(&self) -> bool {
        let mut services = self.services.values();
        services.any(|service| !service.is_ending && depends_on_loads(service.policy.kind))
    }

    /// Returns the shares of a service's nodes that are in force.
    pub fn shares(&self, row: u16) -> impl Iterator<Item = (NodeId, u32)> {
        let shares = self.pool.placed(row).into_iter().flatten();
        shares.map(|(id, share)| (*id, *share))
    }

    /// Handles a node's report of its load.
    pub fn on_load(&mut self, now: Duration, node: NodeId, load: u32) {
        self.pool.handle_load(now, node, load);
    }

    /// Sets the distance of a node by the round trip time to it.
    pub fn on_round_trip(&mut self, node: NodeId, round_trip: Duration) {
        let distance_ms = u32::try_from((round_trip / 2).as_millis()).unwrap_or(u32::MAX);
        self.pool.handle_distance(node, distance_ms);
    }

    /// Brings shares into force that loads have changed.
    pub fn follow_loads(&mut self, now: Duration, dataplane: &mut Dataplane) {
        self.pool.handle_timeout(now);
        self.place(dataplane);
    }

    /// Adds a service whose row the maps have, or changes the weights or the policy of one. Nodes that are not well keep
    /// the weight 0, and a node that is new in a known service begins with it: nothing is known of its server. A
    /// judgement on the servers and [`ClientPlacement::place`] follow.
    pub fn set_service(&mut self, now: Duration, service: &ServiceConfig) {
        let mut well = match service.is_ending {
            true => NodeWeights::new(),
            false => service.weights.clone(),
        };
        for (node, weight) in &mut well {
            if self.is_excluded(service.row, *node) {
                *weight = 0;
            }
        }
        if well.values().all(|weight| *weight == 0) && !service.is_ending {
            well.clone_from(&service.weights);
        }
        self.services.insert(service.row, service.clone());
        self.weights.insert(service.row, service.weights.clone());
        self.well_weights.insert(service.row, well.clone());
        self.pool
            .handle_service(now, service.row, service.policy, well);
    }

    /// Returns true if a node gets no new clients of a known service: its server is not well, or the node has joined since
    /// the last judgement. The next judgement follows at once.
    fn is_excluded(&self, row: u16, node: NodeId) -> bool {
        let well = self.well_weights.get(&row);
        let weight = well.map(|well| well.get(&node).copied().unwrap_or(0));
        self.follows_health && weight == Some(0)
    }

    /// Sets the weights of the nodes whose servers are well; all others get no new clients. [`ClientPlacement::place`] follows.
    pub fn set_well_weights(
        &mut self,
        now: Duration,
        endpoint: &ServiceEndpoint,
        weights: &NodeWeights,
    ) {
        for service in self.services.values() {
            if service.endpoint() == *endpoint && !service.is_ending {
                self.well_weights.insert(service.row, weights.clone());
                self.pool
                    .handle_service(now, service.row, service.policy, weights.clone());
            }
        }
    }

    /// Forgets the service with this row in the placement table.
    pub fn remove_service(&mut self, row: u16) {
        self.services.remove(&row);
        self.weights.remove(&row);
        self.well_weights.remove(&row);
        self.forward_until_s.remove(&row);
        for previous in self.previous_successors.values_mut() {
            previous.remove(&row);
        }
        self.pool.handle_service_removed(row);
    }

    /// Brings changed shares into force. Existing flows stay where they are.
    pub fn place(&mut self, dataplane: &mut Dataplane) {
        while let Some(NodeShares { service, shares }) = self.pool.poll_output() {
            let Some(service) = self.services.get(&service) else {
                continue;
            };
            if let Err(error) = dataplane.set_weights(service.row, service, &shares) {
                tracing::error!(service = service.pool, %error, "cannot change where new clients go");
            }
        }
    }

    /// Changes nodes' weights for all services. Returns the services with their new weights.
    ///
    /// # Errors
    /// No node would take new flows.
    pub fn change_weights(
        &mut self,
        now: Duration,
        changes: &NodeWeights,
    ) -> Result<Vec<ServiceConfig>, ErrorBody> {
        let mut changed: Vec<ServiceConfig> = self.services.values().cloned().collect();
        changed.retain(|service| !service.is_ending);
        for service in &mut changed {
            let weights = changes.iter().map(|(id, weight)| (*id, *weight));
            service.weights.extend(weights);
            if service.weights.values().all(|weight| *weight == 0) {
                return Err(error_body(
                    "no node would take new flows",
                    "leave at least one weight above 0",
                ));
            }
        }
        for service in &changed {
            self.set_service(now, service);
        }
        self.epoch += 1;
        Ok(changed)
    }
}

#[cfg(test)]
mod tests;
