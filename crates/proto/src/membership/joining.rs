//! A node outside the group that joins, and a member that leaves.

use super::event::{Event, Output, Recipient};
use super::stored_state::Effect;
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    JoinNumber, JoinRefusal, JoinRole, Member, MembershipFrame, NodeName, ViewSummary, VotedView,
};
use rand::Rng;
use std::time::Duration;

/// An attempt to join, repeated until it succeeds.
#[derive(Debug)]
pub(super) struct JoinAttempt {
    pub join: JoinNumber,
    /// Time of the next request; none until the disk has the number.
    pub retry_at: Option<Duration>,
    attempts: u32,
    /// The newest view that the local node has heard of.
    known: Option<ViewSummary>,
}

/// A request to leave, repeated until it is granted.
#[derive(Debug)]
pub(super) struct LeaveAttempt {
    pub retry_at: Duration,
    pub attempts: u32,
}

impl JoinAttempt {
    /// Returns a voter that may know the contact node.
    pub fn member(&self, name: &NodeName) -> Option<&Member> {
        self.known_voters().iter().find(|voter| voter.name == *name)
    }

    /// Returns the voters of the newest view that the local node has heard of.
    pub fn known_voters(&self) -> &[Member] {
        (self.known.as_ref()).map_or(&[][..], |known| &known.voters[..])
    }
}

impl Membership {
    /// Begins to join: with the number that the node has asked with or was a member by, if there is one, otherwise with a
    /// new one.
    ///
    /// A request may be repeated or late, so a contact node may take the node in by a former number when the node has
    /// heard of its removal. A voter that did not answer to its number would be missing in each majority.
    pub(super) fn start_joining(&mut self) {
        let state = &self.stored.state;
        let join = match state.requested_join.or(state.join) {
            Some(join) => join,
            None => JoinNumber(self.random.random()),
        };
        self.joining = Some(JoinAttempt {
            join,
            retry_at: None,
            attempts: 0,
            known: self.view.as_ref().map(VotedView::summary),
        });
        let state = &mut self.stored.state;
        if (state.join, state.requested_join) != (None, Some(join)) {
            (state.join, state.requested_join) = (None, Some(join));
            self.stored.mark_changed();
        }
        self.stored.defer(Effect::RequestJoin);
    }

    /// Sends the first request: the disk has the number of the join.
    pub(super) fn request_join(&mut self, now: Duration) {
        if let Some(joining) = &mut self.joining {
            joining.retry_at = Some(now);
        }
    }

    pub(super) fn on_joining_timeout(&mut self, now: Duration) {
        let is_due =
            |joining: &&JoinAttempt| joining.retry_at.is_some_and(|retry_at| retry_at <= now);
        let Some(joining) = self.joining.as_ref().filter(is_due) else {
            return;
        };
        let (attempts, join) = (joining.attempts, joining.join);
        let known = joining
            .known
            .as_ref()
            .map_or(&[][..], |known| &known.voters[..]);
        let voters = known.iter().map(|voter| &voter.name);
        let others = voters
            .chain(&self.config.seeds)
            .filter(|name| **name != self.config.name);
        let others: Vec<NodeName> = others.cloned().collect();
        // One attempt in each round asks the service address.
        let (to, frame) = match others.into_iter().nth(self.attempt_in_round(attempts)) {
            Some(name) => {
                let (role, address) = (self.config.role, self.config.address);
                let frame = MembershipFrame::Join {
                    role,
                    address,
                    join,
                };
                (Recipient::Node(name), frame)
            }
            None => (Recipient::ServiceAddress, MembershipFrame::WhoIsContact),
        };
        self.outputs.push_back(Output::Send { to, frame });
        let wait = self.retry_wait(attempts / 4, 4 * self.config.join_retry_interval);
        if let Some(joining) = &mut self.joining {
            joining.attempts += 1;
            joining.retry_at = Some(now + wait);
        }
    }

    /// Returns the position, among the nodes to ask, of the one that this attempt asks; the service address comes last.
    fn attempt_in_round(&self, attempts: u32) -> usize {
        let known = self
            .joining
            .as_ref()
            .and_then(|joining| joining.known.as_ref());
        let voters = known.map_or(&[][..], |known| &known.voters[..]);
        let is_other = |name: &NodeName| *name != self.config.name;
        let voters = voters.iter().filter(|voter| is_other(&voter.name)).count();
        let seeds = self
            .config
            .seeds
            .iter()
            .filter(|name| is_other(name))
            .count();
        attempts as usize % (voters + seeds + 1)
    }

    /// Returns true if a view contains the local node by its present attempt to join. A node that was removed may meet a
    /// view from before its removal, with the same join number, but the number of the node is new each time.
    pub(super) fn is_joined_in(&self, view: &VotedView) -> bool {
        let (Some(joining), Some(voter)) = (&self.joining, view.voter(&self.config.name)) else {
            return false;
        };
        let former = self.former_voter();
        voter.join == joining.join && former.is_none_or(|former| former.id != voter.id)
    }

    /// Returns the local node as a voter, by the join number that it has asked with again, of the newest view that it knows
    /// to be committed: a later view, which the node does not know, has removed it.
    pub(super) fn former_voter(&self) -> Option<&Member> {
        let state = &self.stored.state;
        let joining = self.joining.as_ref().filter(|_| state.join.is_none())?;
        let voter = state.committed.as_ref()?.voter(&self.config.name)?;
        (voter.join == joining.join).then_some(voter)
    }

    /// Notes a view that names the contact node to a node that joins, which asks that contact node next.
    pub(super) fn note_view(&mut self, now: Duration, from: &NodeName, view: ViewSummary) {
        let Some(joining) = &mut self.joining else {
            return;
        };
        let epoch = joining.known.as_ref().map_or(0, |known| known.epoch);
        let is_known_contact = |known: &ViewSummary| known.voters.first() == view.voters.first();
        let is_news = !joining.known.as_ref().is_some_and(is_known_contact);
        let is_from_contact = view
            .voters
            .first()
            .is_some_and(|contact| contact.name == *from);
        if view.epoch < epoch || view.voters.is_empty() {
            return self.ignore(from, "view", "the view is older than a known one");
        }
        joining.known = Some(view);
        if is_news || is_from_contact && joining.attempts > 0 {
            joining.attempts = 0;
            let soon = now + self.config.heartbeat_interval;
            joining.retry_at = joining.retry_at.map(|retry_at| retry_at.min(soon));
        }
    }

    pub(super) fn on_joined(
        &mut self,
        now: Duration,
        from: &NodeName,
        id: NodeId,
        join: JoinNumber,
        view: VotedView,
    ) {
        const NAME: &str = "Joined";
        let is_awaited = self
            .joining
            .as_ref()
            .is_some_and(|joining| joining.join == join);
        if !is_awaited {
            return self.ignore(from, NAME, "this node has not asked to join");
        }
        let is_from_contact = view.contact().is_some_and(|contact| contact.name == *from);
        let is_given = id.0 != 0 && u32::from(id.0) < view.next_id;
        if !view.is_valid() || !is_from_contact || !is_given {
            return self.ignore(from, NAME, "the view is impossible");
        }
        if self.config.role == JoinRole::Backup {
            return self.on_commit(now, from, view);
        }
        if view.epoch < self.committed_epoch() {
            return self.ignore(from, NAME, "the view is older than a known one");
        }
        if !self.is_epoch_in_reach(view.epoch) || self.stored.is_full() {
            return self.ignore(from, NAME, "the view cannot be saved");
        }
        let state = &mut self.stored.state;
        (state.join, state.requested_join) = (Some(join), None);
        state.server_node_id = Some(id);
        self.store_view(view, false);
    }

    pub(super) fn on_join_refused(
        &mut self,
        from: &NodeName,
        join: JoinNumber,
        reason: JoinRefusal,
    ) {
        match &self.joining {
            Some(joining) if joining.join == join => self.report(Event::JoinRefused { reason }),
            _ => self.ignore(from, "JoinRefused", "this node has not asked to join"),
        }
    }

    pub(super) fn on_leaving_timeout(&mut self, now: Duration) {
        let Some(attempts) = self.leaving.as_ref().map(|leaving| leaving.attempts) else {
            return;
        };
        if self
            .leaving
            .as_ref()
            .is_some_and(|leaving| leaving.retry_at > now)
        {
            return;
        }
        if self.standing == Standing::ContactNode {
            self.contact.is_leaving = true;
        } else if let (Some(contact), Some(join)) = (self.contact_member(), self.stored.state.join)
        {
            let contact = contact.name.clone();
            self.send(contact, MembershipFrame::Leave { join });
        }
        let wait = self.retry_wait(attempts, self.config.registration_timeout);
        if let Some(leaving) = &mut self.leaving {
            leaving.attempts += 1;
            leaving.retry_at = now + wait;
        }
    }
}
