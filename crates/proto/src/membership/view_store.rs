//! Views in a store outside the group, such as etcd, in place of votes among the voters.
//!
//! The store has one view, and replaces it by a transaction: only if it still has the epoch that the proposer expects. So
//! an epoch has one view, whoever proposes, and no majority of voters is needed. The contact node proposes its changes; a
//! backup proposes itself in place of a contact node whose heartbeats it misses. An answer may be lost: the proposer then
//! learns from a later read whether its view is in the store.
//!
//! The contact node reads the view with each heartbeat, and a read must be one that a majority of the store's members
//! confirms. A read that names the local node as contact node renews the lease, which counts from the request. A node that
//! becomes contact node serves only after [`MembershipConfig::promise_duration`], counted from the moment at which it learns
//! that: the former contact node's last successful read was earlier, and so its lease ends before, since
//! [`MembershipConfig::lease_duration`] is shorter. A store that does not answer ends the lease, and changes nothing else:
//! backups take heartbeats without a lease for signs of life until the store has answered them for a while.
//!
//! [`MembershipConfig::promise_duration`]: super::MembershipConfig::promise_duration
//! [`MembershipConfig::lease_duration`]: super::MembershipConfig::lease_duration

#[cfg(test)]
mod tests;

use super::event::{Event, Output};
use super::{Membership, Standing};
use holdfast_wire::membership_frames::VotedView;
use std::collections::VecDeque;
use std::time::Duration;

/// Most reads without an answer that are remembered: the answer to an older one is worth nothing.
const READS_MAX: usize = 32;

/// Identifies a request to the store, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreToken(pub u64);

/// A request to the store of views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreRequest {
    /// Read the view that a majority of the store's members confirms to be the newest one.
    Read,
    /// Replace the view by this one if the store has the view of the expected epoch.
    Propose {
        /// Epoch of the view that the store must have; none for a store without a view.
        expected: Option<u64>,
        /// View to put into the store.
        view: VotedView,
    },
}

/// The store's answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAnswer {
    /// The proposed view is in the store.
    Stored,
    /// The store has this view, or none. In answer to a proposal: that of another proposer, or an earlier attempt of the
    /// local node.
    View(Option<VotedView>),
    /// The store has not answered in time, or without a majority of its members. A proposal may be stored nevertheless, also
    /// later.
    Unavailable,
}

/// A proposal without an answer.
#[derive(Debug)]
struct OpenProposal {
    token: StoreToken,
    view: VotedView,
    sent_at: Duration,
}

/// The local node's knowledge of the store.
#[derive(Debug)]
pub(super) struct StoreLink {
    next_token: u64,
    /// Reads without an answer and their sending times.
    reads: VecDeque<(StoreToken, Duration)>,
    read_at: Duration,
    proposal: Option<OpenProposal>,
    /// The view that the local node proposed last, which may be stored although no answer came.
    proposed: Option<VotedView>,
    /// Epoch of the view in the store as of the last answer, none for no view; none without an answer.
    known: Option<Option<u64>>,
    /// Time of the answer that gave `known`.
    known_at: Duration,
    /// Sending time of the newest request whose answer names the local node as contact node.
    confirmed_at: Option<Duration>,
    /// Time from which the local node may serve as contact node; none until the time is computed.
    serves_from: Option<Duration>,
    /// Time of the first answer since the last silence of the store.
    answering_since: Option<Duration>,
    /// Time of the last answer; at first, that of the machine's start.
    answered_at: Duration,
    /// Whether the store answers, as reported last; none if that was not reported.
    reported: Option<bool>,
    /// True once an impossible view in the store was reported.
    is_unusable_reported: bool,
    /// Time at which the store had a view without the local node for the first time.
    excluded_since: Option<Duration>,
}

impl StoreLink {
    pub fn new(now: Duration) -> StoreLink {
        StoreLink {
            next_token: 0,
            reads: VecDeque::new(),
            read_at: now,
            proposal: None,
            proposed: None,
            known: None,
            known_at: Duration::ZERO,
            confirmed_at: None,
            serves_from: None,
            answering_since: None,
            answered_at: now,
            reported: None,
            is_unusable_reported: false,
            excluded_since: None,
        }
    }

    /// Notes the epoch that an answer names. Returns false if the answer is older than a known one: a request that was
    /// sent after the known answer names a lower epoch only if the store has lost views.
    fn note_epoch(&mut self, now: Duration, sent_at: Duration, epoch: Option<u64>) -> bool {
        if self.known.is_some_and(|known| epoch < known) && sent_at <= self.known_at {
            return false;
        }
        (self.known, self.known_at) = (Some(epoch), now);
        true
    }

    fn take_token(&mut self) -> StoreToken {
        let token = StoreToken(self.next_token);
        self.next_token += 1;
        token
    }

    /// Ends the request of this token; returns its sending time and the view that it proposed.
    fn end_request(&mut self, token: StoreToken) -> Option<(Duration, Option<VotedView>)> {
        if let Some(open) = self.proposal.take_if(|open| open.token == token) {
            return Some((open.sent_at, Some(open.view)));
        }
        let position = self.reads.iter().position(|(read, _)| *read == token)?;
        let (_, sent_at) = self.reads.remove(position)?;
        Some((sent_at, None))
    }
}

impl Membership {
    /// Handles the store's answer to a request. Late and repeated answers do no harm.
    pub fn handle_store_answer(&mut self, now: Duration, token: StoreToken, answer: StoreAnswer) {
        let Some(store) = &mut self.store else {
            return;
        };
        let Some((sent_at, proposed)) = store.end_request(token) else {
            return;
        };
        let is_proposal = proposed.is_some();
        match (answer, proposed) {
            (StoreAnswer::Stored, Some(view)) => {
                self.note_store_answers(now);
                self.on_stored_view(now, sent_at, view);
            }
            (StoreAnswer::View(view), proposed) => {
                self.note_store_answers(now);
                if proposed.is_some() && proposed != view {
                    self.back_off(now);
                }
                match view {
                    Some(view) => self.on_stored_view(now, sent_at, view),
                    None => self.on_empty_store(now, sent_at),
                }
            }
            (StoreAnswer::Stored | StoreAnswer::Unavailable, _) => {
                self.note_store_silence(now);
                if is_proposal {
                    self.back_off(now);
                }
            }
        }
        self.settle(now);
    }

    /// Returns true if the views of the group are in a store.
    pub fn has_view_store(&self) -> bool {
        self.store.is_some()
    }

    /// Returns the time of the next read or of the end of a proposal; none if the local node is no voter.
    pub(super) fn store_timeout(&self) -> Option<Duration> {
        let store = self.store.as_ref().filter(|_| self.reads_store())?;
        let give_up_at = self.proposal_give_up_at().into_iter();
        Some(give_up_at.fold(store.read_at, Duration::min))
    }

    /// Sends the read that is due, and gives up a proposal whose answer is lost.
    pub(super) fn on_store_timeout(&mut self, now: Duration) {
        if !self.reads_store() {
            return;
        }
        if self.proposal_give_up_at().is_some_and(|at| at <= now) {
            if let Some(store) = &mut self.store {
                store.proposal = None;
            }
            self.note_store_silence(now);
            self.back_off(now);
        }
        let interval = match self.standing {
            Standing::ContactNode => self.config.heartbeat_interval,
            _ => self.config.store_read_interval,
        };
        let silent_after = self.config.store_silent_after;
        let Some(store) = &mut self.store else {
            return;
        };
        if store.read_at > now {
            return;
        }
        if now >= store.read_at + silent_after {
            // This daemon has slept.
            store.answered_at = now;
        }
        store.read_at = now + interval;
        if let Some(serves_from) = store.serves_from.filter(|from| *from > now) {
            store.read_at = store.read_at.min(serves_from);
        }
        let token = store.take_token();
        store.reads.push_back((token, now));
        if store.reads.len() > READS_MAX {
            store.reads.pop_front();
        }
        let request = Box::new(StoreRequest::Read);
        self.outputs.push_back(Output::Store { token, request });
        self.note_store_silence(now);
    }

    /// Lets a contact node propose its changes to the store, if there are any. Returns true if it has.
    pub(super) fn propose_changes_to_store(&mut self, now: Duration) -> bool {
        let committed = self.committed_epoch();
        let is_possible = self.standing == Standing::ContactNode
            && self.can_propose_to_store(now)
            && self.view.as_ref().map(|view| view.epoch) == Some(committed);
        if !is_possible {
            return false;
        }
        let known = self.store.as_ref().and_then(|store| store.known);
        if known.is_some_and(|known| known.unwrap_or(0) < committed) {
            // A new store, or one that was restored from an older copy.
            return match self.view.clone() {
                Some(view) => self.propose_to_store(now, view),
                None => false,
            };
        }
        if !self.is_serving(now) {
            return false;
        }
        match self.next_view(now) {
            Some(view) => self.propose_to_store(now, view),
            None => false,
        }
    }

    /// Lets a backup propose itself in place of a silent contact node. Returns false if that is impossible for now.
    pub(super) fn start_takeover_by_store(&mut self, now: Duration) -> bool {
        if !self.can_propose_to_store(now) {
            self.back_off(now);
            return false;
        }
        match self.own_proposal(now) {
            Some(view) => self.propose_to_store(now, view),
            None => false,
        }
    }

    /// Returns true while the store has a proposal of the local node.
    pub(super) fn awaits_store(&self) -> bool {
        let store = self.store.as_ref();
        store.is_some_and(|store| store.proposal.is_some())
    }

    /// Returns the end of the lease that the store's answers give, past or future.
    pub(super) fn lease_end_by_store(&self, now: Duration) -> Option<Duration> {
        let store = self.store.as_ref()?;
        let committed = self.stored.state.committed.as_ref()?;
        let is_contact = (committed.contact()).is_some_and(|contact| self.is_own(contact));
        let may_serve = store.serves_from.is_some_and(|from| from <= now);
        if self.standing != Standing::ContactNode || !is_contact || !may_serve {
            return None;
        }
        Some(store.confirmed_at? + self.config.lease_duration)
    }

    /// Returns true if a heartbeat without a lease is a sign of life of the contact node: the store has not answered the
    /// local node for long, and so perhaps does not answer the contact node either.
    pub(super) fn store_excuses_contact(&self, now: Duration) -> bool {
        let Some(store) = &self.store else {
            return false;
        };
        let since = store.answering_since;
        // Two reads without an answer. The patience with heartbeats without a lease lasts longer.
        let overdue_after = 2 * self.config.store_read_interval + self.config.heartbeat_interval;
        since.is_none_or(|since| now < since + self.config.store_silent_after)
            || now >= store.answered_at + overdue_after
    }

    /// Notes a view that is about to be saved. A node that becomes contact node waits for the end of the former one's
    /// lease, also if it misses views between two in which it is contact node.
    pub(super) fn note_view_for_store(&mut self, view: &VotedView) {
        let is_own = |view: &VotedView| view.contact().is_some_and(|contact| self.is_own(contact));
        let former = self.stored.state.committed.as_ref();
        let follows = former.is_some_and(|former| is_own(former) && former.epoch + 1 == view.epoch);
        let is_contact = is_own(view);
        if let Some(store) = &mut self.store {
            store.excluded_since = None;
            if !is_contact {
                store.confirmed_at = None;
            } else if !follows {
                (store.confirmed_at, store.serves_from) = (None, None);
            }
        }
    }

    /// Begins the wait of a new contact node, and keeps the times of a node that does not read the store up to date.
    pub(super) fn refresh_store(&mut self, now: Duration) {
        let reads = self.reads_store();
        let serves_from = now + self.config.promise_duration;
        let Some(store) = &mut self.store else {
            return;
        };
        if !reads {
            (store.read_at, store.answered_at) = (now, now);
        }
        if store.serves_from.is_none() {
            (store.serves_from, store.read_at) = (Some(serves_from), now);
        }
    }

    fn reads_store(&self) -> bool {
        matches!(self.standing, Standing::ContactNode | Standing::Backup)
    }

    fn proposal_give_up_at(&self) -> Option<Duration> {
        let open = self.store.as_ref()?.proposal.as_ref()?;
        Some(open.sent_at + 2 * self.config.vote_timeout)
    }

    fn can_propose_to_store(&self, now: Duration) -> bool {
        let Some(store) = &self.store else {
            return false;
        };
        let known = store.known.flatten().unwrap_or(0);
        store.proposal.is_none()
            && now >= self.voting.backoff_until
            && !self.stored.is_blocked()
            && known <= self.committed_epoch()
    }

    fn propose_to_store(&mut self, now: Duration, view: VotedView) -> bool {
        let committed = self.committed_epoch();
        let Some(store) = &mut self.store else {
            return false;
        };
        let token = store.take_token();
        store.proposal = Some(OpenProposal {
            token,
            view: view.clone(),
            sent_at: now,
        });
        store.proposed = Some(view.clone());
        let expected = store.known.unwrap_or(Some(committed));
        let request = Box::new(StoreRequest::Propose { expected, view });
        self.outputs.push_back(Output::Store { token, request });
        true
    }

    /// Handles a view that the store has, as of a request that was sent at `sent_at`.
    fn on_stored_view(&mut self, now: Duration, sent_at: Duration, view: VotedView) {
        let epoch = view.epoch;
        let is_possible = view.is_valid() && self.is_epoch_in_reach(epoch);
        if !is_possible || self.stored.is_full() {
            return self.note_unusable_view(is_possible);
        }
        let committed = self.committed_epoch();
        let is_contact = (view.contact()).is_some_and(|contact| self.is_own(contact));
        let is_voter = view.voters.iter().any(|voter| self.is_own(voter));
        let Some(store) = &mut self.store else {
            return;
        };
        store.is_unusable_reported = false;
        if !store.note_epoch(now, sent_at, Some(epoch)) {
            return;
        }
        let is_own = store.proposed.as_ref() == Some(&view);
        if epoch > committed {
            if !is_voter && !self.has_waited_for_removal(now) {
                return;
            }
            self.learn_view(view, is_own);
        }
        if let Some(store) = self.store.as_mut().filter(|_| epoch >= committed) {
            match is_contact {
                true => store.confirmed_at = store.confirmed_at.max(Some(sent_at)),
                false => store.confirmed_at = None,
            }
        }
    }

    /// Returns true if the store has had a view without the local node for a while. The node that made the view tells
    /// whether the local node may join again; the store does not.
    fn has_waited_for_removal(&mut self, now: Duration) -> bool {
        let patience = self.config.vote_timeout;
        let Some(store) = &mut self.store else {
            return true;
        };
        store.confirmed_at = None;
        now >= *store.excluded_since.get_or_insert(now) + patience
    }

    fn on_empty_store(&mut self, now: Duration, sent_at: Duration) {
        if let Some(store) = &mut self.store
            && store.note_epoch(now, sent_at, None)
        {
            store.confirmed_at = None;
        }
    }

    /// Reports a view that cannot follow the known one. A view that the disk has no room for is read again later.
    fn note_unusable_view(&mut self, is_possible: bool) {
        if let Some(store) = &mut self.store
            && !is_possible
            && !std::mem::replace(&mut store.is_unusable_reported, true)
        {
            self.report(Event::StoreUnusable);
        }
    }

    fn note_store_answers(&mut self, now: Duration) {
        let silent_after = self.config.store_silent_after;
        let Some(store) = &mut self.store else {
            return;
        };
        if now >= store.answered_at + silent_after {
            store.answering_since = None;
        }
        store.answered_at = now;
        store.answering_since.get_or_insert(now);
        self.report_store(true);
    }

    fn note_store_silence(&mut self, now: Duration) {
        let silent_after = self.config.store_silent_after;
        if let Some(store) = &mut self.store
            && now >= store.answered_at + silent_after
        {
            store.answering_since = None;
            self.report_store(false);
        }
    }

    fn report_store(&mut self, is_answering: bool) {
        if let Some(store) = &mut self.store
            && store.reported.replace(is_answering) != Some(is_answering)
        {
            self.report(Event::StoreAnswers { is_answering });
        }
    }
}
