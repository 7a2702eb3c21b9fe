//! Shares of new flows by a pool policy.

use holdfast_handlespace::{Handlespace, RegistrationData, relative_share};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::ServicePolicy;
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolHandle, RegistrarId};
use std::collections::BTreeMap;

/// Number of selections by which the shares of a policy are found if they depend on each other.
const SELECTIONS: u32 = 256;
/// Part of all shares, as a divisor, by which a node's share must differ for a change by loads.
const DIFFERENCE_DIVISOR: u64 = 64;
/// Largest relative share; larger ones are scaled down.
const SHARE_MAX: u64 = 1 << 16;

/// A node's figures for the policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFigures {
    /// The weight; 0 excludes the node.
    pub weight: u32,
    /// The load as a fraction of `u32::MAX`.
    pub load: u32,
    /// The one-way delay from the contact node in milliseconds.
    pub distance_ms: u32,
}

/// Returns true if a policy selects by load or by distance.
pub fn depends_on_loads(kind: PolicyKind) -> bool {
    use PolicyKind::{Priority, Random, RoundRobin, WeightedRandom, WeightedRoundRobin};
    !matches!(
        kind,
        RoundRobin | WeightedRoundRobin | Random | WeightedRandom | Priority
    )
}

/// Returns each node's share of new flows, relative to the others. A node without a share is left out; if the policy
/// gives no node a share, the shares are the weights.
pub fn shares_by_policy(
    policy: &ServicePolicy,
    nodes: &BTreeMap<NodeId, NodeFigures>,
) -> BTreeMap<NodeId, u32> {
    let eligible = nodes.iter().filter(|(_, figures)| figures.weight > 0);
    let eligible: Vec<(NodeId, NodeFigures)> = eligible.map(|(node, of)| (*node, *of)).collect();
    let shares = relative_shares(policy, &eligible)
        .unwrap_or_else(|| shares_by_selection(policy, &eligible));
    match shares.is_empty() {
        true => eligible
            .iter()
            .map(|(node, figures)| (*node, figures.weight))
            .collect(),
        false => shares,
    }
}

fn relative_shares(
    policy: &ServicePolicy,
    nodes: &[(NodeId, NodeFigures)],
) -> Option<BTreeMap<NodeId, u32>> {
    let share_of = |(node, figures): &(NodeId, NodeFigures)| {
        let NodeFigures {
            weight,
            load,
            distance_ms,
        } = *figures;
        let share = relative_share(&policy.of_node(weight, load, distance_ms))?;
        Some((*node, share))
    };
    let shares = nodes.iter().map(share_of).collect::<Option<Vec<_>>>()?;
    let largest = shares.iter().map(|(_, share)| *share).max().unwrap_or(0);
    let scaled = |share: u64| match largest <= SHARE_MAX {
        true => share,
        false => (u128::from(share) * u128::from(SHARE_MAX) / u128::from(largest)) as u64,
    };
    let shares = shares.into_iter().filter(|(_, share)| *share > 0);
    // Fits: shares are at most `SHARE_MAX`.
    Some(
        shares
            .map(|(node, share)| (node, scaled(share).max(1) as u32))
            .collect(),
    )
}

fn shares_by_selection(
    policy: &ServicePolicy,
    nodes: &[(NodeId, NodeFigures)],
) -> BTreeMap<NodeId, u32> {
    let handle = PoolHandle::from("nodes");
    // A fixed seed, so that equal figures give equal shares.
    let mut pool: Handlespace<NodeId> = Handlespace::new(1);
    for (node, figures) in nodes {
        let registration = RegistrationData {
            handle: &handle,
            id: ElementId(node.0.into()),
            home: RegistrarId(1),
            policy: policy.of_node(figures.weight, figures.load, figures.distance_ms),
            class: 0,
            payload: *node,
        };
        // All elements have the same policy and class, so none is refused.
        let _ = pool.register(registration);
    }
    let mut shares = BTreeMap::new();
    for _ in 0..SELECTIONS {
        pool.resolve(&handle, 1, |element| {
            *shares.entry(*element.payload()).or_default() += 1;
        });
    }
    shares
}

/// Returns true if some node's share differs so much that a change is worth a new placement.
pub(super) fn differ(placed: &BTreeMap<NodeId, u32>, shares: &BTreeMap<NodeId, u32>) -> bool {
    let total = |shares: &BTreeMap<NodeId, u32>| -> u64 {
        let values = shares.values().map(|share| u64::from(*share));
        values.sum::<u64>().max(1)
    };
    let (placed_total, total) = (total(placed), total(shares));
    let part = |shares: &BTreeMap<NodeId, u32>, node: &NodeId, total: u64| {
        let share = shares.get(node).copied().unwrap_or(0);
        u64::from(share) * u64::from(u32::MAX) / total
    };
    let mut nodes = placed.keys().chain(shares.keys());
    nodes.any(|node| {
        let (before, after) = (part(placed, node, placed_total), part(shares, node, total));
        (before == 0) != (after == 0)
            || before.abs_diff(after) > u64::from(u32::MAX) / DIFFERENCE_DIVISOR
    })
}
