//! The contact node's work for the list of server nodes: tells the copies of its changes, and drops silent nodes.

#[cfg(test)]
mod tests;

use super::event::Event;
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    Member, MembershipFrame, NodeName, SERVER_NODES_MAX, ServerListVersion, ServerNodeChange,
    VotedView,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most entries of the list that the contact node sends to server nodes in one heartbeat interval.
const ENTRIES_PER_HEARTBEAT_MAX: usize = 4 * SERVER_NODES_MAX;
/// Number of checks, before the one that drops a silent server node, at which the node is asked to register.
const PROBES: u32 = 5;

/// The work in progress for the list of server nodes.
#[derive(Debug, Default)]
pub(super) struct ListDuties {
    /// Server nodes that have not been told of the view, or of a change of the list.
    notices: VecDeque<NodeName>,
    /// The version of the list at the last time when all server nodes began to be told.
    announced: ServerListVersion,
    /// Time before which no change of the list is announced to the server nodes.
    announce_at: Duration,
    /// Number of entries that server nodes were sent in this heartbeat interval.
    entries_sent: usize,
    /// Time of the next check for silent server nodes.
    check_at: Duration,
    /// Number of checks since each server node's last frame.
    silent_checks: BTreeMap<NodeId, u32>,
}

impl Membership {
    /// Adds server nodes that a backup knows, after a restart of the contact node.
    pub(super) fn merge_server_nodes(&mut self, from: &NodeName, changes: Vec<ServerNodeChange>) {
        let Some(view) = self.view.as_ref().filter(|view| view.voter(from).is_some()) else {
            return self.ignore(from, "ServerNodes", "the sender is not a voter");
        };
        for change in changes {
            if let ServerNodeChange::Added(member) = change
                && member.id.0 != 0
                && u32::from(member.id.0) < view.next_id
                && view.voter(&member.name).is_none()
                && !view.voters.iter().any(|voter| voter.id == member.id)
                && self.server_list.by_name(&member.name).is_none()
            {
                self.server_list.add(member);
            }
        }
    }

    pub(super) fn on_server_nodes_request(
        &mut self,
        now: Duration,
        from: &NodeName,
        known: ServerListVersion,
    ) {
        const NAME: &str = "ServerNodesRequest";
        // A restarted contact node has the list of a backup before it has a lease.
        let is_server_node = self.is_serving(now) && self.server_list.by_name(from).is_some();
        let is_voter = (self.view.as_ref()).is_some_and(|view| view.voter(from).is_some());
        if self.standing != Standing::ContactNode || !(is_server_node || is_voter) {
            return self.ignore(from, NAME, "this node keeps no list for the sender");
        }
        // The backups must have each version that another copy has: one of them may have to tell later what has changed.
        self.send_server_list_changes();
        let frame = self.server_list.since(known);
        if let MembershipFrame::ServerNodes { changes, .. } = &frame
            && !is_voter
        {
            let duties = &mut self.contact.list;
            if duties.entries_sent > ENTRIES_PER_HEARTBEAT_MAX {
                if duties.notices.len() < SERVER_NODES_MAX {
                    duties.notices.push_back(from.clone());
                }
                return self.ignore(from, NAME, "other server nodes are sent their lists first");
            }
            duties.entries_sent += changes.len().max(1);
        }
        self.send(from.clone(), frame);
    }

    /// Tells the backups and the contact node's own observers what has changed in the list of server nodes.
    pub(super) fn send_server_list_changes(&mut self) {
        if let (Some(frame), Some(view)) = (self.server_list.take_unsent(), &self.view) {
            let backups = view.voters[1..].iter().map(|voter| voter.name.clone());
            for name in backups.collect::<Vec<_>>() {
                self.send(name, frame.clone());
            }
        }
        if self.server_list.take_changed() {
            self.revision += 1;
            self.report_view();
        }
    }

    /// Lets all server nodes learn of the view and of the list's version, a few with each heartbeat.
    pub(super) fn notify_server_nodes(&mut self) {
        let names = self.server_list.members().map(|member| member.name.clone());
        self.contact.list.notices = names.collect();
        self.contact.list.announced = self.server_list.version();
    }

    /// Tells the next server nodes of the view and of the list's version, and begins to tell all of a changed list.
    pub(super) fn send_notices(&mut self, now: Duration) {
        self.contact.list.entries_sent = 0;
        let duties = &mut self.contact.list;
        let is_changed = duties.announced != self.server_list.version();
        if is_changed && duties.notices.is_empty() && duties.announce_at <= now {
            duties.announce_at = now + self.config.list_announcement_interval;
            self.notify_server_nodes();
        }
        for _ in 0..self.config.notices_per_heartbeat {
            let (Some(name), Some(view)) = (self.contact.list.notices.pop_front(), &self.view)
            else {
                return;
            };
            let frame = self.contact_frame(view, &name);
            self.send(name, frame);
        }
    }

    /// Notes a frame of a server node.
    pub(super) fn note_server_node_alive(&mut self, name: &NodeName) {
        if self.standing == Standing::ContactNode
            && let Some(member) = self.server_list.by_name(name)
        {
            self.contact.list.silent_checks.remove(&member.id);
        }
    }

    /// Drops server nodes that were silent for many checks, after asking them to register. A check counts once however late,
    /// so that a contact node that slept hears the others first.
    pub(super) fn check_server_nodes(&mut self, now: Duration) {
        let (duties, list) = (&mut self.contact.list, &self.server_list);
        if now < duties.check_at {
            return;
        }
        duties.check_at = now + self.config.server_node_check_interval;
        let checks_max = self.config.silent_checks_max;
        let (mut probed, mut dropped) = (Vec::<NodeName>::new(), Vec::<Member>::new());
        duties.silent_checks.retain(|id, _| list.get(*id).is_some());
        for member in list.members() {
            let checks = duties.silent_checks.entry(member.id).or_default();
            *checks += 1;
            match checks_max.saturating_sub(*checks) {
                0 => dropped.push(member.clone()),
                1..=PROBES => probed.push(member.name.clone()),
                _ => {}
            }
        }
        for Member { id, name, .. } in dropped {
            self.server_list.remove(id);
            self.report(Event::ServerNodeSilent { node: name });
        }
        let Some(view) = self.view.as_ref().map(VotedView::summary) else {
            return;
        };
        for name in probed {
            let frame = MembershipFrame::Contact {
                view: view.clone(),
                is_registered: false,
                server_list: self.server_list.version(),
            };
            self.send(name, frame);
        }
    }

    /// Returns the frame that tells a server node of the view and of the list's version.
    pub(super) fn contact_frame(&self, view: &VotedView, to: &NodeName) -> MembershipFrame {
        MembershipFrame::Contact {
            view: view.summary(),
            is_registered: self.server_list.by_name(to).is_some(),
            server_list: self.server_list.version(),
        }
    }

    /// Removes server nodes that have become voters.
    pub(super) fn drop_voters_from_server_list(&mut self) {
        let voters = self.view.as_ref().map_or(&[][..], |view| &view.voters[..]);
        let former = voters
            .iter()
            .filter_map(|voter| self.server_list.by_name(&voter.name));
        let former: Vec<NodeId> = former.map(|member| member.id).collect();
        for id in former {
            self.server_list.remove(id);
        }
    }
}
