//! The copy of the list of server nodes, at backups and server nodes.
//!
//! Backups receive each change. The contact node tells server nodes its list's version only, now and then, and a server
//! node requests the changes since its own version: a lost frame thus delays a change, and never loses one.

use super::{Membership, Standing};
use holdfast_wire::membership_frames::{
    MembershipFrame, NodeName, ServerListVersion, ServerNodeChange, VotedView,
};
use std::time::Duration;

impl Membership {
    /// Compares the copy with the version of the contact node's list, and requests what the copy lacks.
    pub(super) fn follow_server_list(
        &mut self,
        now: Duration,
        contact: &NodeName,
        version: ServerListVersion,
    ) {
        let known = self.server_list.version();
        if known == version || now < self.list_request_at {
            return;
        }
        let is_backup = self.standing == Standing::Backup;
        if is_backup && known.term != version.term && self.server_list.len() > 0 {
            // The contact node may have restarted, and has no list of its own.
            let whole = self.server_list.whole();
            self.send(contact.clone(), whole);
        }
        self.request_server_list(now, contact);
    }

    /// Requests the list from the contact node, at a server node that begins to follow the list.
    pub(super) fn request_list_of_contact(&mut self, now: Duration) {
        if let Some(contact) = self.contact_member().map(|contact| contact.name.clone()) {
            self.request_server_list(now, &contact);
        }
    }

    /// Requests what the copy lacks, unless that has just happened.
    pub(super) fn request_server_list(&mut self, now: Duration, contact: &NodeName) {
        if now >= self.list_request_at {
            self.list_request_at = now + self.config.detection_timeout;
            let known = self.server_list.version();
            let frame = MembershipFrame::ServerNodesRequest { known };
            self.send(contact.clone(), frame);
        }
    }

    pub(super) fn on_server_nodes(
        &mut self,
        now: Duration,
        from: &NodeName,
        version: ServerListVersion,
        base: Option<ServerListVersion>,
        changes: Vec<ServerNodeChange>,
    ) {
        // The view that names the contact node may still be on its way to the disk.
        let committed = self.stored.state.committed.as_ref();
        let contact = committed.and_then(VotedView::contact);
        let is_from_contact = contact.is_some_and(|contact| contact.name == *from);
        match self.standing {
            Standing::ContactNode if base.is_none() => self.merge_server_nodes(from, changes),
            Standing::Backup | Standing::ServerNode if is_from_contact => {
                if !self.server_list.apply(version, base, changes) {
                    self.request_server_list(now, from);
                }
                if self.server_list.take_changed() {
                    self.revision += 1;
                    self.report_view();
                }
            }
            _ => self.ignore(
                from,
                "ServerNodes",
                "the sender does not keep the list for this node",
            ),
        }
    }
}
