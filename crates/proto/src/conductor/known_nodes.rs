//! The loads of other nodes, as far as this node has heard of them lately: an approximation of the group's load.

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{LoadReport, NodeDemand};
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Most nodes whose load is kept. The newest ones are a random sample of a larger group.
const NODES_MAX: usize = 128;
/// Highest load of another node that counts in the average, in percent points: a bound on the effect of a lie.
const COUNTED_POINTS_MAX: f64 = 200.0;

/// The load of another node, as far as this node knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct KnownNode {
    pub demand: NodeDemand,
    /// The same as a share of the capacity, in percent points.
    pub points: f64,
    pub memory_free_kib: u64,
    pub is_open: bool,
    measured_at: Duration,
    /// Time at which the node itself told its load; none if others did.
    told_at: Option<Duration>,
    /// Time before which the node gets no offer.
    pub avoid_until: Duration,
}

impl KnownNode {
    fn set_demand(&mut self, demand: NodeDemand) {
        (self.demand, self.points) = (demand, demand.utilization().points());
    }
}

/// The loads of other nodes.
#[derive(Debug, Default)]
pub(super) struct KnownNodes {
    /// The nodes in the order of their numbers: each decision reads all of them.
    nodes: Vec<(NodeId, KnownNode)>,
    /// The times of all measurements: the latest last, and of equal ones that of the node with the lowest number.
    measured: VecDeque<(Duration, Reverse<NodeId>)>,
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
        let mut known = KnownNode {
            demand: report.demand,
            points: report.demand.utilization().points(),
            memory_free_kib: report.memory_free_kib,
            is_open: report.is_open,
            measured_at,
            told_at: is_direct.then_some(now),
            avoid_until: Duration::ZERO,
        };
        if let Some(former) = self.get_mut(report.node) {
            let is_protected =
                (former.told_at).is_some_and(|at| now.saturating_sub(at) < direct_for);
            if !is_direct && (is_protected || former.measured_at >= measured_at) {
                return;
            }
            known.avoid_until = former.avoid_until;
            let former = std::mem::replace(former, known);
            self.replace_time(report.node, former.measured_at, measured_at);
        } else if self.nodes.len() < NODES_MAX || self.evict_older_than(measured_at) {
            let place = self.position(report.node).unwrap_or_else(|place| place);
            self.nodes.insert(place, (report.node, known));
            self.add_time(report.node, measured_at);
        }
    }

    /// Forgets the oldest report if it is older than `measured_at`; of several, the one of the node with the lowest number.
    fn evict_older_than(&mut self, measured_at: Duration) -> bool {
        let oldest = self.measured.front().map(|(at, _)| *at);
        let Some(oldest) = oldest.filter(|at| *at < measured_at) else {
            return false;
        };
        let equally_old = self.measured.iter().take_while(|(at, _)| *at == oldest);
        let last = equally_old.count() - 1;
        if let Some((_, Reverse(evicted))) = self.measured.remove(last)
            && let Ok(place) = self.position(evicted)
        {
            self.nodes.remove(place);
        }
        true
    }

    /// Returns the position of a node, or the one at which to insert it.
    fn position(&self, node: NodeId) -> Result<usize, usize> {
        self.nodes.binary_search_by_key(&node, |(known, _)| *known)
    }

    fn get_mut(&mut self, node: NodeId) -> Option<&mut KnownNode> {
        let place = self.position(node).ok()?;
        self.nodes.get_mut(place).map(|(_, known)| known)
    }

    fn add_time(&mut self, node: NodeId, measured_at: Duration) {
        let key = (measured_at, Reverse(node));
        let place = self.measured.partition_point(|time| *time < key);
        self.measured.insert(place, key);
    }

    fn replace_time(&mut self, node: NodeId, former: Duration, measured_at: Duration) {
        if let Ok(place) = self.measured.binary_search(&(former, Reverse(node))) {
            self.measured.remove(place);
        }
        self.add_time(node, measured_at);
    }

    /// Forgets nodes that have left the group.
    pub fn retain(&mut self, is_member: impl Fn(NodeId) -> bool) {
        self.nodes.retain(|(node, _)| is_member(*node));
        self.measured.retain(|(_, Reverse(node))| is_member(*node));
    }

    /// Takes the load that a node has told in a negotiation.
    pub fn update_demand(&mut self, now: Duration, node: NodeId, demand: NodeDemand) {
        if let Some(known) = self.get_mut(node) {
            known.set_demand(demand);
            known.told_at = Some(now);
            let former = std::mem::replace(&mut known.measured_at, now);
            self.replace_time(node, former, now);
        }
    }

    /// Adds the load of a process that moved to the node.
    pub fn add_used(&mut self, node: NodeId, used: u32) {
        if let Some(known) = self.get_mut(node) {
            known.set_demand(NodeDemand {
                used: known.demand.used.saturating_add(used),
                ..known.demand
            });
        }
    }

    /// Makes no offers to a node until this time.
    pub fn avoid(&mut self, node: NodeId, until: Duration) {
        if let Some(known) = self.get_mut(node) {
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
        let others = others.map(|(_, node)| node.points.min(COUNTED_POINTS_MAX));
        let all = others.chain(own.map(|own| own.utilization().points()));
        let (sum, count) = all.fold((0.0, 0_u32), |(sum, count), load| (sum + load, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    }

    /// Returns the newest reports with their present ages, at most `count`.
    pub fn newest(&self, now: Duration, freshness: Duration, count: usize) -> Vec<LoadReport> {
        let newest = self.measured.iter().rev().take(count);
        let fresh = newest.take_while(|(at, _)| now.saturating_sub(*at) <= freshness);
        let report = |(measured_at, Reverse(node)): &(Duration, Reverse<NodeId>)| {
            let place = self.position(*node).ok()?;
            let (_, known) = self.nodes.get(place)?;
            Some(LoadReport {
                node: *node,
                demand: known.demand,
                memory_free_kib: known.memory_free_kib,
                is_open: known.is_open,
                age_ms: age_ms(now, *measured_at),
            })
        };
        fresh.filter_map(report).collect()
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
