//! The loads of other nodes, as far as this node has heard of them lately: an approximation of the group's load.

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{LoadReport, NodeDemand};
use std::collections::BTreeMap;

/// Most nodes whose load is kept. The newest ones are a random sample of a larger group.
const NODES_MAX: usize = 128;
/// Highest load of another node that counts in the average, in percent points: a bound on the effect of a lie.
const COUNTED_POINTS_MAX: f64 = 200.0;

/// The load of another node, as far as this node knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct KnownNode {
    pub demand: NodeDemand,
    pub memory_free_kib: u64,
    pub is_open: bool,
    measured_at: Duration,
    /// Time at which the node itself told its load; none if others did.
    told_at: Option<Duration>,
    /// Time before which the node gets no offer.
    pub avoid_until: Duration,
}

/// The loads of other nodes.
#[derive(Debug, Default)]
pub(super) struct KnownNodes {
    nodes: BTreeMap<NodeId, KnownNode>,
}

impl KnownNodes {
    /// Takes a report that `from` sent. The word of a node about itself is kept against others for as long as
    /// `direct_for`; otherwise the newest report counts.
    pub fn learn(
        &mut self,
        now: Duration,
        from: NodeId,
        report: &LoadReport,
        direct_for: Duration,
    ) {
        let is_direct = from == report.node;
        let age = Duration::from_millis(report.age_ms.into());
        let measured_at = now.saturating_sub(age);
        let former = self.nodes.get(&report.node).copied();
        if let Some(former) = former
            && !is_direct
        {
            let is_protected =
                (former.told_at).is_some_and(|at| now.saturating_sub(at) < direct_for);
            if is_protected || former.measured_at >= measured_at {
                return;
            }
        }
        let avoid_until = former.map_or(Duration::ZERO, |former| former.avoid_until);
        if former.is_none() && self.nodes.len() >= NODES_MAX && !self.evict_older_than(measured_at)
        {
            return;
        }
        let known = KnownNode {
            demand: report.demand,
            memory_free_kib: report.memory_free_kib,
            is_open: report.is_open,
            measured_at,
            told_at: is_direct.then_some(now),
            avoid_until,
        };
        self.nodes.insert(report.node, known);
    }

    /// Forgets the oldest report if it is older than `measured_at`.
    fn evict_older_than(&mut self, measured_at: Duration) -> bool {
        let oldest = self.nodes.iter().min_by_key(|(_, node)| node.measured_at);
        let oldest = oldest.filter(|(_, node)| node.measured_at < measured_at);
        let Some(id) = oldest.map(|(id, _)| *id) else {
            return false;
        };
        self.nodes.remove(&id);
        true
    }

    /// Forgets nodes that have left the group.
    pub fn retain(&mut self, is_member: impl Fn(NodeId) -> bool) {
        self.nodes.retain(|node, _| is_member(*node));
    }

    /// Takes the load that a node has told in a negotiation.
    pub fn update_demand(&mut self, now: Duration, node: NodeId, demand: NodeDemand) {
        if let Some(known) = self.nodes.get_mut(&node) {
            (known.demand, known.measured_at, known.told_at) = (demand, now, Some(now));
        }
    }

    /// Adds the load of a process that moved to the node.
    pub fn add_used(&mut self, node: NodeId, used: u32) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.demand.used = known.demand.used.saturating_add(used);
        }
    }

    /// Makes no offers to a node until this time.
    pub fn avoid(&mut self, node: NodeId, until: Duration) {
        if let Some(known) = self.nodes.get_mut(&node) {
            known.avoid_until = known.avoid_until.max(until);
        }
    }

    /// Returns the nodes whose load is not older than `freshness`.
    pub fn fresh(
        &self,
        now: Duration,
        freshness: Duration,
    ) -> impl Iterator<Item = (NodeId, &KnownNode)> {
        let nodes = self.nodes.iter().map(|(id, node)| (*id, node));
        nodes.filter(move |(_, node)| now.saturating_sub(node.measured_at) <= freshness)
    }

    /// Returns the mean load of the open nodes whose load is fresh, and of this node if it is `own`; in percent points.
    pub fn average(
        &self,
        now: Duration,
        freshness: Duration,
        own: Option<NodeDemand>,
    ) -> Option<f64> {
        let others = self.fresh(now, freshness).filter(|(_, node)| node.is_open);
        let others =
            others.map(|(_, node)| node.demand.utilization().points().min(COUNTED_POINTS_MAX));
        let all = others.chain(own.map(|own| own.utilization().points()));
        let (sum, count) = all.fold((0.0, 0_u32), |(sum, count), load| (sum + load, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    }

    /// Returns the newest reports with their present ages, at most `count`.
    pub fn newest(&self, now: Duration, freshness: Duration, count: usize) -> Vec<LoadReport> {
        let mut fresh: Vec<(NodeId, &KnownNode)> = self.fresh(now, freshness).collect();
        fresh.sort_by_key(|(_, node)| std::cmp::Reverse(node.measured_at));
        let report = |(node, known): (NodeId, &KnownNode)| LoadReport {
            node,
            demand: known.demand,
            memory_free_kib: known.memory_free_kib,
            is_open: known.is_open,
            age_ms: age_ms(now, known.measured_at),
        };
        fresh.into_iter().take(count).map(report).collect()
    }

    /// Returns the number of known nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }
}

/// Returns the time since a measurement as in a report.
pub(super) fn age_ms(now: Duration, measured_at: Duration) -> u32 {
    let age = now.saturating_sub(measured_at).as_millis();
    u32::try_from(age).unwrap_or(u32::MAX)
}
