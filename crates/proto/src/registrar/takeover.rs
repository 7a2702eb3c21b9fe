//! Takeover of the elements of a registrar that failed (RFC 5353 section 3.5).

use super::peers::{PeerList, PeerState};
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Event, Registrar};
use holdfast_wire::rserpool::RegistrarId;
use holdfast_wire::rserpool::enrp::EnrpBody;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An arbitration on the takeover of a peer's elements, which this registrar began.
#[derive(Debug)]
pub(super) struct TakeoverArbitration {
    /// Peers that have not agreed to the takeover yet.
    pending_acks: BTreeSet<RegistrarId>,
    attempts: u32,
}

/// Elements of a dead registrar that have not got their new home yet.
#[derive(Debug)]
struct ElementsOfDeadRegistrar {
    new_home: RegistrarId,
    /// Time of the next adopted element's keep-alive.
    next_keep_alive: Duration,
}

/// Elements of dead registrars that still need their new home, by the dead registrar.
#[derive(Debug, Default)]
pub(super) struct OrphanedElements {
    by_target: BTreeMap<RegistrarId, ElementsOfDeadRegistrar>,
}

impl OrphanedElements {
    /// Adds the elements of a dead registrar. Elements that are still to be moved to the dead registrar are redirected.
    fn begin(&mut self, now: Duration, target: RegistrarId, by: RegistrarId) {
        let heirs = self.by_target.values_mut();
        heirs
            .filter(|bequest| bequest.new_home == target)
            .for_each(|bequest| bequest.new_home = by);
        let bequest = ElementsOfDeadRegistrar {
            new_home: by,
            next_keep_alive: now,
        };
        self.by_target.insert(target, bequest);
    }

    /// Returns true if this registrar's announcements cover all of its elements.
    pub(super) fn is_empty(&self) -> bool {
        self.by_target.is_empty()
    }
}

/// Number of requests to silent peers. Dead peers are noticed sooner.
const TAKEOVER_ATTEMPTS_MAX: u32 = 3;

/// Pause between the keep-alives to adopted elements.
const KEEP_ALIVE_SPACING: Duration = Duration::from_micros(100);

impl PeerList {
    /// Returns true if this registrar is taking over the target, and all peers have agreed.
    fn has_agreed(&self, target: RegistrarId) -> bool {
        let state = self.get(target).map(|peer| &peer.state);
        matches!(state, Some(PeerState::TakingOver(takeover)) if takeover.pending_acks.is_empty())
    }

    /// Records that a peer agrees to the takeover of the target. Returns false if this registrar is not taking it over.
    fn record_agreement(&mut self, peer: RegistrarId, target: RegistrarId) -> bool {
        if let Some(peer_state) = self.get_mut(target)
            && let PeerState::TakingOver(takeover) = &mut peer_state.state
        {
            takeover.pending_acks.remove(&peer);
            return true;
        }
        false
    }

    /// Removes a silent peer from arbitrations that wait for it. Returns their targets.
    fn withdraw_arbiter(&mut self, silent: RegistrarId) -> Vec<RegistrarId> {
        let mut targets = Vec::new();
        for (target, peer) in self.iter_mut() {
            if let PeerState::TakingOver(takeover) = &mut peer.state
                && takeover.pending_acks.remove(&silent)
            {
                targets.push(target);
            }
        }
        targets
    }
}

impl Registrar {
    pub(super) fn begin_takeover(&mut self, now: Duration, target: RegistrarId) {
        let waiting = self.peers.active_ids().filter(|id| *id != target).collect();
        if let Some(peer) = self.peers.get_mut(target) {
            peer.state = PeerState::TakingOver(TakeoverArbitration {
                pending_acks: waiting,
                attempts: 0,
            });
            self.outbox.push_event(Event::TakeoverBegun(target));
            self.send_init_takeover(now, target);
        }
    }

    /// Asks the peers to agree, "sending an ENRP_INIT_TAKEOVER message to all its peer servers", including the target.
    fn send_init_takeover(&mut self, now: Duration, target: RegistrarId) {
        self.outbox
            .announce_to_peers(EnrpBody::InitTakeover { target });
        let until = now + self.config.settings.no_response_max;
        self.schedule.set(RegistrarTimer::PeerState(target), until);
        self.complete_if_agreed(now, target);
    }

    /// Completes the takeover if all peers have agreed.
    fn complete_if_agreed(&mut self, now: Duration, target: RegistrarId) {
        if self.peers.has_agreed(target) {
            self.take_over(now, target);
        }
    }

    pub(super) fn on_takeover_timeout(&mut self, now: Duration, target: RegistrarId) {
        let Some(peer) = self.peers.get_mut(target) else {
            return;
        };
        let PeerState::TakingOver(takeover) = &mut peer.state else {
            return;
        };
        takeover.attempts += 1;
        if takeover.attempts >= TAKEOVER_ATTEMPTS_MAX {
            takeover.pending_acks.clear();
        }
        self.send_init_takeover(now, target);
    }

    /// Removes a silent peer from arbitrations that wait for it.
    pub(super) fn drop_silent_arbiter(&mut self, now: Duration, silent: RegistrarId) {
        for target in self.peers.withdraw_arbiter(silent) {
            self.complete_if_agreed(now, target);
        }
    }

    pub(super) fn on_takeover_ack(
        &mut self,
        now: Duration,
        peer: RegistrarId,
        target: RegistrarId,
    ) {
        if self.peers.record_agreement(peer, target) {
            self.complete_if_agreed(now, target);
        }
    }

    /// Handles another registrar's request to take over a third one, or this one.
    pub(super) fn on_init_takeover(
        &mut self,
        now: Duration,
        from: AssociationId,
        initiator: RegistrarId,
        target: RegistrarId,
    ) {
        if target == self.config.id {
            // "MUST immediately announce an ENRP_PRESENCE message to all its peer ENRP servers".
            return self.send_heartbeat(now);
        }
        let until = now + self.config.settings.last_heard_max;
        let wins = self.config.wins_takeover_race(initiator);
        if let Some(peer) = self.peers.get_mut(target) {
            if matches!(peer.state, PeerState::TakingOver(_)) {
                if wins {
                    return;
                }
                self.outbox.push_event(Event::TakeoverEnded(target));
            }
            peer.state = PeerState::NotActive;
            self.schedule.set(RegistrarTimer::PeerState(target), until);
        }
        self.outbox
            .send_enrp(from, initiator, EnrpBody::InitTakeoverAck { target });
        self.drop_silent_arbiter(now, target);
    }

    /// Takes over the target's elements (RFC 5353 section 3.5.2).
    fn take_over(&mut self, now: Duration, target: RegistrarId) {
        self.outbox
            .announce_to_peers(EnrpBody::TakeoverServer { target });
        self.counters.takeovers += 1;
        self.begin_home_transfer(now, target, self.config.id);
    }

    /// Handles a peer's takeover of another registrar.
    pub(super) fn on_takeover_server(
        &mut self,
        now: Duration,
        by: RegistrarId,
        target: RegistrarId,
    ) {
        if target == self.config.id {
            // An element that follows the other registrar answers it, and that one announces the element: until then
            // the element stays here.
            return self.send_heartbeat(now);
        }
        self.begin_home_transfer(now, target, by);
        self.drop_silent_arbiter(now, target);
    }

    /// Begins to move a dead registrar's elements to their new home.
    fn begin_home_transfer(&mut self, now: Duration, target: RegistrarId, by: RegistrarId) {
        self.drop_peer(target);
        self.outbox.push_event(Event::TakenOver {
            target,
            by,
            elements: self.elements.space().elements_owned_by(target),
        });
        self.orphaned_elements.begin(now, target, by);
        self.transfer_some_homes(now, target);
    }

    /// Moves some elements of a dead registrar to their new home. Elements and users are served before the rest.
    pub(super) fn transfer_some_homes(&mut self, now: Duration, target: RegistrarId) {
        let Some(ElementsOfDeadRegistrar {
            new_home: heir,
            next_keep_alive: mut ask,
        }) = self.orphaned_elements.by_target.remove(&target)
        else {
            return;
        };
        // A registrar that is back keeps the remaining elements.
        let mut keys = Vec::new();
        if !self.peers.contains(target) {
            let max = self.config.settings.batch_elements_max;
            keys = self.elements.some_owned_by(target, max);
        }
        for key in &keys {
            if heir == self.config.id {
                self.become_home(now, *key, ask);
                ask += KEEP_ALIVE_SPACING;
            } else {
                self.set_home(*key, heir);
            }
        }
        if !keys.is_empty() {
            self.orphaned_elements.by_target.insert(
                target,
                ElementsOfDeadRegistrar {
                    new_home: heir,
                    next_keep_alive: ask,
                },
            );
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule
                .set(RegistrarTimer::HomeTransfer(target), next);
        }
    }
}
