//! The invariants after every event, and after the end of all faults.

use super::MembershipBug;
use super::node::node_name;
use super::world::MembershipWorld;
use crate::time::Time;
use holdfast_proto::membership::{Membership, RemovalCause, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::GroupChangeId;
use holdfast_wire::membership_frames::{JoinNumber, Member, MembershipState, NodeName, VotedView};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// All that has ever been decided, saved and given.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// The committed view of each epoch.
    committed: BTreeMap<u64, VotedView>,
    /// The nodes that have had a view on their disks, by epoch.
    on_disks: BTreeMap<u64, Vec<(VotedView, BTreeSet<NodeName>)>>,
    /// The voter that got each number.
    voters: BTreeMap<NodeId, (NodeName, JoinNumber)>,
    /// The nodes that have joined with each number, and whether as backups.
    joined: BTreeMap<NodeId, (NodeName, bool)>,
    /// Nodes that an operator has removed.
    removed: BTreeSet<NodeName>,
    /// Changes of the settings that an operator was told to be made.
    acknowledged: BTreeSet<GroupChangeId>,
    /// The views that have been in the store; none if the voters vote.
    stored: Option<Vec<VotedView>>,
}

impl Oracle {
    pub(super) fn new(has_store: bool) -> Oracle {
        Oracle {
            stored: has_store.then(Vec::new),
            ..Oracle::default()
        }
    }

    pub(super) fn on_stored(&mut self, view: &VotedView) {
        if let Some(stored) = &mut self.stored {
            stored.push(view.clone());
        }
    }

    pub(super) fn on_disk_written(&mut self, node: &NodeName, state: &MembershipState) {
        let accepted = state.accepted.as_ref().map(|accepted| &accepted.view);
        for view in accepted.into_iter().chain(&state.committed) {
            let views = self.on_disks.entry(view.epoch).or_default();
            match views.iter_mut().find(|(known, _)| known == view) {
                Some((_, nodes)) => nodes.extend([node.clone()]),
                None => views.push((view.clone(), BTreeSet::from([node.clone()]))),
            }
        }
    }

    /// Checks the number of a node that has joined. A server node may get the number that it had.
    pub(super) fn on_joined(
        &mut self,
        id: NodeId,
        name: &NodeName,
        is_backup: bool,
    ) -> Result<(), String> {
        match self.joined.insert(id, (name.clone(), is_backup)) {
            Some((former, was_backup)) if was_backup || is_backup || former != *name => {
                Err(format!("number {id} was given twice"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn on_removal_requested(&mut self, name: &NodeName) {
        self.removed.insert(name.clone());
    }

    pub(super) fn on_removed(
        &mut self,
        name: &NodeName,
        cause: RemovalCause,
    ) -> Result<(), String> {
        match cause == RemovalCause::Operator && !self.removed.contains(name) {
            true => Err(format!(
                "{name} leaves for good, and no operator removed it"
            )),
            false => Ok(()),
        }
    }

    pub(super) fn on_change_acknowledged(&mut self, id: GroupChangeId) {
        self.acknowledged.insert(id);
    }

    /// Returns true if a majority of the view before has had a view with these voters on disk.
    fn is_decided(&self, view: &VotedView) -> bool {
        let Some(former) = self.committed.get(&view.epoch.wrapping_sub(1)) else {
            return false;
        };
        if let Some(stored) = &self.stored {
            let is_same =
                |known: &VotedView| (known.epoch, &known.voters) == (view.epoch, &view.voters);
            return stored.iter().any(is_same);
        }
        let views = self.on_disks.get(&view.epoch);
        let views = views.map_or(&[][..], Vec::as_slice).iter();
        let mut same = views.filter(|(known, _)| known.voters == view.voters);
        same.any(|(_, nodes)| {
            let voters = former.voters.iter();
            let count = voters.filter(|voter| nodes.contains(&voter.name)).count();
            count >= former.majority()
        })
    }

    /// Checks a view that a voter obeys; returns true for the first one that does.
    fn check_voted(&mut self, view: &VotedView) -> Result<bool, String> {
        match self.committed.get(&view.epoch) {
            Some(known) if known == view => return Ok(false),
            Some(known) => {
                return Err(format!(
                    "epoch {} has two committed views: {known:?} and {view:?}",
                    view.epoch
                ));
            }
            None => {}
        }
        for voter in &view.voters {
            let node = (voter.name.clone(), voter.join);
            let known = self.voters.entry(voter.id).or_insert_with(|| node.clone());
            if *known != node {
                return Err(format!(
                    "number {} belongs to {known:?} and {node:?}",
                    voter.id
                ));
            }
        }
        if let Some(stored) = &self.stored {
            // The first view is the creator's own until the store has it.
            if view.epoch > 1 && !stored.contains(view) {
                return Err(format!("epoch {} was never in the store", view.epoch));
            }
        } else if let Some(former) = self.committed.get(&(view.epoch.wrapping_sub(1))) {
            let views = self
                .on_disks
                .get(&view.epoch)
                .map_or(&[][..], Vec::as_slice);
            let nodes = views.iter().find(|(known, _)| known == view);
            let has_it = |name: &NodeName| nodes.is_some_and(|(_, nodes)| nodes.contains(name));
            let count = (former.voters.iter())
                .filter(|voter| has_it(&voter.name))
                .count();
            if count < former.majority() {
                return Err(format!(
                    "epoch {} is committed, but only {count} of {} voters had it on disk",
                    view.epoch,
                    former.voters.len()
                ));
            }
        }
        self.committed.insert(view.epoch, view.clone());
        Ok(true)
    }
}

impl MembershipWorld<'_> {
    /// Checks the view that a node has begun to obey.
    pub(super) fn check_view(&mut self, node: usize) -> Result<(), String> {
        let nodes = self.nodes.len();
        let state = &mut self.nodes[node];
        let Some(machine) = state.machine.as_ref() else {
            return Ok(());
        };
        let Some(view) = machine.voted_view().cloned() else {
            return Err(format!("{} reports a view, and has none", state.name));
        };
        if view.epoch < state.epoch {
            return Err(format!(
                "the epoch of {} went back from {} to {}",
                state.name, state.epoch, view.epoch
            ));
        }
        state.epoch = view.epoch;
        if view.voter(&node_name(nodes)).is_some() {
            return Err(format!("{} obeys a view of the guest", state.name));
        }
        if machine.standing() == Standing::ServerNode {
            // A server node has the group data a little later.
            // The voters may all be outside the group by this view, or have the view on their disks only.
            let is_committed = match self.oracle.committed.get(&view.epoch) {
                Some(known) => known.voters == view.voters,
                None => self.oracle.is_decided(&view),
            };
            return match is_committed {
                true => Ok(()),
                false => Err(format!("{} obeys a view that is not committed", state.name)),
            };
        }
        let former = self.oracle.committed.get(&(view.epoch - 1));
        let former_contact = former.and_then(VotedView::contact).cloned();
        if self.oracle.check_voted(&view)? {
            self.count("view committed");
            if former_contact.is_some() && former_contact.as_ref() != view.contact() {
                self.count("contact node changed");
            }
        }
        Ok(())
    }

    /// Notes the lease in a node's kernel, and checks that no other kernel has one.
    pub(super) fn on_lease(&mut self, node: usize, until: Option<Duration>) {
        let now = self.now;
        let holder = &mut self.nodes[node];
        holder.lease_until = match until {
            Some(until) => holder.clock.time_of(until),
            None => now,
        };
        if self.config.bug == Some(MembershipBug::ServesPastLease) && until.is_some() {
            holder.lease_until = holder.lease_until + Time::from_micros(500_000);
        }
        if until.is_none() {
            self.count("lease given up");
        }
        if self.nodes[node].lease_until <= now {
            return;
        }
        let has_lease = |other: &usize| *other != node && self.nodes[*other].lease_until > now;
        if let Some(other) = (0..self.nodes.len()).find(has_lease) {
            let (one, other) = (
                self.nodes[node].name.clone(),
                self.nodes[other].name.clone(),
            );
            self.set_violation(format!("{one} and {other} have a lease at once"));
        }
    }

    /// Returns the living nodes that serve as contact node.
    pub(super) fn serving_nodes(&self) -> Vec<usize> {
        let is_serving = |node: &usize| {
            let state = &self.nodes[*node];
            let machine = state.machine.as_ref();
            machine.is_some_and(|machine| machine.is_serving(state.clock.read(self.now)))
        };
        (0..self.nodes.len()).filter(is_serving).collect()
    }

    /// Checks that one node has a lease.
    pub(super) fn check_lease_holder(&mut self) {
        let serving = self.serving_nodes();
        if serving.len() != 1 {
            let deadline = self.config.lease_deadline.as_secs_f64();
            self.set_violation(format!(
                "{deadline} s after the end of all faults, {} nodes serve as contact node",
                serving.len()
            ));
        }
    }

    /// Checks that all living nodes are members, and agree.
    pub(super) fn check_agreement(&mut self) {
        self.check_lease_holder();
        let Some(contact) = self.serving_nodes().first().copied() else {
            return;
        };
        let Some(machine) = self.nodes[contact].machine.as_ref() else {
            return;
        };
        let has_change = |id: &&GroupChangeId| {
            let settings = machine.settings();
            settings.is_some_and(|settings| settings.has_change(**id))
        };
        if let Some(lost) = (self.oracle.acknowledged.iter()).find(|id| !has_change(id)) {
            let what = format!("change {lost} of the settings was acknowledged, and is lost");
            return self.set_violation(what);
        }
        let view = machine.voted_view().cloned();
        let listed: Vec<Member> = machine.server_nodes().cloned().collect();
        for node in 0..self.nodes.len() {
            if let Err(what) = self.check_member(node, view.as_ref(), &listed) {
                let name = self.nodes[node].name.clone();
                return self.set_violation(format!("after the end of all faults, {name} {what}"));
            }
        }
    }

    fn check_member(
        &self,
        node: usize,
        view: Option<&VotedView>,
        listed: &[Member],
    ) -> Result<(), String> {
        let state = &self.nodes[node];
        let is_listed = listed.iter().any(|member| member.name == state.name);
        if state.is_gone {
            let is_voter = view.is_some_and(|view| view.voter(&state.name).is_some());
            return match is_voter || is_listed {
                true => Err("has left, and is still a member".to_owned()),
                false => Ok(()),
            };
        }
        let standing = state.machine.as_ref().map(Membership::standing);
        let own_view = state
            .machine
            .as_ref()
            .and_then(|machine| machine.voted_view());
        let is_right = match standing {
            Some(Standing::ContactNode | Standing::Backup) => state.is_backup(),
            Some(Standing::ServerNode) => !state.is_backup() && is_listed,
            _ => false,
        };
        if !is_right {
            return Err(format!("is {standing:?}, in the list: {is_listed}"));
        }
        let known = state.machine.iter().flat_map(Membership::server_nodes);
        let known: Vec<&Member> = known.collect();
        if !known.iter().copied().eq(listed) {
            return Err(format!("has the list {known:?} and not {listed:?}"));
        }
        match own_view == view {
            true => Ok(()),
            false => Err(format!("has the view {own_view:?} and not {view:?}")),
        }
    }
}
