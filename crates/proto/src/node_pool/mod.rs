//! The server nodes of a service as a pool: a pool policy decides on each node's share of the new flows, by the nodes'
//! weights, by the loads that they report, and by their distances. The contact node's daemon runs the machine, and fills
//! the placement table of the packet programs by the shares.
//!
//! The packet programs choose a node for each new flow without the daemon. So a policy that selects by load is asked for
//! many selections at once, and the number of a node's selections is the node's share until the next reports.

mod shares;
#[cfg(test)]
mod tests;

pub use shares::{NodeFigures, depends_on_loads, shares_by_policy};

use holdfast_wire::NodeId;
use holdfast_wire::group_data::ServicePolicy;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most nodes whose loads are remembered.
const REPORTS_MAX: usize = 1 << 16;

/// The settings of a [`NodePool`].
#[derive(Debug, Clone, Copy)]
pub struct NodePoolConfig {
    /// Least time between two changes of a service's shares by loads (1 s). The packet programs keep one earlier
    /// placement, for flows that are a few milliseconds old.
    pub refresh_interval: Duration,
    /// Time after which a reported load is unknown again (5 s).
    pub report_lifetime: Duration,
}

impl Default for NodePoolConfig {
    fn default() -> NodePoolConfig {
        NodePoolConfig {
            refresh_interval: Duration::from_secs(1),
            report_lifetime: Duration::from_secs(5),
        }
    }
}

/// New shares of a service's nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeShares<S> {
    /// Service to which the shares belong.
    pub service: S,
    /// Each node's share of new flows, relative to the others; a node that is not named gets none.
    pub shares: BTreeMap<NodeId, u32>,
}

#[derive(Debug, Clone, Copy)]
struct LoadReport {
    load: u32,
    at: Duration,
}

#[derive(Debug)]
struct PlacedService {
    policy: ServicePolicy,
    weights: BTreeMap<NodeId, u32>,
    placed: BTreeMap<NodeId, u32>,
    /// Time of the next change by loads; none for a policy without loads.
    refresh_at: Option<Duration>,
}

/// The machine that divides new flows of services among nodes; `S` identifies a service.
#[derive(Debug)]
pub struct NodePool<S> {
    config: NodePoolConfig,
    services: BTreeMap<S, PlacedService>,
    reports: BTreeMap<NodeId, LoadReport>,
    /// Distances of the nodes from the contact node, in milliseconds.
    distances: BTreeMap<NodeId, u32>,
    outputs: VecDeque<NodeShares<S>>,
}

impl<S: Ord + Copy> NodePool<S> {
    /// Returns a node pool without services.
    pub fn new(config: NodePoolConfig) -> NodePool<S> {
        NodePool {
            config,
            services: BTreeMap::new(),
            reports: BTreeMap::new(),
            distances: BTreeMap::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Sets policy and weights of a service, at its begin and at each change. Nodes of weight 0, and nodes that are not
    /// named, get no new flows. The shares come into force at once.
    pub fn handle_service(
        &mut self,
        now: Duration,
        service: S,
        policy: ServicePolicy,
        weights: BTreeMap<NodeId, u32>,
    ) {
        let shares = shares_by_policy(&policy, &self.figures(now, &weights));
        let needs_loads = depends_on_loads(policy.kind);
        let pooled = PlacedService {
            policy,
            weights,
            placed: shares.clone(),
            refresh_at: needs_loads.then(|| now + self.config.refresh_interval),
        };
        self.services.insert(service, pooled);
        self.outputs.push_back(NodeShares { service, shares });
    }

    /// Forgets a service and its shares.
    pub fn handle_service_removed(&mut self, service: S) {
        self.services.remove(&service);
        self.outputs.retain(|output| output.service != service);
    }

    /// Handles a node's report of its load, as a fraction of `u32::MAX`.
    pub fn handle_load(&mut self, now: Duration, node: NodeId, load: u32) {
        if self.reports.len() < REPORTS_MAX || self.reports.contains_key(&node) {
            self.reports.insert(node, LoadReport { load, at: now });
        }
    }

    /// Sets a node's distance from the contact node in milliseconds: half of the round trip time.
    pub fn handle_distance(&mut self, node: NodeId, distance_ms: u32) {
        if self.distances.len() < REPORTS_MAX || self.distances.contains_key(&node) {
            self.distances.insert(node, distance_ms);
        }
    }

    /// Changes the shares that are due, if loads or distances have changed them enough.
    pub fn handle_timeout(&mut self, now: Duration) {
        let lifetime = self.config.report_lifetime;
        self.reports.retain(|_, report| now < report.at + lifetime);
        let is_due = |service: &&S| {
            let refresh_at = self.services[*service].refresh_at;
            refresh_at.is_some_and(|refresh_at| refresh_at <= now)
        };
        let due: Vec<S> = self.services.keys().filter(is_due).copied().collect();
        for service in due {
            let pooled = &self.services[&service];
            let shares = shares_by_policy(&pooled.policy, &self.figures(now, &pooled.weights));
            let is_news = shares::differ(&pooled.placed, &shares);
            let Some(pooled) = self.services.get_mut(&service) else {
                continue;
            };
            pooled.refresh_at = Some(now + self.config.refresh_interval);
            if is_news {
                pooled.placed.clone_from(&shares);
                self.outputs.push_back(NodeShares { service, shares });
            }
        }
    }

    /// Returns the next shares to bring into force, none if there are none left.
    pub fn poll_output(&mut self) -> Option<NodeShares<S>> {
        self.outputs.pop_front()
    }

    /// Returns the time at which to call `handle_timeout`, none for never.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let refresh = |service: &PlacedService| service.refresh_at;
        self.services.values().filter_map(refresh).min()
    }

    /// Returns the shares of a service's nodes that are in force.
    pub fn placed(&self, service: S) -> Option<&BTreeMap<NodeId, u32>> {
        self.services.get(&service).map(|pooled| &pooled.placed)
    }

    /// Returns the load that a node has reported of late.
    pub fn load(&self, now: Duration, node: NodeId) -> Option<u32> {
        let report = self.reports.get(&node)?;
        (now < report.at + self.config.report_lifetime).then_some(report.load)
    }

    /// Returns the figures of a service's nodes. A node of unknown load counts as the busiest of the others, so that a
    /// silent node attracts nobody.
    fn figures(
        &self,
        now: Duration,
        weights: &BTreeMap<NodeId, u32>,
    ) -> BTreeMap<NodeId, NodeFigures> {
        let loads = weights.keys().filter_map(|node| self.load(now, *node));
        let highest = loads.max().unwrap_or(0);
        let figures_of = |(node, weight): (&NodeId, &u32)| {
            let figures = NodeFigures {
                weight: *weight,
                load: self.load(now, *node).unwrap_or(highest),
                distance_ms: self.distances.get(node).copied().unwrap_or(0),
            };
            (*node, figures)
        };
        weights.iter().map(figures_of).collect()
    }
}
