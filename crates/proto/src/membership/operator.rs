//! Requests of the operator and of the daemon.

use super::joining::LeaveAttempt;
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    EPOCH_MAX, MembershipFrame, NodeName, SERVER_NODES_MAX, VotedView,
};
use std::time::Duration;

/// Bit of an epoch above the numbers that votes count: a forced takeover begins a new range.
const FORCED_EPOCH_SHIFT: u32 = 32;

/// Bit of an epoch above the numbers that votes count after the takeover of one node. Nodes that are forced at once thus get
/// epochs far apart.
const FORCED_NODE_SHIFT: u32 = 16;

/// Returns a number that is the same for two epochs only if no forced takeover is between them. Votes alone change it too,
/// once in 65,536 views.
pub(super) fn range_of(epoch: u64) -> u64 {
    epoch >> FORCED_NODE_SHIFT
}

/// Reason for refusing a request; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OperatorError {
    /// Only the contact node can do this.
    #[error("node {} is the contact node; send the request there", .0.as_ref().map_or("(unknown)", NodeName::as_str))]
    NotContactNode(Option<NodeName>),
    /// The local node is the contact node, but has no lease.
    #[error(
        "this contact node has no lease, because it reaches no majority of the voters, or of the store of views; try again when it does"
    )]
    NoLease,
    /// The local node is outside the group.
    #[error("this node is not in a group; let it join one first")]
    Outside,
    /// The group has no such node.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// The node is the contact node.
    #[error("node {0} is the contact node; let it leave, which hands its role over")]
    IsContactNode(NodeId),
    /// The node is a server node, and cannot become contact node.
    #[error(
        "node {0} is not a backup; run `holdfast node leave` there, write role = \"backup\" into section [group] of its file, and \
         restart its daemon"
    )]
    NotBackup(NodeId),
    /// The backup does not answer.
    #[error("node {0} does not answer heartbeats; check that its holdfastd runs")]
    Silent(NodeId),
    /// The contact node has no backup to hand its role to.
    #[error("this node is the only voter; let a backup join first, or stop the group")]
    LastVoter,
    /// Too many requests of this node wait for an answer.
    #[error("too many requests of this node wait for an answer; try again")]
    Busy,
    /// The epoch after a forced takeover could not be followed by another one.
    #[error("the group has no epochs left; create a new group")]
    EpochsExhausted,
    /// The group's views are in a store, in which one backup suffices to replace the contact node.
    #[error(
        "this group keeps its views in a store (group.store), which decides without a majority of the voters; a takeover needs no force \
         when the store answers"
    )]
    StoreDecides,
    /// A contact node with a lease is alive, so there is nothing to force.
    #[error("the contact node has given a sign of life a moment ago; a takeover is not needed")]
    ContactAlive,
}

impl Membership {
    /// Lets the local node leave the group. A contact node hands its role to a backup first, and leaves when that is
    /// decided. [`super::Event::Removed`] follows.
    ///
    /// # Errors
    /// The node is outside the group, or the only voter.
    pub fn handle_leave(&mut self, now: Duration) -> Result<(), OperatorError> {
        let voters = self.view.as_ref().map_or(0, |view| view.voters.len());
        match self.standing {
            Standing::Outside => return Err(OperatorError::Outside),
            Standing::ContactNode if voters == 1 => return Err(OperatorError::LastVoter),
            _ => {}
        }
        self.leaving = Some(LeaveAttempt {
            retry_at: now,
            attempts: 0,
        });
        self.on_leaving_timeout(now);
        self.settle(now);
        Ok(())
    }

    /// Removes another node, at the contact node. A living node hears that it need not join again; to keep out a node
    /// that does not hear that, stop its daemon or revoke its certificate.
    ///
    /// # Errors
    /// This is not a contact node with a lease, or there is no such node.
    pub fn handle_remove(&mut self, now: Duration, id: NodeId) -> Result<(), OperatorError> {
        let view = self.served_view(now)?;
        if view.contact().is_some_and(|contact| contact.id == id) {
            return Err(OperatorError::IsContactNode(id));
        }
        let summary = view.summary();
        if view.voters.iter().any(|voter| voter.id == id) {
            self.contact.removals.insert(id, false);
        } else if let Some(member) = self.server_list.remove(id) {
            let frame = MembershipFrame::Removed {
                view: summary,
                rejoin: false,
            };
            self.send(member.name, frame);
        } else {
            return Err(OperatorError::UnknownNode(id));
        }
        self.settle(now);
        Ok(())
    }

    /// Makes a backup the contact node, at the contact node, which becomes the last backup. Between the end of one lease
    /// and the beginning of the other are two round trips and two writes to disks.
    ///
    /// # Errors
    /// This is not a contact node with a lease, or the node is not a backup that answers.
    pub fn handle_promote(&mut self, now: Duration, id: NodeId) -> Result<(), OperatorError> {
        let view = self.served_view(now)?;
        if view.contact().is_some_and(|contact| contact.id == id) {
            return Ok(());
        }
        let Some(voter) = view.voters.iter().find(|voter| voter.id == id) else {
            return Err(match self.server_list.get(id) {
                Some(_) => OperatorError::NotBackup(id),
                None => OperatorError::UnknownNode(id),
            });
        };
        if !self.is_alive(now, voter) {
            return Err(OperatorError::Silent(id));
        }
        self.contact.promoted = Some(id);
        self.settle(now);
        Ok(())
    }

    /// Drops a server node from the list, at the contact node: a handoff to the node has failed. A living node registers
    /// again when it has not heard of the contact node for `registration_timeout`.
    ///
    /// # Errors
    /// This is not the contact node, or there is no such server node.
    pub fn handle_server_node_failed(
        &mut self,
        now: Duration,
        id: NodeId,
    ) -> Result<(), OperatorError> {
        if self.standing != Standing::ContactNode {
            return Err(self.not_contact_node());
        }
        if self.server_list.remove(id).is_none() {
            return Err(OperatorError::UnknownNode(id));
        }
        self.settle(now);
        Ok(())
    }

    /// Makes this voter the contact node and only voter of a new view, without a vote: the way out when a majority of
    /// the voters is lost for good, as in a group of two whose contact node has died.
    ///
    /// Danger: the operator must be certain that no other voter runs as contact node, and must force one node only.
    /// Otherwise two nodes serve at once, and clients' connections may break. Voters that turn out to live join again.
    /// Changes of the last moments may be lost, and numbers of nodes are left out so that none is given twice.
    ///
    /// # Errors
    /// The node is no voter, or the contact node lives.
    pub fn handle_force_takeover(&mut self, now: Duration) -> Result<(), OperatorError> {
        let (Some(own), Some(committed)) = (self.own_voter(), &self.stored.state.committed) else {
            return Err(OperatorError::Outside);
        };
        if self.standing == Standing::Outside {
            // The node is a voter of a newer view that its disk does not have yet.
            return Err(OperatorError::Outside);
        }
        if self.store.is_some() {
            return Err(OperatorError::StoreDecides);
        }
        let promise = self.voting.promise.as_ref();
        let is_promised = promise.is_some_and(|promise| promise.until > now);
        if is_promised || self.is_serving(now) || now < self.voting.abstains_until {
            return Err(OperatorError::ContactAlive);
        }
        let range = (committed.epoch >> FORCED_EPOCH_SHIFT) + 1;
        if range << FORCED_EPOCH_SHIFT >= EPOCH_MAX {
            return Err(OperatorError::EpochsExhausted);
        }
        let within = u64::from(own.id.0) << FORCED_NODE_SHIFT;
        let ids_end = u32::from(u16::MAX) + 1;
        let view = VotedView {
            epoch: (range << FORCED_EPOCH_SHIFT) | within,
            voters: vec![own.clone()],
            next_id: (committed.next_id + SERVER_NODES_MAX as u32).min(ids_end),
            group_data: committed.group_data.clone(),
        };
        self.store_view(view, true);
        self.settle(now);
        Ok(())
    }

    /// Returns the view of a contact node with a lease.
    fn served_view(&self, now: Duration) -> Result<&VotedView, OperatorError> {
        match &self.view {
            _ if self.standing != Standing::ContactNode => Err(self.not_contact_node()),
            Some(view) if self.is_serving(now) => Ok(view),
            _ => Err(OperatorError::NoLease),
        }
    }

    fn not_contact_node(&self) -> OperatorError {
        let contact = self.contact_member().map(|contact| contact.name.clone());
        OperatorError::NotContactNode(contact)
    }
}
