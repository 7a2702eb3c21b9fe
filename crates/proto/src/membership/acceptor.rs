//! The votes of a voter: promises and acceptances.

use super::Membership;
use super::lease::LeasePromise;
use super::proposal::Proposal;
use super::stored_state::Effect;
use holdfast_wire::membership_frames::{
    AcceptedView, Ballot, Member, MembershipFrame, NodeName, VotedView,
};
use std::time::Duration;

/// The part of a voter's votes that is not on the disk.
#[derive(Debug, Default)]
pub(super) struct Voting {
    /// The promise of a lease to the contact node.
    pub promise: Option<LeasePromise>,
    /// Time until which a restarted voter abstains, since it may have made a promise.
    pub abstains_until: Duration,
    /// The local node's own attempt to decide on the next view.
    pub proposal: Option<Proposal>,
    /// Number of attempts that failed since the last view.
    pub attempts: u32,
    /// Time before which no further attempt begins.
    pub backoff_until: Duration,
    /// Highest round that another voter named in this vote.
    pub highest_round: u32,
    /// True if a voter has accepted a view of this vote that the local node does not know.
    pub is_undecided_elsewhere: bool,
}

impl Voting {
    /// Returns the time at which the proposal needs attention.
    pub fn proposal_timeout(&self) -> Option<Duration> {
        let proposal = self.proposal.as_ref()?;
        let due = proposal.give_up_at.into_iter();
        Some(due.fold(proposal.resend_at, Duration::min))
    }

    /// Begins the vote on the next view.
    pub fn begin_vote(&mut self) {
        self.proposal = None;
        self.attempts = 0;
        self.highest_round = 0;
        self.backoff_until = Duration::ZERO;
        self.is_undecided_elsewhere = false;
    }
}

impl Membership {
    pub(super) fn on_prepare(
        &mut self,
        now: Duration,
        from: &NodeName,
        epoch: u64,
        ballot: Ballot,
    ) {
        const NAME: &str = "ViewPrepare";
        let Some(proposer) = self.proposer(now, from, epoch, NAME) else {
            return;
        };
        if proposer.id != ballot.proposer || ballot.round == 0 {
            return self.ignore(from, NAME, "the ballot is not the sender's");
        }
        if self.abstains(now) {
            return self.ignore(from, NAME, "this node abstains from votes");
        }
        if self.is_bound(now, from, from) || !self.promise_ballot(ballot) {
            return self.reject(from, epoch, ballot);
        }
        self.contact_watch.excused_until = now + self.config.detection_timeout;
        let frame = MembershipFrame::Promise {
            epoch,
            ballot,
            accepted: self.stored.state.accepted.clone(),
        };
        let to = from.clone();
        self.stored.defer(Effect::Send { to, epoch, frame });
    }

    pub(super) fn on_propose(
        &mut self,
        now: Duration,
        from: &NodeName,
        ballot: Ballot,
        view: VotedView,
    ) {
        const NAME: &str = "Propose";
        let epoch = view.epoch;
        let Some(proposer) = self.proposer(now, from, epoch, NAME) else {
            return;
        };
        let is_own_ballot = proposer.id == ballot.proposer
            && (ballot.round > 0 || self.is_committed_contact(&proposer));
        if !is_own_ballot {
            return self.ignore(from, NAME, "the ballot is not the sender's");
        }
        let Some(contact) = view.contact().filter(|_| view.is_valid()) else {
            return self.ignore(from, NAME, "the view is impossible");
        };
        if self.abstains(now) {
            return self.ignore(from, NAME, "this node abstains from votes");
        }
        let accepted = self.stored.state.accepted.as_ref();
        let is_other = |accepted: &AcceptedView| accepted.ballot == ballot && accepted.view != view;
        if accepted.is_some_and(is_other) {
            return self.ignore(from, NAME, "the ballot has another view already");
        }
        if self.is_bound(now, from, &contact.name) || !self.accept_view(ballot, view) {
            return self.reject(from, epoch, ballot);
        }
        self.contact_watch.excused_until = now + self.config.detection_timeout;
        let frame = MembershipFrame::Accept { epoch, ballot };
        let to = from.clone();
        self.stored.defer(Effect::Send { to, epoch, frame });
    }

    /// Promises to heed no lower ballot; returns false if a higher one has the promise.
    pub(super) fn promise_ballot(&mut self, ballot: Ballot) -> bool {
        let promised = &mut self.stored.state.promised;
        if *promised > Some(ballot) {
            return false;
        }
        if *promised != Some(ballot) {
            *promised = Some(ballot);
            self.stored.mark_changed();
        }
        true
    }

    /// Accepts a view; returns false if a higher ballot has the promise.
    pub(super) fn accept_view(&mut self, ballot: Ballot, view: VotedView) -> bool {
        if !self.promise_ballot(ballot) {
            return false;
        }
        let accepted = Some(AcceptedView { ballot, view });
        if self.stored.state.accepted != accepted {
            self.stored.state.accepted = accepted;
            self.stored.mark_changed();
        }
        true
    }

    /// Returns true if the local node's lease, or its promise to another node than these two, forbids to take part in a
    /// vote of this proposer for this contact node. The node that has the promise gives its lease up before it proposes
    /// another contact node.
    pub(super) fn is_bound(&self, now: Duration, proposer: &NodeName, contact: &NodeName) -> bool {
        let is_other = |node: &NodeName| node != proposer && node != contact;
        let promise = self
            .voting
            .promise
            .as_ref()
            .filter(|promise| promise.until > now);
        promise.is_some_and(|promise| is_other(&promise.to))
            || self.is_serving(now) && is_other(&self.config.name)
    }

    /// Returns true if this voter takes part in no vote for now.
    pub(super) fn abstains(&self, now: Duration) -> bool {
        now < self.voting.abstains_until || self.stored.is_blocked()
    }

    /// Returns true if the node is contact node of the newest committed view.
    pub(super) fn is_committed_contact(&self, member: &Member) -> bool {
        let committed = self.stored.state.committed.as_ref();
        committed.and_then(VotedView::contact) == Some(member)
    }

    /// Returns the sender as a voter that takes part with the local node in the vote on the view of `epoch`. A sender
    /// that is behind is sent the newer view; one that is ahead is asked for it.
    pub(super) fn proposer(
        &mut self,
        now: Duration,
        from: &NodeName,
        epoch: u64,
        frame: &'static str,
    ) -> Option<Member> {
        let committed_epoch = self.committed_epoch();
        let Some(committed) = &self.stored.state.committed else {
            match self.joining.is_some() {
                // The group counts on the local node, which has missed the view that made it a voter.
                true => self.send(from.clone(), MembershipFrame::ViewRequest { epoch: 0 }),
                false => self.ignore(from, frame, "this node is outside the group"),
            }
            return None;
        };
        let is_voter = committed.voters.iter().any(|voter| self.is_own(voter));
        let sender = committed.voter(from).cloned();
        if epoch <= committed_epoch {
            self.inform(now, from, epoch.saturating_sub(1));
            return None;
        }
        if epoch > committed_epoch + 1 {
            let frame = MembershipFrame::ViewRequest {
                epoch: committed_epoch,
            };
            self.send(from.clone(), frame);
            return None;
        }
        if !is_voter || sender.is_none() {
            self.ignore(from, frame, "sender and receiver are not both voters");
            return None;
        }
        sender
    }

    fn reject(&mut self, to: &NodeName, epoch: u64, ballot: Ballot) {
        let promised = self.stored.state.promised;
        let frame = MembershipFrame::Reject {
            epoch,
            ballot,
            promised_round: promised.map_or(0, |promised| promised.round),
        };
        self.send(to.clone(), frame);
    }

    /// Tells the contact node that this voter grants no lease, because the vote on the next view is open.
    pub(super) fn reject_heartbeat(&mut self, contact: &Member) {
        let ballot = first_ballot(contact);
        self.reject(&contact.name, self.committed_epoch() + 1, ballot);
    }
}

/// Returns the ballot of the contact node's proposals that need no first phase.
pub(super) fn first_ballot(contact: &Member) -> Ballot {
    Ballot {
        round: 0,
        proposer: contact.id,
    }
}
