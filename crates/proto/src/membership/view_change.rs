//! Committed views: how a node learns of one, obeys it, and tells the others.

use super::event::{Event, RemovalCause};
use super::stored_state::Effect;
use super::{Membership, Standing};
use bytes::Bytes;
use holdfast_wire::membership_frames::{Member, MembershipFrame, NodeName, ViewSummary, VotedView};
use std::time::Duration;

/// Most nodes with older views whose last answer is remembered.
const INFORMED_MAX: usize = 64;

impl Membership {
    pub(super) fn on_commit(&mut self, now: Duration, from: &NodeName, view: VotedView) {
        const NAME: &str = "Commit";
        if !view.is_valid() {
            return self.ignore(from, NAME, "the view is impossible");
        }
        if self.standing == Standing::Outside && !self.is_joined_in(&view) {
            return self.note_view(now, from, view.summary());
        }
        if !self.is_epoch_in_reach(view.epoch) || self.stored.is_full() {
            return self.ignore(from, NAME, "the view cannot be saved");
        }
        if !self.learn_view(view, false) {
            return self.ignore(from, NAME, "the view is not newer");
        }
        self.end_view_request();
    }

    /// Stores a view that is committed, and obeys it when the disk has it. Returns false if the view is not news.
    pub(super) fn learn_view(&mut self, view: VotedView, announce: bool) -> bool {
        let is_news = self.stored.state.committed.as_ref().is_none_or(|known| {
            // A server node learns of a view before it has the view's group data.
            let has_newer_data = self.standing == Standing::ServerNode
                && view.epoch == known.epoch
                && view.group_data.version > known.group_data.version;
            view.epoch > known.epoch || has_newer_data
        });
        if is_news {
            if self.is_joined_in(&view) {
                self.stored.state.join = self.joining.as_ref().map(|joining| joining.join);
                self.stored.state.requested_join = None;
            }
            self.store_view(view, announce);
        }
        is_news
    }

    /// Stores a view that is not older than the known one.
    pub(super) fn store_view(&mut self, mut view: VotedView, announce: bool) {
        // The bytes of a frame share the memory of the channel's buffer, which a view would keep for long.
        view.group_data.bytes = Bytes::copy_from_slice(&view.group_data.bytes);
        self.note_view_for_store(&view);
        let state = &mut self.stored.state;
        (state.promised, state.accepted) = (None, None);
        state.committed = Some(view.clone());
        self.voting.begin_vote();
        self.stored.mark_changed();
        self.stored.defer(Effect::Apply { view, announce });
    }

    /// Obeys a view that is on the disk.
    pub(super) fn apply_view(&mut self, now: Duration, view: VotedView, announce: bool) {
        if self
            .view
            .as_ref()
            .is_some_and(|known| known.epoch > view.epoch)
        {
            return;
        }
        let is_in = |view: &VotedView| view.voters.iter().any(|voter| self.is_own(voter));
        let next = self.stored.state.committed.as_ref();
        if !is_in(&view) && next.is_some_and(|next| next.epoch > view.epoch && is_in(next)) {
            // The node was removed and taken in again, and obeys the later view when the disk has it.
            return;
        }
        let former_standing = self.standing;
        let former = self.view.replace(view.clone());
        self.server_list.note_voters(&view.voters);
        self.update_settings(former.as_ref().map(|former| &former.group_data));
        if announce {
            self.announce_view(former.as_ref(), &view);
        }
        self.standing = self.standing_in_view();
        self.informed.clear();
        let is_new_contact = former.as_ref().and_then(VotedView::contact) != view.contact();
        if is_new_contact {
            self.own_requests.retry_all(now);
            self.contact_watch.restart(now);
            let contact = view.contact().map(|contact| &contact.name);
            // A majority decided after the promise to the former contact node had ended, so its lease has ended too.
            let promise = self.voting.promise.take();
            self.voting.promise = promise.filter(|promise| Some(&promise.to) == contact);
        }
        match (former_standing, self.standing) {
            (Standing::Outside, Standing::Outside) => return,
            (_, Standing::Outside) => {
                let cause = match self.leaving.is_some() || self.contact.is_leaving {
                    true => RemovalCause::Left,
                    false => RemovalCause::Suspected,
                };
                return self.leave_group(cause);
            }
            (Standing::Outside, _) => self.on_membership(now),
            _ => {}
        }
        match (former_standing, self.standing) {
            (Standing::ContactNode, Standing::ContactNode) => {
                self.continue_contact_duties(now, &view)
            }
            (_, Standing::ContactNode) => {
                self.begin_contact_duties(now);
                self.notify_server_nodes();
            }
            (Standing::ContactNode, _) => self.end_contact_duties(),
            (Standing::ServerNode, _) if is_new_contact => self.register_soon(now),
            _ => {}
        }
        self.report_view();
        if let Some((from, heartbeat)) = self.contact_watch.early_heartbeat.take()
            && heartbeat.epoch == view.epoch
        {
            self.on_heartbeat(now, &from, heartbeat);
        }
    }

    /// Ends the joining of the local node, which is a member.
    fn on_membership(&mut self, now: Duration) {
        self.joining = None;
        self.registration.postpone(now, &self.config);
        if let Some(id) = self.own_id() {
            self.report(Event::Joined { id });
        }
        if self.standing == Standing::ServerNode {
            self.request_list_of_contact(now);
        }
    }

    /// Tells the voters of a committed view and of the one before, as its proposer.
    fn announce_view(&mut self, former: Option<&VotedView>, view: &VotedView) {
        let is_other = |voter: &&Member| voter.name != self.config.name;
        let voters = view.voters.iter().filter(is_other);
        let present: Vec<NodeName> = voters.map(|voter| voter.name.clone()).collect();
        let former_voters = former.map_or(&[][..], |former| &former.voters[..]);
        let is_absent = |voter: &&Member| view.voter(&voter.name).is_none();
        let absent = former_voters.iter().filter(is_other).filter(is_absent);
        let removed: Vec<(NodeName, bool)> = absent
            .map(|voter| {
                let may_rejoin = self.contact.removals.get(&voter.id).copied();
                (voter.name.clone(), may_rejoin.unwrap_or(true))
            })
            .collect();
        for name in present {
            let view = view.clone();
            self.send(name, MembershipFrame::Commit { view });
        }
        for (name, rejoin) in removed {
            let view = view.summary();
            self.send(name, MembershipFrame::Removed { view, rejoin });
        }
        // A joining node believes the voters that it knows. One that becomes a voter next must know all present ones.
        let joining = self.contact.joining_backups();
        let joining = joining.filter(|name| view.voter(name).is_none());
        for name in joining.cloned().collect::<Vec<_>>() {
            let frame = self.contact_frame(view, &name);
            self.send(name, frame);
        }
    }

    /// Answers a voter whose view has `epoch`, if the local node has a newer one: with the view, or with the removal of
    /// a voter that the view lacks. A node outside the group helps too: it may be the only one to know that a view
    /// without most voters is committed.
    pub(super) fn inform(&mut self, now: Duration, to: &NodeName, epoch: u64) {
        let Some(view) = self.view.as_ref().filter(|view| view.epoch > epoch) else {
            return;
        };
        if view.voter(to).is_none() {
            if self.standing == Standing::Outside {
                return;
            }
            let view = view.summary();
            let rejoin = true;
            return self.send(to.clone(), MembershipFrame::Removed { view, rejoin });
        }
        let last = self.informed.get(to);
        if last.is_some_and(|last| now < *last + self.config.heartbeat_interval / 2) {
            return;
        }
        let view = view.clone();
        if self.informed.len() >= INFORMED_MAX {
            self.informed.clear();
        }
        self.informed.insert(to.clone(), now);
        self.send(to.clone(), MembershipFrame::Commit { view });
    }

    /// Answers members with the view, and others with the view without the group data, which contain secrets. A voter that has
    /// left the group answers, too: server nodes may know no other voter.
    pub(super) fn on_view_request(&mut self, from: &NodeName, epoch: u64) {
        let known = self.view.as_ref();
        let known = known.or(self.stored.state.committed.as_ref());
        let Some(view) = known.filter(|view| view.epoch > epoch) else {
            return;
        };
        let is_member = self.standing != Standing::Outside
            && (view.voter(from).is_some() || self.server_list.by_name(from).is_some());
        let frame = match is_member {
            true => MembershipFrame::Commit { view: view.clone() },
            false => MembershipFrame::NotContact {
                view: view.summary(),
            },
        };
        self.send(from.clone(), frame);
    }

    pub(super) fn on_removed(
        &mut self,
        now: Duration,
        from: &NodeName,
        view: &ViewSummary,
        rejoin: bool,
    ) {
        const NAME: &str = "Removed";
        let is_own = |member: &Member| self.is_own(member);
        let committed = self.stored.state.committed.as_ref();
        let contacts = [committed.and_then(VotedView::contact), view.voters.first()];
        let is_from_contact = (contacts.into_iter().flatten()).any(|contact| contact.name == *from);
        let is_news = match self.standing {
            Standing::ContactNode | Standing::Backup => view.epoch > self.committed_epoch(),
            Standing::ServerNode => view.epoch >= self.committed_epoch(),
            Standing::Outside => false,
        };
        if !is_news || view.voters.iter().any(is_own) {
            return self.ignore(from, NAME, "the view is not one that removes this node");
        }
        // Operators remove nodes at the contact node.
        let cause = match (self.leaving.is_some(), rejoin || !is_from_contact) {
            (true, _) => RemovalCause::Left,
            (false, true) => RemovalCause::Suspected,
            (false, false) => RemovalCause::Operator,
        };
        self.leave_group(cause);
        self.note_view(now, from, view.clone());
    }

    /// Drops the local node's role at once.
    fn leave_group(&mut self, cause: RemovalCause) {
        if self.standing == Standing::ContactNode || self.contact.lease_until.is_some() {
            self.end_contact_duties();
        }
        self.standing = Standing::Outside;
        let state = &mut self.stored.state;
        state.server_node_id = None;
        (state.promised, state.accepted) = (None, None);
        self.stored.mark_changed();
        self.stored.drop_views();
        self.voting.begin_vote();
        self.leaving = None;
        self.report(Event::Removed { cause });
        match cause {
            RemovalCause::Suspected => self.start_joining(),
            RemovalCause::Operator | RemovalCause::Left => self.stored.state.join = None,
        }
    }
}
