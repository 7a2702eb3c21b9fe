//! The view of a group: its nodes, and the role of each, at one time (paper 000, section 2.3). Machines take a view as an
//! input and obey the newest.

use holdfast_wire::NodeId;
use std::collections::BTreeSet;

/// Number of no node: the contact node of a node that is in no group.
pub const NO_NODE: NodeId = NodeId(0);

/// The nodes of a group and their roles at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Number of the view. A later view has a larger one.
    pub epoch: u64,
    /// Number of changes of the server nodes that this node learned within the epoch. Such changes need no vote, and so
    /// no new epoch.
    pub revision: u64,
    /// The contact node, which holds the steering table.
    pub contact_node: NodeId,
    /// Nodes that may become contact node, in the order in which they do.
    pub backups: Vec<NodeId>,
    /// Nodes that only serve.
    pub server_nodes: BTreeSet<NodeId>,
}

impl View {
    /// Returns the view of a group whose nodes are configured: the first view, and the last one.
    pub fn configured(contact_node: NodeId, nodes: impl IntoIterator<Item = NodeId>) -> View {
        let others = nodes.into_iter().filter(|node| *node != contact_node);
        View {
            epoch: 1,
            revision: 0,
            contact_node,
            backups: Vec::new(),
            server_nodes: others.collect(),
        }
    }

    /// Returns true if this view replaces `other` at the same node.
    #[must_use]
    pub fn is_newer_than(&self, other: &View) -> bool {
        (self.epoch, self.revision) > (other.epoch, other.revision)
    }

    /// Returns what a removed node obeys until it has a newer view: the same epoch, and no nodes.
    #[must_use]
    pub fn without_nodes(&self) -> View {
        View {
            epoch: self.epoch,
            revision: self.revision,
            contact_node: NO_NODE,
            backups: Vec::new(),
            server_nodes: BTreeSet::new(),
        }
    }

    /// Returns true if a node is in the group.
    #[must_use]
    pub fn contains(&self, node: NodeId) -> bool {
        node == self.contact_node
            || self.backups.contains(&node)
            || self.server_nodes.contains(&node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_view_contains_each_node_once() {
        let view = View::configured(NodeId(2), [NodeId(1), NodeId(2), NodeId(3)]);
        assert!(
            [1, 2, 3]
                .map(NodeId)
                .iter()
                .all(|node| view.contains(*node))
        );
        assert!(!view.contains(NodeId(4)));
        assert!(!view.server_nodes.contains(&NodeId(2)));
    }
}
