//! Treaps (Aragon and Seidel 1989): each node has a random priority, not above its parent's.

use super::{BalanceScheme, NIL, TreeNodes};

/// Balance by random priorities.
#[derive(Debug, Default)]
pub struct Treap;

impl BalanceScheme for Treap {
    fn initial_mark(random: u32) -> u32 {
        random
    }

    fn rebalance_after_insert<K>(nodes: &mut TreeNodes<K>, node: u32) {
        loop {
            let parent = nodes[node].parent;
            if parent == NIL || nodes[parent].balance_mark >= nodes[node].balance_mark {
                break;
            }
            let side = nodes.side_of(node);
            nodes.rotate(parent, 1 - side);
        }
    }

    fn remove_node<K>(nodes: &mut TreeNodes<K>, node: u32) {
        loop {
            let [left, right] = nodes[node].children;
            if left == NIL || right == NIL {
                nodes.replace(node, left.max(right));
                let parent = nodes[node].parent;
                nodes.update_sums_to_root(parent);
                nodes[NIL].parent = NIL;
                return;
            }
            let side = usize::from(nodes[left].balance_mark > nodes[right].balance_mark);
            nodes.rotate(node, side);
        }
    }
}

#[cfg(test)]
impl Treap {
    pub(super) fn check_subtree<K>(nodes: &TreeNodes<K>, node: u32) {
        for child in nodes[node].children {
            if child != NIL {
                assert!(nodes[child].balance_mark <= nodes[node].balance_mark);
                Treap::check_subtree(nodes, child);
            }
        }
    }
}
