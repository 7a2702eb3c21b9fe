//! A server node: registers with the contact node, seldom (paper 000, section 2.3.2).

use super::config::MembershipConfig;
use super::event::{Output, Recipient};
use super::operator::range_of;
use super::{Membership, Standing};
use bytes::Bytes;
use holdfast_wire::membership_frames::{
    GroupData, MembershipFrame, NodeName, ServerListVersion, ViewSummary, VotedView,
};
use std::time::Duration;

/// The registration of a server node.
#[derive(Debug)]
pub(super) struct Registration {
    /// Time of the next `Register`, unless the contact node gives a sign of life.
    register_at: Duration,
    /// Number of unanswered attempts.
    attempts: u32,
    /// Time at which to ask for the group data of a newer view.
    request_view_at: Option<Duration>,
    /// True if the contact node has kept the group data back, since the local node is not in its list.
    is_data_withheld: bool,
    /// The new contact node, if that has the local node in its list.
    known_by: Option<NodeName>,
}

impl Registration {
    pub fn new(now: Duration, config: &MembershipConfig) -> Registration {
        Registration {
            register_at: now + config.registration_timeout,
            attempts: 0,
            request_view_at: None,
            is_data_withheld: false,
            known_by: None,
        }
    }

    pub fn next_timeout(&self) -> Duration {
        let view = self.request_view_at.unwrap_or(self.register_at);
        self.register_at.min(view)
    }

    /// Notes that the contact node knows the local node.
    pub fn postpone(&mut self, now: Duration, config: &MembershipConfig) {
        self.attempts = 0;
        self.register_at = now + config.registration_timeout;
    }
}

impl Membership {
    /// Notes a sign of life of the contact node.
    pub(super) fn note_contact_alive(&mut self, now: Duration, from: &NodeName) {
        let is_quiet = self.registration.attempts == 0 && self.registration.register_at > now;
        if self.standing == Standing::ServerNode && is_quiet && self.is_contact_name(from) {
            self.registration.postpone(now, &self.config);
        }
    }

    /// Registers with the contact node at a random time, unless the contact node has said that it knows the local node.
    pub(super) fn register_soon(&mut self, now: Duration) {
        let known_by = self.registration.known_by.take();
        if known_by.is_some_and(|name| self.is_contact_name(&name)) {
            return;
        }
        let due = now + self.random_wait(self.config.registration_spread);
        self.registration.attempts = 1;
        self.registration.register_at = due;
    }

    pub(super) fn on_registration_timeout(&mut self, now: Duration) {
        let (Some(view), Some(id), Some(join)) = (
            &self.view,
            self.stored.state.server_node_id,
            self.stored.state.join,
        ) else {
            return;
        };
        let attempts = self.registration.attempts;
        let asked = match attempts {
            // Every other attempt asks the known contact node, the others all voters in turn and the service address.
            later if later >= 2 && later.is_multiple_of(2) => view
                .voters
                .get((later / 2) as usize % (view.voters.len() + 1)),
            _ => view.voters.first(),
        };
        let contact = view.contact().map(|contact| contact.name.clone());
        let asked = asked.map(|voter| voter.name.clone());
        if self.registration.register_at <= now {
            let (to, frame) = match asked {
                Some(name) => {
                    let address = self.config.address;
                    let frame = MembershipFrame::Register { id, address, join };
                    (Recipient::Node(name), frame)
                }
                None => (Recipient::ServiceAddress, MembershipFrame::WhoIsContact),
            };
            self.outputs.push_back(Output::Send { to, frame });
            self.registration.attempts = attempts.max(1) + 1;
            let wait = self.retry_wait(attempts, self.config.registration_timeout);
            self.registration.register_at = now + wait;
        }
        if self
            .registration
            .request_view_at
            .is_some_and(|due| due <= now)
            && let Some(contact) = contact
        {
            self.send(contact, MembershipFrame::ViewRequest { epoch: 0 });
            self.registration.request_view_at = Some(now + self.config.registration_timeout);
        }
    }

    /// Handles the word of a contact node, with the version of its list of server nodes if the local node is in the list.
    pub(super) fn on_contact(
        &mut self,
        now: Duration,
        from: &NodeName,
        view: ViewSummary,
        listed_in: Option<ServerListVersion>,
    ) {
        const NAME: &str = "Contact";
        if view
            .voters
            .first()
            .is_none_or(|contact| contact.name != *from)
        {
            return self.ignore(from, NAME, "the sender is not the contact node of its view");
        }
        match self.standing {
            Standing::Outside => return self.note_view(now, from, view),
            Standing::ServerNode if view.epoch >= self.committed_epoch() => {}
            Standing::ServerNode => return self.ignore(from, NAME, "the view is older"),
            _ if view.epoch > self.committed_epoch() => {
                let epoch = self.committed_epoch();
                return self.send(from.clone(), MembershipFrame::ViewRequest { epoch });
            }
            _ => return self.ignore(from, NAME, "this node is a voter"),
        }
        let data_version = view.group_data_version;
        self.learn_summary(now, view);
        self.request_group_data(now, data_version);
        if let Some(version) = listed_in {
            self.registration.postpone(now, &self.config);
            self.registration.known_by = Some(from.clone());
            if std::mem::take(&mut self.registration.is_data_withheld) {
                let soon = now + self.random_wait(2 * self.config.heartbeat_interval);
                self.registration.request_view_at = Some(soon);
            }
            self.follow_server_list(now, from, version);
        } else {
            let wait = self.random_wait(2 * self.config.heartbeat_interval);
            self.registration.attempts = 0;
            self.registration.register_at = now + wait;
        }
    }

    pub(super) fn on_not_contact(&mut self, now: Duration, from: &NodeName, view: ViewSummary) {
        match self.standing {
            Standing::Outside => self.note_view(now, from, view),
            Standing::ServerNode => {
                let is_contact = (view.voters.first()).is_some_and(|it| it.name == *from);
                let is_news = self.learn_summary(now, view);
                if is_contact && self.registration.request_view_at.is_some() {
                    // The contact node would have sent the group data to a node in its list.
                    self.registration.is_data_withheld = true;
                    self.registration.attempts = 0;
                    let wait = self.random_wait(2 * self.config.heartbeat_interval);
                    self.registration.register_at = now + wait;
                } else if !is_news {
                    self.ignore(from, "NotContact", "the view is not newer");
                }
            }
            // A voter of the sender's view would have been sent the whole view.
            _ => self.on_removed(now, from, &view, true),
        }
    }

    /// Learns of a newer view without its group data, which the local node requests at a random time if they have
    /// changed.
    fn learn_summary(&mut self, now: Duration, summary: ViewSummary) -> bool {
        let known = self.stored.state.committed.as_ref();
        let Some(known) = known.filter(|known| summary.epoch > known.epoch) else {
            return false;
        };
        let data_version = summary.group_data_version;
        let group_data = carried_group_data(known, &summary);
        let view = summary.with_group_data(group_data);
        if !self.is_epoch_in_reach(view.epoch)
            || self.stored.is_full()
            || !self.learn_view(view, false)
        {
            return false;
        }
        self.request_group_data(now, data_version);
        true
    }

    /// Requests the group data at a random time, if the local node has others than these.
    fn request_group_data(&mut self, now: Duration, version: u64) {
        let known = self.stored.state.committed.as_ref();
        let is_known = known.is_none_or(|known| known.group_data.version == version);
        if !is_known && self.registration.request_view_at.is_none() {
            let due = now + self.random_wait(self.config.registration_spread);
            self.registration.request_view_at = Some(due);
        }
    }

    /// Records that the group data have come, and ends the request for them.
    pub(super) fn end_view_request(&mut self) {
        self.registration.request_view_at = None;
        self.registration.is_data_withheld = false;
    }
}

/// Returns the group data with which a server node obeys a view until it has those of the view.
///
/// Versions of group data count the changes since the group began, or since a forced takeover: its voter may have missed
/// changes, so that later ones have versions that other data had before. Group data from before a takeover therefore get
/// version 0, which only empty data have by themselves, and are requested whatever their version is.
fn carried_group_data(known: &VotedView, next: &ViewSummary) -> GroupData {
    let mut carried = known.group_data.clone();
    if range_of(known.epoch) != range_of(next.epoch) {
        carried.version = 0;
        if next.group_data_version == 0 {
            carried.bytes = Bytes::new();
        }
    }
    carried
}
