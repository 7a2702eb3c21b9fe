//! The view of the group that this node obeys: the contact node, and names and addresses of the nodes.
//!
//! In a group whose contact node is configured, the first view is the only one. In a group that runs itself, there is no
//! view until the first [`crate::membership::GroupEvent::View`].

use std::collections::BTreeMap;
use std::net::SocketAddr;

use holdfast_proto::view::{NO_NODE, View};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::Member;

use super::fault_injection::test_views;
use crate::config::Config;

/// Place of the local node in the group.
pub struct GroupRole {
    own: NodeId,
    view: View,
    members: BTreeMap<NodeId, GroupNode>,
}

/// Name and address of a node of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupNode {
    /// Name of the node.
    pub name: String,
    /// Address of the node's daemon.
    pub address: SocketAddr,
}

/// Returns true if the contact node is configured, and so never changes.
pub fn has_configured_contact(config: &Config) -> bool {
    config.group.self_running.is_none() && !test_views()
}

impl GroupRole {
    /// Returns the role by the configuration; without a view if the group runs itself.
    pub fn new(config: &Config) -> Self {
        let own = config.node.id;
        let own_node = GroupNode {
            name: config.node.name.clone(),
            address: SocketAddr::new(config.node.address, config.node.port),
        };
        let peers = config.peers.iter().map(|peer| {
            let node = GroupNode {
                name: peer.name.clone(),
                address: peer.address,
            };
            (peer.id, node)
        });
        let members: BTreeMap<NodeId, GroupNode> =
            std::iter::once((own, own_node)).chain(peers).collect();
        let view = match has_configured_contact(config) {
            true => View::configured(config.group.contact, members.keys().copied()),
            false => View {
                epoch: 0,
                ..View::configured(NO_NODE, [])
            },
        };
        Self { own, view, members }
    }

    /// Returns the view of the group that this node obeys.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Returns true once the node has a view.
    pub fn has_view(&self) -> bool {
        self.view.epoch > 0
    }

    /// Sets a newer view of the group, with its nodes.
    pub fn set_view(&mut self, view: View, members: Vec<Member>) {
        self.view = view;
        self.members = members
            .into_iter()
            .map(|member| {
                let node = GroupNode {
                    name: member.name.as_str().to_owned(),
                    address: member.address,
                };
                (member.id, node)
            })
            .collect();
    }

    /// Leaves the group: the view has no nodes until the next one. The names of the nodes stay known, for messages.
    pub fn leave(&mut self) {
        self.view = self.view.without_nodes();
    }

    /// Returns the number of this node.
    pub fn own(&self) -> NodeId {
        self.own
    }

    /// Returns the contact node, which holds the steering table.
    pub fn contact(&self) -> NodeId {
        self.view.contact_node
    }

    /// Returns false before the first view, and outside the group.
    pub fn has_contact(&self) -> bool {
        self.view.contact_node != NO_NODE
    }

    /// Returns true if this node is the contact node.
    pub fn is_contact(&self) -> bool {
        self.view.contact_node == self.own
    }

    /// Returns all nodes, by number.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &GroupNode)> {
        self.members.iter().map(|(id, node)| (*id, node))
    }

    /// Returns the nodes other than this one.
    pub fn others(&self) -> impl Iterator<Item = (NodeId, &GroupNode)> {
        self.nodes().filter(|(id, _)| *id != self.own)
    }

    /// Returns the number of the node called `name`.
    pub fn id_of(&self, name: &str) -> Option<NodeId> {
        let mut nodes = self.nodes();
        nodes.find_map(|(id, node)| (node.name == name).then_some(id))
    }

    /// Returns the name of node `id`.
    pub fn name_of(&self, id: NodeId) -> Option<&str> {
        self.members.get(&id).map(|node| node.name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role() -> GroupRole {
        GroupRole {
            own: NodeId(2),
            view: View::configured(NodeId(1), [NodeId(1), NodeId(2)]),
            members: BTreeMap::new(),
        }
    }

    #[test]
    fn view_decides_about_contact_node_and_names() {
        let mut role = role();
        assert!(!role.is_contact() && role.has_view());
        let member = Member {
            id: NodeId(2),
            name: "n2".parse().expect("a name"),
            address: "10.0.0.2:7400".parse().expect("an address"),
            join: holdfast_wire::membership_frames::JoinNumber(1),
        };
        let view = View {
            epoch: 2,
            ..View::configured(NodeId(2), [NodeId(2)])
        };
        role.set_view(view, vec![member]);
        assert!(role.is_contact());
        assert_eq!(role.id_of("n2"), Some(NodeId(2)));
        assert_eq!(role.name_of(NodeId(2)), Some("n2"));
        assert_eq!(role.others().count(), 0);
        role.leave();
        assert!(!role.is_contact() && !role.has_contact());
        assert!(role.has_view() && !role.view().contains(NodeId(2)));
    }
}
