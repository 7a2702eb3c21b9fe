//! Takeover of the elements of a registrar that failed (RFC 5353 section 3.5).

use super::config::TakeoverRace;
use super::peers::State;
use super::schedule::Timer;
use super::{AssociationId, Event, Registrar};
use holdfast_handlespace::{Cursor, ElementKey};
use holdfast_wire::rserpool::RegistrarId;
use holdfast_wire::rserpool::enrp::Body;
use std::collections::BTreeSet;
use std::time::Duration;

/// An arbitration that this registrar began.
#[derive(Debug)]
pub(super) struct Takeover {
    /// Peers that have not agreed yet.
    waiting: BTreeSet<RegistrarId>,
    tries: u32,
}

/// Elements of a dead registrar that have not got their new home yet.
#[derive(Debug)]
pub(super) struct Bequest {
    heir: RegistrarId,
    /// Time of the next adopted element's keep-alive.
    ask: Duration,
}

/// Number of requests to silent peers. Dead peers are noticed sooner.
const TRIES: u32 = 3;

/// Pause between the keep-alives to adopted elements.
const PACE: Duration = Duration::from_micros(100);

impl Registrar {
    pub(super) fn begin_takeover(&mut self, now: Duration, target: RegistrarId) {
        let others = self.peers.iter().filter(|(id, peer)| {
            **id != target && matches!(peer.state, State::Active) && peer.association.is_some()
        });
        let waiting = others.map(|(id, _)| *id).collect();
        if let Some(peer) = self.peers.get_mut(&target) {
            peer.state = State::Taking(Takeover { waiting, tries: 0 });
            self.out.event(Event::TakeoverBegun(target));
            self.arbitrate(now, target);
        }
    }

    /// Asks the peers to agree, "sending an ENRP_INIT_TAKEOVER message to all its peer servers", including the target.
    fn arbitrate(&mut self, now: Duration, target: RegistrarId) {
        self.out.announce(Body::InitTakeover { target });
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(Timer::Peer(target), until);
        self.settle(now, target);
    }

    /// Completes the takeover if all peers have agreed.
    fn settle(&mut self, now: Duration, target: RegistrarId) {
        let state = self.peers.get(&target).map(|peer| &peer.state);
        if matches!(state, Some(State::Taking(takeover)) if takeover.waiting.is_empty()) {
            self.take_over(now, target);
        }
    }

    pub(super) fn takeover_timeout(&mut self, now: Duration, target: RegistrarId) {
        let Some(peer) = self.peers.get_mut(&target) else {
            return;
        };
        let State::Taking(takeover) = &mut peer.state else {
            return;
        };
        takeover.tries += 1;
        if takeover.tries >= TRIES {
            takeover.waiting.clear();
        }
        self.arbitrate(now, target);
    }

    /// Removes a silent peer from arbitrations that wait for it.
    pub(super) fn takeovers_without(&mut self, now: Duration, silent: RegistrarId) {
        let mut targets = Vec::new();
        for (target, peer) in &mut self.peers {
            if let State::Taking(takeover) = &mut peer.state
                && takeover.waiting.remove(&silent)
            {
                targets.push(*target);
            }
        }
        for target in targets {
            self.settle(now, target);
        }
    }

    pub(super) fn takeover_granted(
        &mut self,
        now: Duration,
        peer: RegistrarId,
        target: RegistrarId,
    ) {
        if let Some(taken) = self.peers.get_mut(&target)
            && let State::Taking(takeover) = &mut taken.state
        {
            takeover.waiting.remove(&peer);
            self.settle(now, target);
        }
    }

    /// Handles another registrar's request to take over a third one, or this one.
    pub(super) fn takeover_asked(
        &mut self,
        now: Duration,
        from: AssociationId,
        initiator: RegistrarId,
        target: RegistrarId,
    ) {
        if target == self.config.id {
            // "MUST immediately announce an ENRP_PRESENCE message to all its peer ENRP servers".
            return self.heartbeat(now);
        }
        let until = now + self.config.settings.last_heard_max;
        let goes_on = self.goes_on(initiator);
        if let Some(peer) = self.peers.get_mut(&target) {
            if matches!(peer.state, State::Taking(_)) {
                if goes_on {
                    return;
                }
                self.out.event(Event::TakeoverEnded(target));
            }
            peer.state = State::NotActive;
            self.schedule.set(Timer::Peer(target), until);
        }
        self.out
            .enrp(from, initiator, Body::InitTakeoverAck { target });
        self.takeovers_without(now, target);
    }

    /// Returns true if this registrar wins the race for a takeover.
    fn goes_on(&self, other: RegistrarId) -> bool {
        match self.config.settings.takeover_race {
            TakeoverRace::LowerId => self.config.id < other,
            TakeoverRace::HigherId => self.config.id > other,
        }
    }

    /// Takes over the target's elements (RFC 5353 section 3.5.2).
    fn take_over(&mut self, now: Duration, target: RegistrarId) {
        self.out.announce(Body::TakeoverServer { target });
        self.counters.takeovers += 1;
        self.bequeath(now, target, self.config.id);
    }

    /// Handles a peer's takeover of another registrar.
    pub(super) fn taken_over(&mut self, now: Duration, by: RegistrarId, target: RegistrarId) {
        if target == self.config.id {
            // An element that follows the other registrar answers it, and that one announces the element: until then
            // the element stays here.
            return self.heartbeat(now);
        }
        self.bequeath(now, target, by);
        self.takeovers_without(now, target);
    }

    /// Begins to move a dead registrar's elements to their new home.
    fn bequeath(&mut self, now: Duration, target: RegistrarId, by: RegistrarId) {
        self.drop_peer(target);
        self.out.event(Event::TakenOver {
            target,
            by,
            elements: self.space.elements_owned_by(target),
        });
        // Redirect elements that are still to be moved to the dead registrar.
        let heirs = self.bequests.values_mut();
        heirs
            .filter(|bequest| bequest.heir == target)
            .for_each(|bequest| bequest.heir = by);
        let bequest = Bequest { heir: by, ask: now };
        self.bequests.insert(target, bequest);
        self.bequeath_some(now, target);
    }

    /// Moves some elements of a dead registrar to their new home. Elements and users are served before the rest.
    pub(super) fn bequeath_some(&mut self, now: Duration, target: RegistrarId) {
        let Some(Bequest { heir, mut ask }) = self.bequests.remove(&target) else {
            return;
        };
        // A registrar that is back keeps the remaining elements.
        let mut keys = Vec::new();
        if !self.peers.contains_key(&target) {
            keys = self.owned_by(target, self.config.settings.turn_elements_max);
        }
        for key in &keys {
            if heir == self.config.id {
                self.adopt(now, *key, ask);
                ask += PACE;
            } else {
                self.rehome(*key, heir);
            }
        }
        if !keys.is_empty() {
            self.bequests.insert(target, Bequest { heir, ask });
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule.set(Timer::Bequest(target), next);
        }
    }

    /// Returns true if this registrar's announcements cover all of its elements.
    pub(super) fn is_settled(&self) -> bool {
        self.bequests.is_empty()
    }

    fn owned_by(&self, home: RegistrarId, max: usize) -> Vec<ElementKey> {
        let mut keys = Vec::with_capacity(self.space.elements_owned_by(home).min(max));
        self.space
            .next_block(&mut Cursor::owned_by(home), max, |element| {
                keys.push(element.key());
            });
        keys
    }
}
