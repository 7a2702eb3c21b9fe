//! Treaps (Aragon and Seidel 1989): each node has a random priority, not above its parent's.

use super::{Balance, NIL, Nodes};

/// Balance by random priorities.
#[derive(Debug, Default)]
pub struct Treap;

impl Balance for Treap {
    fn mark(random: u32) -> u32 {
        random
    }

    fn linked<K>(nodes: &mut Nodes<K>, node: u32) {
        loop {
            let parent = nodes[node].parent;
            if parent == NIL || nodes[parent].mark >= nodes[node].mark {
                break;
            }
            let side = nodes.side(node);
            nodes.rotate(parent, 1 - side);
        }
    }

    fn unlink<K>(nodes: &mut Nodes<K>, node: u32) {
        loop {
            let [left, right] = nodes[node].children;
            if left == NIL || right == NIL {
                nodes.replace(node, left.max(right));
                let parent = nodes[node].parent;
                nodes.sum_up(parent);
                nodes[NIL].parent = NIL;
                return;
            }
            let side = usize::from(nodes[left].mark > nodes[right].mark);
            nodes.rotate(node, side);
        }
    }
}

#[cfg(test)]
impl Treap {
    pub(super) fn check<K>(nodes: &Nodes<K>, node: u32) {
        for child in nodes[node].children {
            if child != NIL {
                assert!(nodes[child].mark <= nodes[node].mark);
                Treap::check(nodes, child);
            }
        }
    }
}
