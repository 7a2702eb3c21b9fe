//! What a node knows of its group, for the operator.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_proto::membership::{RemovalCause, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{Member, NodeName};

use super::boot_clock;

/// Knowledge of a node about its group.
#[derive(Debug, Clone, PartialEq)]
pub struct MembershipStatus {
    /// Place of this node in the group.
    pub standing: Standing,
    /// This node's number; none outside the group.
    pub own: Option<NodeId>,
    /// Epoch of the view that this node obeys; 0 for none.
    pub epoch: u64,
    /// The contact node and the backups in their order of succession.
    pub voters: Vec<Member>,
    /// The server nodes that this node knows.
    pub server_nodes: Vec<Member>,
    /// A defect, in words, such as a refused join.
    pub problem: Option<String>,
    /// Reason why this node cannot use the group's settings, in words, until the group has others.
    pub settings_problem: Option<String>,
    /// Silence of the contact node, in words, until the contact node is heard or another one is in its place.
    pub contact_problem: Option<String>,
    /// Silence of all voters that this node knows, in words, until one is heard or there are others.
    pub search_problem: Option<String>,
    /// Reason why the membership cannot be saved, in words.
    pub save_problem: Option<String>,
    /// True if the views of the group are in a store (`group.store`).
    pub has_store: bool,
    /// Whether the store of the group's views answers this node; none if the voters vote, for server nodes, and before the
    /// first answer.
    pub store_answers: Option<bool>,
    /// Silence of the store, in words.
    pub store_problem: Option<String>,
    /// The reason for which this node is outside the group, if it was a member.
    pub removal: Option<RemovalCause>,
    /// End of this node's lease by the boot clock.
    pub(super) lease_until: Option<Duration>,
    /// Times of the last frame of each node by the boot clock.
    pub(super) heard: BTreeMap<NodeName, Duration>,
}

impl Default for MembershipStatus {
    fn default() -> MembershipStatus {
        MembershipStatus {
            standing: Standing::Outside,
            own: None,
            epoch: 0,
            voters: Vec::new(),
            server_nodes: Vec::new(),
            problem: None,
            settings_problem: None,
            contact_problem: None,
            search_problem: None,
            save_problem: None,
            has_store: false,
            store_answers: None,
            store_problem: None,
            removal: None,
            lease_until: None,
            heard: BTreeMap::new(),
        }
    }
}

impl MembershipStatus {
    /// Returns the contact node, if this node knows one.
    pub fn contact(&self) -> Option<&Member> {
        self.voters.first()
    }

    /// Returns all defects that the operator should know, in words.
    pub fn problems(&self) -> impl Iterator<Item = String> + '_ {
        let removal = self.removal.map(|cause| match cause {
            RemovalCause::Operator => {
                "an operator removed this node from the group; restart its daemon to let it join again, or stop the daemon"
            }
            RemovalCause::Left => "this node has left the group; stop its daemon, or restart it to join again",
            RemovalCause::Suspected => "the group took this node for failed; the node joins again by itself",
        });
        let problems = [
            &self.settings_problem,
            &self.save_problem,
            &self.store_problem,
            &self.contact_problem,
            &self.search_problem,
            &self.problem,
        ];
        let problems = problems.into_iter().flatten().cloned();
        problems.chain(removal.map(str::to_owned))
    }

    /// Returns the rest of this node's lease; none without a lease.
    pub fn lease_left(&self) -> Option<Duration> {
        let left = self.lease_until?.checked_sub(boot_clock::now())?;
        (!left.is_zero()).then_some(left)
    }

    /// Returns the time since the last frame of a node that sends heartbeats to this node: the contact node and each backup
    /// exchange them. None for other nodes, and if this node has heard nothing.
    pub fn silence(&self, name: &NodeName) -> Option<Duration> {
        let position = self.voters.iter().position(|voter| voter.name == *name)?;
        let sends_heartbeats = match self.standing {
            Standing::ContactNode => true,
            Standing::Backup => position == 0,
            Standing::ServerNode | Standing::Outside => false,
        };
        let heard = self.heard.get(name).filter(|_| sends_heartbeats)?;
        Some(boot_clock::now().saturating_sub(*heard))
    }

    /// Returns the role of a node in the view, in words; none for an unknown node.
    pub fn role_of(&self, name: &NodeName) -> Option<&'static str> {
        let position = self.voters.iter().position(|voter| voter.name == *name);
        match position {
            Some(0) => Some("contact node"),
            Some(_) => Some("backup"),
            None => (self.server_nodes.iter())
                .any(|node| node.name == *name)
                .then_some("server node"),
        }
    }
}
