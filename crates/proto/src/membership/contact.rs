//! The contact node: renews its lease, and takes nodes in.

use super::event::Event;
use super::group_changes::PendingChanges;
use super::lease::LeaseGrants;
use super::list_keeper::ListDuties;
use super::numbers::NumberAllowances;
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    Heartbeat, JoinNumber, JoinRefusal, JoinRole, Member, MembershipFrame, NodeName,
    SERVER_NODES_MAX, VOTERS_MAX, VotedView,
};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

/// Most backups that join at once.
const JOINING_BACKUPS_MAX: usize = 16;
/// Most server nodes that join at once.
const JOINING_SERVER_NODES_MAX: usize = 1_024;
/// Duration for which a joining node is remembered after its last `Join`.
const JOINER_LIFETIME: Duration = Duration::from_secs(5);

/// A node that wants to be taken in.
#[derive(Debug)]
pub(super) struct Joiner {
    pub role: JoinRole,
    pub address: SocketAddr,
    pub join: JoinNumber,
    expires_at: Duration,
}

/// The contact node's work in progress.
#[derive(Debug, Default)]
pub(super) struct ContactDuties {
    pub grants: LeaseGrants,
    pub heartbeat_at: Duration,
    /// The end of the lease that was reported last.
    pub lease_until: Option<Duration>,
    pub joiners: BTreeMap<NodeName, Joiner>,
    /// Voters to remove, and whether they may join again.
    pub removals: BTreeMap<NodeId, bool>,
    /// The backup that shall become contact node.
    pub promoted: Option<NodeId>,
    /// True if the local node shall leave the group.
    pub is_leaving: bool,
    /// Changes of the group's settings.
    pub changes: PendingChanges,
    /// The joins that need new numbers.
    pub allowances: NumberAllowances,
    /// Numbers reserved for server nodes.
    pub server_ids: Range<u32>,
    /// The view that the local node proposed last, and the numbers that it reserves.
    pub reserved: Option<(VotedView, Range<u32>)>,
    /// The work for the list of server nodes.
    pub list: ListDuties,
}

impl ContactDuties {
    /// Returns the number of joining nodes of a role.
    pub fn joiner_count(&self, role: JoinRole) -> usize {
        let has_role = |joiner: &&Joiner| joiner.role == role;
        self.joiners.values().filter(has_role).count()
    }

    /// Returns the names of the nodes that join as backups.
    pub fn joining_backups(&self) -> impl Iterator<Item = &NodeName> {
        let joiners = self.joiners.iter();
        let is_backup = |(_, joiner): &(&NodeName, &Joiner)| joiner.role == JoinRole::Backup;
        joiners.filter(is_backup).map(|(name, _)| name)
    }

    /// Returns true if a node joins in this role already.
    fn has_joiner(&self, name: &NodeName, role: JoinRole) -> bool {
        let known = self.joiners.get(name);
        known.is_some_and(|joiner| joiner.role == role)
    }

    /// Returns true if no further node may join in a role for now.
    fn is_busy(&self, role: JoinRole) -> bool {
        let most = match role {
            JoinRole::Backup => JOINING_BACKUPS_MAX,
            JoinRole::ServerNode => JOINING_SERVER_NODES_MAX,
        };
        self.joiner_count(role) >= most
    }

    /// Forgets all but the number of the last heartbeat and the end of the lease.
    fn reset(&mut self) {
        self.grants.forget_nodes();
        *self = ContactDuties {
            grants: std::mem::take(&mut self.grants),
            lease_until: self.lease_until,
            ..ContactDuties::default()
        };
    }
}

impl Membership {
    /// Begins the work of a contact node: its first heartbeat is due.
    pub(super) fn begin_contact_duties(&mut self, now: Duration) {
        self.contact.reset();
        self.contact.heartbeat_at = now;
        self.server_list.begin(self.random.random());
        self.drop_voters_from_server_list();
    }

    /// Ends the work of a contact node, and its lease at once.
    pub(super) fn end_contact_duties(&mut self) {
        self.contact.reset();
        if self.contact.lease_until.take().is_some() {
            self.report(Event::Lease { until: None });
        }
    }

    /// Goes on as contact node in a newer view.
    pub(super) fn continue_contact_duties(&mut self, now: Duration, view: &VotedView) {
        if let Some((proposed, ids)) = self.contact.reserved.take()
            && proposed == *view
            && !ids.is_empty()
        {
            self.contact.server_ids = ids;
        }
        for voter in &view.voters {
            let joiner = self.contact.joiners.get(&voter.name);
            if joiner.is_some_and(|joiner| joiner.join == voter.join) {
                self.contact.joiners.remove(&voter.name);
                self.contact.allowances.note_number(&voter.name);
            }
        }
        let is_voter = |id: NodeId| view.voters.iter().any(|voter| voter.id == id);
        self.contact.removals.retain(|id, _| is_voter(*id));
        self.contact.promoted = self.contact.promoted.filter(|id| is_voter(*id));
        self.answer_committed_changes(view);
        self.contact.heartbeat_at = now;
        self.drop_voters_from_server_list();
        self.admit_server_nodes();
        self.notify_server_nodes();
    }

    /// Computes the lease anew, and reports its end if that has changed.
    pub(super) fn update_lease(&mut self, now: Duration) {
        let until = match self.store {
            Some(_) => self.lease_end_by_store(now),
            None => self.lease_end(),
        };
        let is_news = match (until, self.contact.lease_until) {
            (Some(until), Some(reported)) => until != reported && until.max(reported) > now,
            (Some(until), None) => until > now,
            (None, Some(reported)) => reported > now,
            (None, None) => false,
        };
        if is_news {
            self.contact.lease_until = until;
            self.report(Event::Lease { until });
        }
    }

    /// Returns the end of the lease, past or future. A majority must have granted the lease among the voters of the view,
    /// and also among the voters of each view that may follow, since those decide on the view after that.
    fn lease_end(&self) -> Option<Duration> {
        if self.standing != Standing::ContactNode {
            return None;
        }
        let view = self.view.as_ref()?;
        let mut granted_at = self.contact.grants.majority_time(&view.voters)?;
        let state = &self.stored.state;
        let committed = (state.committed.as_ref()).filter(|committed| committed.epoch > view.epoch);
        let accepted = state.accepted.as_ref().map(|accepted| &accepted.view);
        for next in committed.into_iter().chain(accepted) {
            if !next.contact().is_some_and(|contact| self.is_own(contact)) {
                return None;
            }
            granted_at = granted_at.min(self.contact.grants.majority_time(&next.voters)?);
        }
        Some(granted_at + self.config.lease_duration)
    }

    pub(super) fn send_heartbeats(&mut self, now: Duration) {
        let (Some(view), Some(own)) = (&self.view, self.own_voter().cloned()) else {
            return;
        };
        let epoch = view.epoch;
        self.contact
            .joiners
            .retain(|_, joiner| joiner.expires_at > now);
        // Voters of a view that may follow are asked too: the lease needs their majority as well.
        let accepted = self.stored.state.accepted.as_ref();
        let next_voters = accepted.map_or(&[][..], |accepted| &accepted.view.voters[..]);
        let voters = view.voters.iter().chain(next_voters);
        let others = voters.filter(|voter| voter.name != own.name);
        let voters = others.map(|voter| (voter.name.clone(), voter.join));
        let is_backup = |(_, joiner): &(&NodeName, &Joiner)| joiner.role == JoinRole::Backup;
        let joiners = self.contact.joiners.iter().filter(is_backup);
        let joiners = joiners.map(|(name, joiner)| (name.clone(), joiner.join));
        let receivers: BTreeSet<(NodeName, JoinNumber)> = voters.chain(joiners).collect();
        let sequence = (self.contact.grants).send(now, &own, receivers.iter().cloned());
        self.send_server_list_changes();
        let heartbeat = MembershipFrame::Heartbeat(Heartbeat {
            epoch,
            boot: self.config.boot,
            sequence,
            has_lease: self.is_serving(now),
            server_list: self.server_list.version(),
        });
        for (name, _) in receivers {
            self.send(name, heartbeat.clone());
        }
        self.send_notices(now);
        if self.is_serving(now) {
            self.remove_silent_backups(now);
            self.check_server_nodes(now);
        }
        self.contact.heartbeat_at = now + self.config.heartbeat_interval;
    }

    fn remove_silent_backups(&mut self, now: Duration) {
        let Some(view) = &self.view else {
            return;
        };
        let is_silent = |voter: &&Member| {
            let heard = self.contact.grants.heard(voter);
            heard.is_some_and(|heard| now >= heard + self.config.detection_timeout)
                && !self.contact.removals.contains_key(&voter.id)
        };
        let silent = view.voters[1..].iter().filter(is_silent);
        let silent: Vec<NodeId> = silent.map(|voter| voter.id).collect();
        for backup in silent {
            self.contact.removals.insert(backup, true);
            self.report(Event::BackupSilent { backup });
        }
    }

    pub(super) fn on_lease_grant(
        &mut self,
        now: Duration,
        from: &NodeName,
        (epoch, boot, sequence): (u64, u64, u64),
        join: JoinNumber,
    ) {
        const NAME: &str = "LeaseGrant";
        if self.standing != Standing::ContactNode || boot != self.config.boot {
            return self.ignore(
                from,
                NAME,
                "the heartbeat was not of this node's present life",
            );
        }
        if !(self.contact.grants).on_grant(now, (from.clone(), join), sequence) {
            return self.ignore(from, NAME, "no such heartbeat was sent to the node of late");
        }
        let is_voter = self
            .view
            .as_ref()
            .is_some_and(|view| view.voter(from).is_some());
        if is_voter {
            self.inform(now, from, epoch);
        }
    }

    /// Returns true if a host may not join this contact node's group in a role. Voters are believed, so a backup must have
    /// the operator's word for that in its certificate. A certificate of an earlier release has no such word: its host may
    /// be a backup if it is or was a voter in a view that this node has obeyed since its start.
    pub(super) fn refuses_role(
        &self,
        from: &NodeName,
        certified: Option<JoinRole>,
        role: JoinRole,
    ) -> bool {
        let is_admitted = match certified {
            Some(certified) => certified == JoinRole::Backup,
            None => self.server_list.was_voter(from),
        };
        self.standing == Standing::ContactNode && role == JoinRole::Backup && !is_admitted
    }

    pub(super) fn on_join(
        &mut self,
        now: Duration,
        from: &NodeName,
        role: JoinRole,
        address: SocketAddr,
        join: JoinNumber,
    ) {
        if self.standing != Standing::ContactNode {
            return self.name_contact(from, "Join");
        }
        let Some(view) = &self.view else {
            return;
        };
        let member = match role {
            JoinRole::Backup => view.voter(from),
            JoinRole::ServerNode => self.server_list.by_name(from),
        };
        if let Some(member) = member.filter(|member| member.join == join) {
            let id = member.id;
            return self.confirm_join(from, id, join);
        }
        if !self.is_serving(now) {
            return self.ignore(from, "Join", "this node has no lease");
        }
        let is_voter = view.voter(from).is_some();
        let former = (self.server_list.former_number(from))
            .filter(|_| role == JoinRole::ServerNode && !is_voter);
        if let Some(id) = former {
            let member = Member {
                id,
                name: from.clone(),
                address,
                join,
            };
            if self.server_list.add(member) {
                self.contact.joiners.remove(from);
                return self.confirm_join(from, id, join);
            }
        }
        let refusal = match role {
            _ if view.next_id > u32::from(u16::MAX) => Some(JoinRefusal::NodeIdsExhausted),
            JoinRole::Backup if !is_voter && view.voters.len() >= VOTERS_MAX => {
                Some(JoinRefusal::VotersFull)
            }
            JoinRole::ServerNode if self.server_list.len() >= SERVER_NODES_MAX => {
                Some(JoinRefusal::ServerNodesFull)
            }
            // One that changes its role needs a place among those of the new role.
            _ if self.contact.has_joiner(from, role) => None,
            _ => self.contact.is_busy(role).then_some(JoinRefusal::Busy),
        };
        let refusal = refusal.or_else(|| {
            let is_admitted = self.contact.allowances.admit(now, from, join);
            (!is_admitted).then_some(JoinRefusal::TooOften)
        });
        if let Some(reason) = refusal {
            let frame = MembershipFrame::JoinRefused { join, reason };
            return self.send(from.clone(), frame);
        }
        if role == JoinRole::ServerNode
            && let Some(voter) = view.voter(from)
        {
            // The node has lost its disk, and comes in another role.
            self.contact.removals.insert(voter.id, true);
        }
        let joiner = Joiner {
            role,
            address,
            join,
            expires_at: now + JOINER_LIFETIME,
        };
        let former = self.contact.joiners.insert(from.clone(), joiner);
        match role {
            // A backup must answer a heartbeat first.
            JoinRole::Backup if former.is_none_or(|former| former.join != join) => {
                self.contact.heartbeat_at = now;
            }
            JoinRole::Backup => {}
            JoinRole::ServerNode => self.admit_server_nodes(),
        }
    }

    /// Gives reserved numbers to the server nodes that wait for one.
    fn admit_server_nodes(&mut self) {
        let Some(view) = &self.view else {
            return;
        };
        let is_waiting = |(name, joiner): &(&NodeName, &Joiner)| {
            joiner.role == JoinRole::ServerNode && view.voter(name).is_none()
        };
        let waiting = self.contact.joiners.iter().filter(is_waiting);
        let waiting = waiting.take(self.contact.server_ids.len());
        let waiting: Vec<NodeName> = waiting.map(|(name, _)| name.clone()).collect();
        for name in waiting {
            let Some(id) = self.contact.server_ids.next() else {
                return;
            };
            let (Some(joiner), Ok(id)) = (self.contact.joiners.remove(&name), u16::try_from(id))
            else {
                return;
            };
            let member = Member {
                id: NodeId(id),
                name: name.clone(),
                address: joiner.address,
                join: joiner.join,
            };
            self.contact.allowances.note_number(&name);
            if self.server_list.add(member) {
                self.confirm_join(&name, NodeId(id), joiner.join);
            }
        }
    }

    fn confirm_join(&mut self, to: &NodeName, id: NodeId, join: JoinNumber) {
        if let Some(view) = self.view.clone() {
            let frame = MembershipFrame::Joined { id, join, view };
            self.send(to.clone(), frame);
        }
    }

    pub(super) fn on_register(
        &mut self,
        now: Duration,
        from: &NodeName,
        id: NodeId,
        address: SocketAddr,
        join: JoinNumber,
    ) {
        const NAME: &str = "Register";
        if self.standing != Standing::ContactNode {
            return self.name_contact(from, NAME);
        }
        if !self.is_serving(now) {
            return self.ignore(from, NAME, "this node has no lease");
        }
        let Some(view) = &self.view else {
            return;
        };
        let number = u32::from(id.0);
        let is_given =
            id.0 != 0 && number < view.next_id && !self.contact.server_ids.contains(&number);
        let is_voter = |voter: &Member| voter.id == id || voter.name == *from;
        let is_free = !view.voters.iter().any(is_voter);
        let summary = view.summary();
        let member = Member {
            id,
            name: from.clone(),
            address,
            join,
        };
        let frame = match is_given && is_free && self.server_list.add(member) {
            true => MembershipFrame::Contact {
                view: summary,
                is_registered: true,
                server_list: self.server_list.version(),
            },
            false => MembershipFrame::Removed {
                view: summary,
                rejoin: true,
            },
        };
        self.send(from.clone(), frame);
    }

    pub(super) fn on_leave(&mut self, from: &NodeName, join: JoinNumber) {
        const NAME: &str = "Leave";
        if self.standing != Standing::ContactNode {
            return self.name_contact(from, NAME);
        }
        let Some(view) = &self.view else {
            return;
        };
        if let Some(voter) = view.voter(from).filter(|voter| voter.join == join) {
            self.contact.removals.insert(voter.id, false);
            return;
        }
        let summary = view.summary();
        let server_node = self
            .server_list
            .by_name(from)
            .map(|member| (member.id, member.join));
        if let Some((id, _)) = server_node.filter(|(_, known)| *known == join) {
            self.server_list.remove(id);
        }
        let frame = MembershipFrame::Removed {
            view: summary,
            rejoin: false,
        };
        self.send(from.clone(), frame);
    }

    pub(super) fn on_who_is_contact(&mut self, now: Duration, from: &NodeName) {
        match &self.view {
            Some(view) if self.is_serving(now) => {
                let frame = self.contact_frame(view, from);
                self.send(from.clone(), frame);
            }
            _ => self.name_contact(from, "WhoIsContact"),
        }
    }

    /// Tells a node the contact node that this one knows.
    pub(super) fn name_contact(&mut self, to: &NodeName, frame: &'static str) {
        match &self.view {
            Some(view) if self.standing != Standing::Outside => {
                let view = view.summary();
                self.send(to.clone(), MembershipFrame::NotContact { view });
            }
            _ => self.ignore(to, frame, "this node is outside the group"),
        }
    }
}
