//! Red-black trees (Guibas and Sedgewick 1978): all paths to the leaves have the same number of black nodes, and no red
//! node has a red child.

use super::{Balance, NIL, Nodes};

/// Balance by colours.
#[derive(Debug, Default)]
pub struct RedBlack;

const BLACK: u32 = 0;
const RED: u32 = 1;

impl Balance for RedBlack {
    fn mark(_: u32) -> u32 {
        RED
    }

    fn linked<K>(nodes: &mut Nodes<K>, mut node: u32) {
        loop {
            let parent = nodes[node].parent;
            if nodes[parent].mark == BLACK {
                break;
            }
            // A red node is not the root, so it has a parent.
            let side = nodes.side(parent);
            let above = nodes[parent].parent;
            let uncle = nodes[above].children[1 - side];
            if nodes[uncle].mark == RED {
                nodes[parent].mark = BLACK;
                nodes[uncle].mark = BLACK;
                nodes[above].mark = RED;
                node = above;
                continue;
            }
            let mut top = parent;
            if nodes[parent].children[1 - side] == node {
                nodes.rotate(parent, side);
                top = node;
            }
            nodes[top].mark = BLACK;
            nodes[above].mark = RED;
            nodes.rotate(above, 1 - side);
            break;
        }
        let root = nodes.root;
        nodes[root].mark = BLACK;
    }

    fn unlink<K>(nodes: &mut Nodes<K>, node: u32) {
        let [left, right] = nodes[node].children;
        let (mut gone, child) = (nodes[node].mark, left.max(right));
        let changed;
        let heir = if left == NIL || right == NIL {
            nodes.replace(node, child);
            changed = nodes[node].parent;
            child
        } else {
            let next = nodes.end(right, 0);
            gone = nodes[next].mark;
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
            nodes[next].mark = nodes[node].mark;
            child
        };
        nodes.sum_up(changed);
        if gone == BLACK {
            restore(nodes, heir);
        }
        nodes[NIL].parent = NIL;
    }
}

/// Restores the balance after the paths through a node, possibly [`NIL`], have lost a black node.
fn restore<K>(nodes: &mut Nodes<K>, mut node: u32) {
    while node != nodes.root && nodes[node].mark == BLACK {
        let parent = nodes[node].parent;
        let side = nodes.side(node);
        let mut sibling = nodes[parent].children[1 - side];
        if nodes[sibling].mark == RED {
            nodes[sibling].mark = BLACK;
            nodes[parent].mark = RED;
            nodes.rotate(parent, side);
            sibling = nodes[parent].children[1 - side];
        }
        let nephews = nodes[sibling].children;
        if nephews.iter().all(|&nephew| nodes[nephew].mark == BLACK) {
            nodes[sibling].mark = RED;
            node = parent;
            continue;
        }
        if nodes[nephews[1 - side]].mark == BLACK {
            nodes[nephews[side]].mark = BLACK;
            nodes[sibling].mark = RED;
            nodes.rotate(sibling, 1 - side);
            sibling = nodes[parent].children[1 - side];
        }
        nodes[sibling].mark = nodes[parent].mark;
        nodes[parent].mark = BLACK;
        let outer = nodes[sibling].children[1 - side];
        nodes[outer].mark = BLACK;
        nodes.rotate(parent, side);
        node = nodes.root;
    }
    nodes[node].mark = BLACK;
}

#[cfg(test)]
impl RedBlack {
    /// Checks a subtree; returns the number of black nodes on each path.
    pub(super) fn check<K>(nodes: &Nodes<K>, node: u32) -> usize {
        if node == NIL {
            return 0;
        }
        let children = nodes[node].children;
        if nodes[node].mark == RED {
            assert!(children.iter().all(|&child| nodes[child].mark == BLACK));
        }
        let [left, right] = children.map(|child| RedBlack::check(nodes, child));
        assert_eq!(left, right);
        left + usize::from(nodes[node].mark == BLACK)
    }
}
