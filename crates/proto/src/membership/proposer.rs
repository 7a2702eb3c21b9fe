//! The vote on the next view, as its proposer: the contact node with its changes, or a backup that takes over.

use super::proposal::{Phase, Proposal};
use super::stored_state::Effect;
use super::{Membership, Standing};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{
    AcceptedView, Ballot, Member, MembershipFrame, NodeName, VotedView,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// Greatest step from one attempt to the round that another voter names. An attempt in a round that is too low costs a
/// further attempt; a voter that names the last round of all must not leave the vote without rounds.
const ROUND_STEP_MAX: u32 = 1 << 16;

impl Membership {
    /// Lets a contact node begin or resume a vote, if there is a reason. Returns true if it has.
    pub(super) fn propose_pending_changes(&mut self, now: Duration) -> bool {
        if self.store.is_some() {
            return self.propose_changes_to_store(now);
        }
        let is_possible = self.standing == Standing::ContactNode
            && self.voting.proposal.is_none()
            && now >= self.voting.backoff_until
            && !self.abstains(now)
            && self.view.as_ref().map(|view| view.epoch) == Some(self.committed_epoch());
        let Some(own) = self.own_voter().filter(|_| is_possible).cloned() else {
            return false;
        };
        let first_ballot = Ballot {
            round: 0,
            proposer: own.id,
        };
        let state = &self.stored.state;
        let is_first = (state.promised).is_none_or(|promised| promised == first_ballot)
            && self.voting.highest_round == 0;
        if let Some(accepted) = &state.accepted {
            // An earlier attempt, perhaps of another proposer, has to be decided first.
            return match is_first {
                true => self.propose_view(now, first_ballot, accepted.view.clone()),
                false => self.start_prepare(now),
            };
        }
        if self.voting.is_undecided_elsewhere {
            return self.start_prepare(now);
        }
        if !self.is_serving(now) {
            return false;
        }
        let Some(view) = self.next_view(now) else {
            return false;
        };
        match is_first {
            true => self.propose_view(now, first_ballot, view),
            false => self.start_prepare(now),
        }
    }

    /// Begins the first phase with a ballot higher than all known ones. Returns false if that is impossible for now.
    pub(super) fn start_prepare(&mut self, now: Duration) -> bool {
        let Some(own) = self.own_voter().cloned() else {
            return false;
        };
        let promised = self
            .stored
            .state
            .promised
            .map_or(0, |promised| promised.round);
        // A ballot must not come twice, so the last round is the end of this node's attempts in this vote.
        let Some(round) = promised.max(self.voting.highest_round).checked_add(1) else {
            self.back_off(now);
            return false;
        };
        let ballot = Ballot {
            round,
            proposer: own.id,
        };
        if self.is_bound(now, &own.name, &own.name) || !self.promise_ballot(ballot) {
            self.back_off(now);
            return false;
        }
        let epoch = self.committed_epoch() + 1;
        let phase = Phase::Prepare { newest: None };
        self.begin_attempt(now, epoch, ballot, phase);
        self.stored.defer(Effect::OwnPromise { epoch, ballot });
        true
    }

    /// Begins the second phase: accepts the view, and asks the others once the disk has it. Returns false if the local
    /// node itself refuses.
    fn propose_view(&mut self, now: Duration, ballot: Ballot, view: VotedView) -> bool {
        let epoch = view.epoch;
        let contact = view.contact().map(|contact| contact.name.clone());
        let own_name = &self.config.name;
        let is_forbidden = contact.is_none_or(|contact| self.is_bound(now, own_name, &contact));
        if is_forbidden || !self.accept_view(ballot, view.clone()) {
            self.back_off(now);
            return false;
        }
        match &mut self.voting.proposal {
            Some(proposal) => {
                proposal.propose(view);
                proposal.resend_at = now + self.config.vote_resend_interval;
            }
            None => self.begin_attempt(now, epoch, ballot, Phase::Propose { view }),
        }
        self.stored.defer(Effect::OwnAccept { epoch, ballot });
        // A view with another contact node ends the lease before anyone hears of the view.
        self.update_lease(now);
        true
    }

    fn begin_attempt(&mut self, now: Duration, epoch: u64, ballot: Ballot, phase: Phase) {
        self.voting.proposal = Some(Proposal {
            epoch,
            ballot,
            phase,
            agreed: BTreeSet::new(),
            refused: BTreeSet::new(),
            resend_at: now + self.config.vote_resend_interval,
            give_up_at: None,
        });
    }

    pub(super) fn count_own_promise(&mut self, now: Duration, epoch: u64, ballot: Ballot) {
        let accepted = self.stored.state.accepted.clone();
        if let Some(own) = self.own_id_as_voter() {
            self.count_promise(now, own, epoch, ballot, accepted);
            self.begin_to_ask(now);
        }
    }

    pub(super) fn count_own_acceptance(&mut self, now: Duration, epoch: u64, ballot: Ballot) {
        if let Some(own) = self.own_id_as_voter() {
            // The others are asked first, in case that the local node alone is the majority and ends the attempt.
            if let Some(proposal) = self.proposal_in_propose(epoch, ballot) {
                proposal.agreed.insert(own);
                self.begin_to_ask(now);
            }
            self.count_acceptance(own, epoch, ballot);
        }
    }

    /// Asks the other voters, whose time for an answer begins, once the disk has the vote of the local node.
    fn begin_to_ask(&mut self, now: Duration) {
        let own = self.own_id_as_voter();
        if let Some(proposal) = &mut self.voting.proposal
            && own.is_some_and(|own| proposal.agreed.contains(&own))
        {
            proposal.give_up_at = Some(now + self.config.vote_timeout);
            proposal.resend_at = now + self.config.vote_resend_interval;
            self.ask_voters();
        }
    }

    pub(super) fn on_promise(
        &mut self,
        now: Duration,
        from: &NodeName,
        epoch: u64,
        ballot: Ballot,
        accepted: Option<AcceptedView>,
    ) {
        const NAME: &str = "Promise";
        let is_possible = |accepted: &AcceptedView| {
            accepted.view.is_valid() && accepted.view.epoch == epoch && accepted.ballot <= ballot
        };
        if !accepted.as_ref().is_none_or(is_possible) {
            return self.ignore(from, NAME, "the accepted view is impossible");
        }
        match self.fellow_voter(from) {
            Some(voter) if self.proposal_in_prepare(epoch, ballot).is_some() => {
                self.count_promise(now, voter, epoch, ballot, accepted);
            }
            _ => self.ignore(from, NAME, "no such ballot is open"),
        }
    }

    pub(super) fn on_accept(&mut self, from: &NodeName, epoch: u64, ballot: Ballot) {
        match self.fellow_voter(from) {
            Some(voter) if self.proposal_in_propose(epoch, ballot).is_some() => {
                self.count_acceptance(voter, epoch, ballot);
            }
            _ => self.ignore(from, "Accept", "no such ballot is open"),
        }
    }

    pub(super) fn on_reject(
        &mut self,
        now: Duration,
        from: &NodeName,
        epoch: u64,
        ballot: Ballot,
        promised_round: u32,
    ) {
        let Some(voter) = self.fellow_voter(from) else {
            return self.ignore(from, "Reject", "the sender is not a voter");
        };
        if epoch != self.committed_epoch() + 1 {
            return self.ignore(from, "Reject", "no such ballot is open");
        }
        let promised = self.stored.state.promised;
        let known = promised.map_or(0, |promised| promised.round);
        let in_reach = promised_round.min(known.saturating_add(ROUND_STEP_MAX));
        self.voting.highest_round = self.voting.highest_round.max(in_reach);
        let tolerated = self.voter_count() - self.majority();
        match &mut self.voting.proposal {
            Some(proposal) if proposal.is_for(epoch, ballot) => {
                proposal.refused.insert(voter);
                if proposal.refused.len() > tolerated {
                    self.back_off(now);
                }
            }
            Some(_) => self.ignore(from, "Reject", "no such ballot is open"),
            None if self.standing == Standing::ContactNode && ballot.round == 0 => {
                self.voting.is_undecided_elsewhere = true;
            }
            None => self.ignore(from, "Reject", "no such ballot is open"),
        }
    }

    pub(super) fn on_proposal_timeout(&mut self, now: Duration) {
        let Some(proposal) = &mut self.voting.proposal else {
            return;
        };
        if proposal.give_up_at.is_some_and(|at| at <= now) {
            self.back_off(now);
        } else if proposal.resend_at <= now {
            proposal.resend_at = now + self.config.vote_resend_interval;
            self.ask_voters();
        }
    }

    /// Ends the attempt, if there is one, and forbids the next one for a random time.
    pub(super) fn back_off(&mut self, now: Duration) {
        self.voting.proposal = None;
        let longest = self.config.vote_backoff * 2_u32.pow(self.voting.attempts.min(4));
        self.voting.attempts += 1;
        let wait = self.random_wait(longest);
        self.voting.backoff_until = now + self.config.vote_backoff / 4 + wait;
    }

    fn count_promise(
        &mut self,
        now: Duration,
        voter: NodeId,
        epoch: u64,
        ballot: Ballot,
        accepted: Option<AcceptedView>,
    ) {
        let majority = self.majority();
        let Some(proposal) = self.proposal_in_prepare(epoch, ballot) else {
            return;
        };
        proposal.agreed.insert(voter);
        proposal.note_accepted(accepted);
        if proposal.agreed.len() < majority {
            return;
        }
        let newest = match &proposal.phase {
            Phase::Prepare { newest } => newest.clone(),
            Phase::Propose { .. } => None,
        };
        let view = match newest {
            Some(accepted) => Some(accepted.view),
            None => self.own_proposal(now),
        };
        match view {
            Some(view) => {
                self.propose_view(now, ballot, view);
            }
            None => self.back_off(now),
        }
    }

    fn count_acceptance(&mut self, voter: NodeId, epoch: u64, ballot: Ballot) {
        let majority = self.majority();
        let Some(proposal) = self.proposal_in_propose(epoch, ballot) else {
            return;
        };
        proposal.agreed.insert(voter);
        if proposal.agreed.len() < majority {
            return;
        }
        if let Phase::Propose { view } = &proposal.phase {
            let view = view.clone();
            self.learn_view(view, true);
        }
    }

    /// Sends the request of the present phase to the voters that have not agreed, once the local node itself has.
    fn ask_voters(&mut self) {
        let (Some(proposal), Some(own)) = (&self.voting.proposal, self.own_id_as_voter()) else {
            return;
        };
        if !proposal.agreed.contains(&own) {
            return;
        }
        let (epoch, ballot) = (proposal.epoch, proposal.ballot);
        let frame = match &proposal.phase {
            Phase::Prepare { .. } => MembershipFrame::Prepare { epoch, ballot },
            Phase::Propose { view } => MembershipFrame::Propose {
                ballot,
                view: view.clone(),
            },
        };
        let committed = self.stored.state.committed.as_ref();
        let voters = committed.map_or(&[][..], |view| &view.voters[..]);
        let is_silent = |voter: &&Member| !proposal.agreed.contains(&voter.id);
        let silent: Vec<NodeName> = (voters.iter().filter(is_silent))
            .map(|voter| voter.name.clone())
            .collect();
        for name in silent {
            self.send(name, frame.clone());
        }
    }

    /// Returns the proposal of this ballot, if it is in its first phase.
    fn proposal_in_prepare(&mut self, epoch: u64, ballot: Ballot) -> Option<&mut Proposal> {
        let proposal = self.voting.proposal.as_mut()?;
        let is_open = matches!(proposal.phase, Phase::Prepare { .. });
        (is_open && proposal.is_for(epoch, ballot)).then_some(proposal)
    }

    /// Returns the proposal of this ballot, if it is in its second phase.
    fn proposal_in_propose(&mut self, epoch: u64, ballot: Ballot) -> Option<&mut Proposal> {
        let proposal = self.voting.proposal.as_mut()?;
        let is_open = matches!(proposal.phase, Phase::Propose { .. });
        (is_open && proposal.is_for(epoch, ballot)).then_some(proposal)
    }

    /// Returns the number of a voter of the open vote, other than the local node.
    fn fellow_voter(&self, name: &NodeName) -> Option<NodeId> {
        let committed = self.stored.state.committed.as_ref()?;
        committed.voter(name).map(|voter| voter.id)
    }

    /// Returns the local node's number as a voter of the open vote.
    fn own_id_as_voter(&self) -> Option<NodeId> {
        let committed = self.stored.state.committed.as_ref()?;
        let own = committed.voters.iter().find(|voter| self.is_own(voter));
        own.map(|own| own.id)
    }

    fn voter_count(&self) -> usize {
        let committed = self.stored.state.committed.as_ref();
        committed.map_or(0, |view| view.voters.len())
    }

    /// Returns the number of voters that decide the open vote.
    pub(super) fn majority(&self) -> usize {
        let committed = self.stored.state.committed.as_ref();
        committed.map_or(usize::MAX, VotedView::majority)
    }
}
