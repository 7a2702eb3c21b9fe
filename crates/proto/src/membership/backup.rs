//! A backup: grants leases to the contact node, watches it, and takes its place when it is silent.

use super::acceptor::first_ballot;
use super::event::{Event, Output, Recipient};
use super::lease::LeasePromise;
use super::proposal::{Phase, Proposal};
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{Heartbeat, Member, MembershipFrame, NodeName, VotedView};
use std::collections::BTreeSet;
use std::time::Duration;

/// Grants without effect after which a voter grants nothing for as many heartbeats: the contact node does not hear the
/// voters, and another one can take its place meanwhile.
const VAIN_GRANTS_MAX: u32 = 10;

/// The signs of life of the contact node.
#[derive(Debug)]
pub(super) struct ContactWatch {
    /// Time of the last heartbeat of a contact node with a lease.
    heard: Duration,
    /// Number of heartbeats without a lease since then, counted anew after twice [`VAIN_GRANTS_MAX`].
    vain_heartbeats: u32,
    /// Start number and number of the last heartbeat.
    last: (u64, u64),
    /// Time before which the contact node's silence means nothing.
    pub excused_until: Duration,
    /// True once the silence of a contact node that the backups cannot replace was reported.
    is_reported: bool,
    /// A heartbeat of the view that the disk does not have yet.
    pub early_heartbeat: Option<(NodeName, Heartbeat)>,
}

impl ContactWatch {
    pub fn new(now: Duration) -> ContactWatch {
        ContactWatch {
            heard: now,
            vain_heartbeats: 0,
            last: (0, 0),
            excused_until: Duration::ZERO,
            is_reported: false,
            early_heartbeat: None,
        }
    }

    /// Begins to watch a new contact node.
    pub fn restart(&mut self, now: Duration) {
        let early_heartbeat = self.early_heartbeat.take();
        *self = ContactWatch {
            early_heartbeat,
            ..ContactWatch::new(now)
        };
    }
}

impl Membership {
    pub(super) fn on_heartbeat(&mut self, now: Duration, from: &NodeName, heartbeat: Heartbeat) {
        const NAME: &str = "Heartbeat";
        let Some(view) = self
            .view
            .as_ref()
            .filter(|_| self.standing != Standing::Outside)
        else {
            return self.grant_as_joiner(now, from, heartbeat);
        };
        let epoch = view.epoch;
        if self.standing == Standing::ServerNode {
            return self.ignore(from, NAME, "this node is no voter");
        }
        if heartbeat.epoch < epoch {
            return self.inform(now, from, heartbeat.epoch);
        }
        let contact = view.contact().cloned();
        let contact = contact.filter(|contact| contact.name == *from);
        if heartbeat.epoch > epoch {
            if self.committed_epoch() >= heartbeat.epoch {
                self.contact_watch.early_heartbeat = Some((from.clone(), heartbeat));
                return;
            }
            self.send(from.clone(), MembershipFrame::ViewRequest { epoch });
            // The same contact node made the newer view, which may be late. A promise to the contact node holds for each
            // view that this node may vote on, and so this node shows meanwhile that both live.
            if contact.is_none() {
                return;
            }
        }
        let Some(contact) = contact else {
            return self.ignore(from, NAME, "the sender is not the contact node");
        };
        let number = (heartbeat.boot, heartbeat.sequence);
        if number <= self.contact_watch.last {
            return self.ignore(from, NAME, "the heartbeat is not newer than the last one");
        }
        self.contact_watch.last = number;
        self.note_heartbeat(now, heartbeat.has_lease);
        self.follow_server_list(now, from, heartbeat.server_list);
        // A voter that takes part in a view with another contact node has no promise to give.
        let state = &self.stored.state;
        let committed = state.committed.as_ref().and_then(VotedView::contact);
        let accepted = state.accepted.as_ref();
        let next = accepted.and_then(|accepted| accepted.view.contact());
        let is_other = |next: &Member| next.name != contact.name;
        if committed.is_some_and(is_other) || next.is_some_and(is_other) {
            // To the contact node's own proposal, a rejection would be a refusal by a voter that has accepted.
            let is_own = accepted.is_some_and(|accepted| accepted.ballot == first_ballot(&contact));
            return match is_own {
                true => {}
                false => self.reject_heartbeat(&contact),
            };
        }
        if self.contact_watch.vain_heartbeats <= VAIN_GRANTS_MAX {
            self.grant_lease(now, from, heartbeat);
        }
    }

    /// Notes whether the contact node has a lease; if so, the backup need not replace the contact node.
    fn note_heartbeat(&mut self, now: Duration, has_lease: bool) {
        let is_excused = self.store_excuses_contact(now);
        let watch = &mut self.contact_watch;
        if !has_lease && !is_excused {
            watch.vain_heartbeats = (watch.vain_heartbeats + 1) % (2 * VAIN_GRANTS_MAX);
            return;
        }
        watch.heard = now;
        watch.vain_heartbeats = 0;
        watch.is_reported = false;
        let in_first_phase = |proposal: &Proposal| matches!(proposal.phase, Phase::Prepare { .. });
        if self.voting.proposal.as_ref().is_some_and(in_first_phase) {
            self.back_off(now);
        }
    }

    /// Grants the lease of the node that this one asked for admission: a joining backup shows that it lives, and has
    /// made its promise when it becomes a voter.
    ///
    /// A former voter may have voted for another contact node in the view that has removed it, so its join number must not
    /// renew the lease of the former contact node.
    fn grant_as_joiner(&mut self, now: Duration, from: &NodeName, heartbeat: Heartbeat) {
        let committed_epoch = self.committed_epoch();
        if heartbeat.epoch < committed_epoch {
            return self.inform(now, from, heartbeat.epoch);
        }
        if heartbeat.epoch == committed_epoch && self.former_voter().is_some() {
            let reason = "a later view has removed this node";
            return self.ignore(from, "Heartbeat", reason);
        }
        match &self.joining {
            // The node is a voter already, and obeys the view when the disk has it.
            Some(_) if self.stored.state.join.is_some() => {
                self.contact_watch.early_heartbeat = Some((from.clone(), heartbeat));
            }
            Some(_) => self.grant_lease(now, from, heartbeat),
            None => self.ignore(from, "Heartbeat", "this node is outside the group"),
        }
    }

    fn grant_lease(&mut self, now: Duration, from: &NodeName, heartbeat: Heartbeat) {
        let joining = self.joining.as_ref().map(|joining| joining.join);
        let Some(join) = self.stored.state.join.or(joining) else {
            return;
        };
        self.voting.promise = Some(LeasePromise {
            to: from.clone(),
            until: now + self.config.promise_duration,
        });
        let frame = MembershipFrame::LeaseGrant {
            epoch: heartbeat.epoch,
            boot: heartbeat.boot,
            sequence: heartbeat.sequence,
            join,
        };
        self.send(from.clone(), frame);
    }

    /// Returns the time at which this backup takes a silent contact node's place; none while it tries.
    pub(super) fn takeover_at(&self) -> Option<Duration> {
        let voters = &self.view.as_ref()?.voters;
        if self.voting.proposal.is_some() || self.awaits_store() {
            return None;
        }
        let rank = voters.iter().position(|voter| self.is_own(voter))? as u32;
        let promise = self.voting.promise.as_ref();
        let silent_at = (self.contact_watch.heard + self.config.detection_timeout)
            .max(promise.map_or(Duration::ZERO, |promise| promise.until));
        let due = (silent_at + self.config.succession_step * rank.saturating_sub(1))
            .max(self.contact_watch.excused_until)
            .max(self.voting.backoff_until)
            .max(self.voting.abstains_until);
        Some(due)
    }

    pub(super) fn start_takeover(&mut self, now: Duration) {
        let Some(view) = &self.view else {
            return;
        };
        let Some(contact) = view.contact().map(|contact| contact.id) else {
            return;
        };
        if self.store.is_none() && view.voters.len() - 1 < view.majority() {
            return self.ask_about_contact(now, contact);
        }
        if self.stored.is_blocked() || self.committed_epoch() > view.epoch {
            return self.back_off(now);
        }
        let has_begun = match self.store {
            Some(_) => self.start_takeover_by_store(now),
            None => self.start_prepare(now),
        };
        if has_begun {
            self.report(Event::TakeoverStarted { contact });
        }
    }

    /// Reports that the contact node is silent and the backups alone cannot replace it, and asks others for a newer view:
    /// the group may have gone on without the local node.
    fn ask_about_contact(&mut self, now: Duration, contact: NodeId) {
        if !self.contact_watch.is_reported {
            self.contact_watch.is_reported = true;
            self.report(Event::ContactSilent { contact });
        }
        self.voting.backoff_until = now + self.config.join_retry_interval;
        let (epoch, own_name) = (self.committed_epoch(), &self.config.name);
        let voters = self.view.as_ref().map_or(&[][..], |view| &view.voters[..]);
        let names = voters
            .iter()
            .map(|voter| &voter.name)
            .chain(&self.config.seeds);
        let others: BTreeSet<NodeName> = names.filter(|name| *name != own_name).cloned().collect();
        for name in others {
            self.send(name, MembershipFrame::ViewRequest { epoch });
        }
        self.outputs.push_back(Output::Send {
            to: Recipient::ServiceAddress,
            frame: MembershipFrame::WhoIsContact,
        });
    }

    /// Returns the view that the local node proposes when no voter has accepted another: of a contact node the view
    /// with its changes, of a backup the view without the silent contact node, whose place it takes.
    ///
    /// The backup itself leads the view, not the first one in the order: it has just reached a majority, and the first
    /// one may be silent too.
    pub(super) fn own_proposal(&mut self, now: Duration) -> Option<VotedView> {
        if self.standing == Standing::ContactNode {
            let unchanged = self.view.clone().map(|view| VotedView {
                epoch: view.epoch + 1,
                ..view
            });
            return self.next_view(now).or(unchanged);
        }
        let own = self.own_voter()?.clone();
        let mut view = self.view.clone()?;
        view.epoch += 1;
        view.voters.remove(0);
        view.voters.retain(|voter| voter.id != own.id);
        view.voters.insert(0, own);
        Some(view)
    }
}
