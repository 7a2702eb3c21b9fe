//! The placement table: assigns each hash slot of new flows to a node, by weight.
//!
//! The table uses weighted rendezvous hashing: every node has a score for every slot, and the highest score wins. All
//! nodes compute the same table from the same weights (so with broadcast exactly one node accepts a new flow). A change
//! of one node's weight moves only the slots that this node gains or loses.

use std::collections::BTreeMap;

use holdfast_bpf::shared_with_c::PLACEMENT_SLOTS;
use holdfast_wire::NodeId;

/// Returns the node id of each slot; 0 everywhere if no node has weight.
#[must_use]
pub fn placement_table(weights: &BTreeMap<NodeId, u32>) -> [u16; PLACEMENT_SLOTS] {
    let mut slots = [0; PLACEMENT_SLOTS];
    for (slot, owner) in (0u32..).zip(slots.iter_mut()) {
        let best = weights
            .iter()
            .filter(|(_, weight)| **weight > 0)
            .map(|(node, weight)| (score(slot, *node, *weight), node.0))
            .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        *owner = best.map_or(0, |(_, node)| node);
    }
    slots
}

/// Returns -weight / ln(u) for u uniform in (0, 1), so that a node's share of slots is its share of the weights.
fn score(slot: u32, node: NodeId, weight: u32) -> f64 {
    let mixed = mix((u64::from(slot) << 16) | u64::from(node.0));
    let uniform = ((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(weight) / uniform.ln()
}

/// The finaliser of splitmix64: every bit of the input changes half of the output.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(pairs: &[(u16, u32)]) -> BTreeMap<NodeId, u32> {
        pairs
            .iter()
            .map(|(node, weight)| (NodeId(*node), *weight))
            .collect()
    }

    fn share(slots: &[u16], node: u16) -> f64 {
        slots.iter().filter(|owner| **owner == node).count() as f64 / slots.len() as f64
    }

    #[test]
    fn shares_follow_the_weights() {
        let slots = placement_table(&weights(&[(1, 1), (2, 2), (3, 1), (4, 0)]));
        assert!(
            (share(&slots, 1) - 0.25).abs() < 0.06,
            "{}",
            share(&slots, 1)
        );
        assert!(
            (share(&slots, 2) - 0.50).abs() < 0.06,
            "{}",
            share(&slots, 2)
        );
        assert_eq!(share(&slots, 4), 0.0);
    }

    #[test]
    fn removed_node_moves_only_its_slots() {
        let before = placement_table(&weights(&[(1, 1), (2, 1), (3, 1)]));
        let after = placement_table(&weights(&[(1, 1), (3, 1)]));
        for (old, new) in before.iter().zip(after) {
            assert!(*old == 2 || *old == new);
        }
    }

    #[test]
    fn zero_weights_choose_no_node() {
        assert_eq!(placement_table(&weights(&[(1, 0)])), [0; PLACEMENT_SLOTS]);
    }
}
