//! The store of views: a model of etcd with a majority that comes and goes, lost answers, and requests that are carried out
//! late.

use super::MembershipBug;
use super::world::{Event, MembershipWorld};
use crate::time::Time;
use holdfast_proto::membership::{StoreAnswer, StoreRequest, StoreToken};
use holdfast_wire::membership_frames::VotedView;
use std::collections::{BTreeSet, VecDeque};

/// Time for which a client waits for the store.
const CLIENT_TIMEOUT_US: u64 = 1_000_000;
/// Age of the view that a member of the store without contact to the others still shows, in
/// [`MembershipBug::StoreReadsAreStale`].
const STALE_FOR: Time = Time::from_micros(400_000);

/// A request on its way to the store or back.
#[derive(Debug)]
pub(super) struct StoreExchange {
    pub(super) node: usize,
    /// The daemon's life that has sent the request.
    pub(super) incarnation: u64,
    token: StoreToken,
}

/// Model of the store (etcd) that keeps the group's view.
#[derive(Debug, Default)]
pub(super) struct SimulatedStore {
    view: Option<VotedView>,
    /// Former views and the times until which they were in the store.
    former: VecDeque<(Time, Option<VotedView>)>,
    /// True without a majority of the store's members.
    pub(super) is_down: bool,
    /// Nodes that do not reach the store.
    pub(super) cut: BTreeSet<usize>,
}

impl SimulatedStore {
    fn replace(&mut self, now: Time, view: VotedView) {
        let former = self.view.replace(view);
        self.former.push_back((now, former));
        self.former.retain(|(until, _)| *until + STALE_FOR > now);
    }

    /// Returns the view that the store had a while ago.
    fn stale_view(&self, now: Time) -> Option<VotedView> {
        let mut former = self.former.iter();
        let known = former.find(|(until, _)| *until + STALE_FOR > now);
        known.map_or_else(|| self.view.clone(), |(_, view)| view.clone())
    }
}

impl MembershipWorld<'_> {
    /// Sends a request of a state machine to the store.
    pub(super) fn send_to_store(&mut self, node: usize, token: StoreToken, request: StoreRequest) {
        let state = &mut self.nodes[node];
        state.last_store_token = token;
        let exchange = StoreExchange {
            node,
            incarnation: state.incarnation,
            token,
        };
        let is_cut = self.store.cut.contains(&node);
        let is_lost = self.hostile && self.random.chance(self.config.faults.lost);
        if is_cut || is_lost {
            self.count("request to the store lost");
            return self.answer_late(exchange, &request);
        }
        let is_slow = self.is_faulty && self.random.chance(self.config.faults.slow_frames);
        let delay = self
            .random
            .between(100, if is_slow { 600_000 } else { 3_000 });
        let request = Box::new(request);
        let event = Event::StoreRequest { exchange, request };
        self.queue.push(self.now + Time::from_micros(delay), event);
    }

    /// Carries out a request that has reached the store.
    pub(super) fn on_store_request(&mut self, exchange: StoreExchange, request: StoreRequest) {
        if self.store.is_down {
            if matches!(request, StoreRequest::Propose { .. }) && self.random.chance(0.3) {
                // A member of the store keeps the request until there is a majority again.
                let delay = self.random.between(10_000, 1_500_000);
                let request = Box::new(request);
                let event = Event::StoreRequest { exchange, request };
                return self.queue.push(self.now + Time::from_micros(delay), event);
            }
            self.count("request to the store without a majority");
            return self.answer_late(exchange, &request);
        }
        let answer = self.carry_out_store_request(&request);
        let is_lost = self.hostile && self.random.chance(self.config.faults.lost);
        if is_lost {
            let is_stored = answer == StoreAnswer::Stored;
            self.count(match is_stored {
                true => "stored without an answer",
                false => "answer of the store lost",
            });
            return self.answer_late(exchange, &request);
        }
        let delay = self.random.between(100, 3_000);
        self.answer_from_store(exchange, answer, delay);
    }

    fn carry_out_store_request(&mut self, request: &StoreRequest) -> StoreAnswer {
        let bug = self.config.bug;
        let (expected, view) = match request {
            StoreRequest::Read if bug == Some(MembershipBug::StoreReadsAreStale) => {
                return StoreAnswer::View(self.store.stale_view(self.now));
            }
            StoreRequest::Read => return StoreAnswer::View(self.store.view.clone()),
            StoreRequest::Propose { expected, view } => (expected, view),
        };
        let epoch = self.store.view.as_ref().map(|view| view.epoch);
        if *expected != epoch && bug != Some(MembershipBug::StoreComparesNothing) {
            self.count("proposal refused by the store");
            return StoreAnswer::View(self.store.view.clone());
        }
        self.oracle.on_stored(view);
        self.store.replace(self.now, view.clone());
        StoreAnswer::Stored
    }

    /// Lets a client whose request or answer is lost find out, at the end of its patience or sooner.
    fn answer_late(&mut self, exchange: StoreExchange, request: &StoreRequest) {
        let is_proposal = matches!(request, StoreRequest::Propose { .. });
        let is_bug = self.config.bug == Some(MembershipBug::StoreSilenceIsConsent);
        let answer = match is_proposal && is_bug {
            true => StoreAnswer::Stored,
            false => StoreAnswer::Unavailable,
        };
        let delay = self.random.between(1_000, CLIENT_TIMEOUT_US);
        self.answer_from_store(exchange, answer, delay);
    }

    fn answer_from_store(&mut self, exchange: StoreExchange, answer: StoreAnswer, delay_us: u64) {
        let answer = Box::new(answer);
        let event = Event::StoreAnswer { exchange, answer };
        self.queue
            .push(self.now + Time::from_micros(delay_us), event);
    }

    /// Gives an answer to the state machine, if the daemon has lived since the request.
    pub(super) fn on_store_answer(&mut self, exchange: &StoreExchange, answer: StoreAnswer) {
        let node = &self.nodes[exchange.node];
        if node.incarnation != exchange.incarnation {
            return;
        }
        let token = match self.config.bug {
            Some(MembershipBug::StoreAnswerCountsForNewest) => node.last_store_token,
            _ => exchange.token,
        };
        self.drive(exchange.node, |machine, now| {
            machine.handle_store_answer(now, token, answer);
        });
    }
}
