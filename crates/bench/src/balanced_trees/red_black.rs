//! Red-black trees (Guibas and Sedgewick 1978): all paths to the leaves have the same number of black nodes, and no red
//! node has a red child.

use super::{BalanceScheme, NIL, TreeNodes};

/// Balance by colours.
#[derive(Debug, Default)]
pub struct RedBlack;

const BLACK: u32 = 0;
const RED: u32 = 1;

impl BalanceScheme for RedBlack {
    fn initial_mark(_: u32) -> u32 {
        RED
    }

    fn rebalance_after_insert<K>(nodes: &mut TreeNodes<K>, mut node: u32) {
        loop {
            let parent = nodes[node].parent;
            if nodes[parent].balance_mark == BLACK {
                break;
            }
            // A red node is not the root, so it has a parent.
            let side = nodes.side_of(parent);
            let above = nodes[parent].parent;
            let uncle = nodes[above].children[1 - side];
            if nodes[uncle].balance_mark == RED {
                nodes[parent].balance_mark = BLACK;
                nodes[uncle].balance_mark = BLACK;
                nodes[above].balance_mark = RED;
                node = above;
                continue;
            }
            let mut top = parent;
            if nodes[parent].children[1 - side] == node {
                nodes.rotate(parent, side);
                top = node;
            }
            nodes[top].balance_mark = BLACK;
            nodes[above].balance_mark = RED;
            nodes.rotate(above, 1 - side);
            break;
        }
        let root = nodes.root;
        nodes[root].balance_mark = BLACK;
    }

    fn remove_node<K>(nodes: &mut TreeNodes<K>, node: u32) {
        let [left, right] = nodes[node].children;
        let (mut removed_colour, child) = (nodes[node].balance_mark, left.max(right));
        let changed;
        let replacement = if left == NIL || right == NIL {
            nodes.replace(node, child);
            changed = nodes[node].parent;
            child
        } else {
            let next = nodes.last_on_side(right, 0);
            removed_colour = nodes[next].balance_mark;
            let child = nodes[next].children[1];
            if next == right {
                nodes[child].parent = next;
                changed = next;
            } else {
                changed = nodes[next].parent;
                nodes.replace(next, child);
                nodes[next].children[1] = right;
                nodes[right].parent = next;
            }
            nodes.replace(node, next);
            nodes[next].children[0] = left;
            nodes[left].parent = next;
            nodes[next].balance_mark = nodes[node].balance_mark;
            child
        };
        nodes.update_sums_to_root(changed);
        if removed_colour == BLACK {
            rebalance_after_removal(nodes, replacement);
        }
        nodes[NIL].parent = NIL;
    }
}

/// Restores the balance after the paths through a node, possibly [`NIL`], have lost a black node.
fn rebalance_after_removal<K>(nodes: &mut TreeNodes<K>, mut node: u32) {
    while node != nodes.root && nodes[node].balance_mark == BLACK {
        let parent = nodes[node].parent;
        let side = nodes.side_of(node);
        let mut sibling = nodes[parent].children[1 - side];
        if nodes[sibling].balance_mark == RED {
            nodes[sibling].balance_mark = BLACK;
            nodes[parent].balance_mark = RED;
            nodes.rotate(parent, side);
            sibling = nodes[parent].children[1 - side];
        }
        let nephews = nodes[sibling].children;
        if nephews
            .iter()
            .all(|&nephew| nodes[nephew].balance_mark == BLACK)
        {
            nodes[sibling].balance_mark = RED;
            node = parent;
            continue;
        }
        if nodes[nephews[1 - side]].balance_mark == BLACK {
            nodes[nephews[side]].balance_mark = BLACK;
            nodes[sibling].balance_mark = RED;
            nodes.rotate(sibling, 1 - side);
            sibling = nodes[parent].children[1 - side];
        }
        nodes[sibling].balance_mark = nodes[parent].balance_mark;
        nodes[parent].balance_mark = BLACK;
        let outer = nodes[sibling].children[1 - side];
        nodes[outer].balance_mark = BLACK;
        nodes.rotate(parent, side);
        node = nodes.root;
    }
    nodes[node].balance_mark = BLACK;
}

#[cfg(test)]
impl RedBlack {
    /// Checks a subtree; returns the number of black nodes on each path.
    pub(super) fn check_subtree<K>(nodes: &TreeNodes<K>, node: u32) -> usize {
        if node == NIL {
            return 0;
        }
        let children = nodes[node].children;
        if nodes[node].balance_mark == RED {
            assert!(
                children
                    .iter()
                    .all(|&child| nodes[child].balance_mark == BLACK)
            );
        }
        let [left, right] = children.map(|child| RedBlack::check_subtree(nodes, child));
        assert_eq!(left, right);
        left + usize::from(nodes[node].balance_mark == BLACK)
    }
}
