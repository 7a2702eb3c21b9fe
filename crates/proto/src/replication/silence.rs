//! Silent legs: suspicion, probes, and the decision. Also new legs that do not catch up in time.

use super::Replication;
use super::event::{DropReason, Event, Output};
use super::legs::{LegPhase, Suspicion};
use core::time::Duration;
use holdfast_wire::replication_frames::{LegIndex, LegSet};
use std::net::SocketAddr;

/// Silence of a leg in one replicated connection.
pub(super) struct Silence {
    pub client: SocketAddr,
    pub leg: LegIndex,
    pub silence: Duration,
    pub round_trip: Duration,
    pub answered: LegSet,
}

impl Replication {
    /// Takes the silence of a leg that owes an answer.
    pub(super) fn on_leg_silent(&mut self, now: Duration, silent: &Silence) {
        let Some(connection) = self.connections.get(&silent.client) else {
            return;
        };
        let live = connection.record.live;
        let has_answer = !silent.answered.intersection(live).is_empty();
        if !live.contains(silent.leg) {
            return;
        }
        if has_answer && silent.silence >= self.config.unresponsive_max {
            return self.drop_leg(now, silent.leg, DropReason::Unresponsive);
        }
        let limit = self.config.limits.silence_max(silent.round_trip);
        let since = now.saturating_sub(silent.silence);
        self.suspect(now, silent.leg, since, limit);
    }

    /// Suspects a leg of which nothing was heard since the time `since`, or since a later sign of life.
    pub(super) fn suspect(
        &mut self,
        now: Duration,
        leg: LegIndex,
        since: Duration,
        limit: Duration,
    ) {
        let own_node = self.config.node;
        let Some(state) = self.legs.get_mut(leg) else {
            return;
        };
        // A leg at this node ends with this node.
        if state.node == own_node || state.suspicion.is_some() {
            return;
        }
        if matches!(state.phase, LegPhase::Preparing) {
            return;
        }
        // After a pause of this node, old silence says nothing: each leg is probed first.
        let probed = now + 2 * self.config.probe_interval;
        state.suspicion = Some(Suspicion {
            since: now,
            deadline: probed.max(since.max(state.last_heard) + limit),
            probe_at: now,
        });
        self.poll_silence(now);
    }

    /// Records a sign of life of a leg.
    pub(super) fn on_heard(&mut self, now: Duration, leg: LegIndex) {
        if let Some(state) = self.legs.get_mut(leg) {
            state.last_heard = now;
            state.suspicion = None;
        }
    }

    /// Returns the time of the next probe, decision, or missing heartbeat.
    pub(super) fn silence_timeout(&self) -> Option<Duration> {
        let watched = self.legs.iter().filter(|(_, leg)| {
            leg.node != self.config.node && !matches!(leg.phase, LegPhase::Preparing)
        });
        let next = |leg: &super::legs::Leg| match &leg.suspicion {
            Some(suspicion) => suspicion.probe_at,
            None => leg.last_heard + self.config.heartbeat_silence,
        };
        watched.map(|(_, leg)| next(leg)).min()
    }

    /// Probes suspected legs, decides about them, and suspects nodes without heartbeats.
    pub(super) fn poll_silence(&mut self, now: Duration) {
        for leg in self.legs.serving().iter() {
            let Some(state) = self.legs.get(leg) else {
                continue;
            };
            match state.suspicion {
                None if now >= state.last_heard + self.config.heartbeat_silence => {
                    let limit = self.config.limits.silence_extra;
                    self.suspect(now, leg, now, limit);
                }
                Some(suspicion) if now >= suspicion.probe_at => {
                    self.poll_suspicion(now, leg, suspicion);
                }
                _ => {}
            }
        }
    }

    fn poll_suspicion(&mut self, now: Duration, leg: LegIndex, suspicion: Suspicion) {
        let last_heard = self.legs.get(leg).map_or(now, |leg| leg.last_heard);
        let is_deadline_over = now >= suspicion.deadline;
        let is_patience_over = now >= last_heard + self.config.last_leg_patience;
        if is_patience_over || is_deadline_over && self.hears_another_since(leg, suspicion.since) {
            return self.drop_leg(now, leg, DropReason::Silent);
        }
        let mut probe_at = now + self.config.probe_interval;
        if !is_deadline_over {
            probe_at = probe_at.min(suspicion.deadline);
        }
        let Some(state) = self.legs.get_mut(leg) else {
            return;
        };
        state.suspicion = Some(Suspicion {
            probe_at,
            ..suspicion
        });
        // Answers of the other legs show that this node's link works.
        for other in self.legs.serving().iter() {
            let node = self.legs.get(other).map(|leg| leg.node);
            if let Some(node) = node.filter(|node| *node != self.config.node) {
                self.outputs.push_back(Output::Probe { node });
            }
        }
    }

    /// Returns true if another leg that serves gave a sign of life since a time. A leg at this node counts as well: it needs no
    /// link.
    fn hears_another_since(&self, leg: LegIndex, since: Duration) -> bool {
        let others = self.legs.serving().without(leg);
        others.iter().any(|other| {
            let other = self.legs.get(other);
            other.is_some_and(|other| other.node == self.config.node || other.last_heard >= since)
        })
    }

    /// Returns the time by which a new leg must be level.
    pub(super) fn catch_up_timeout(&self) -> Option<Duration> {
        let deadlines = self.legs.iter().filter_map(|(_, leg)| match leg.phase {
            LegPhase::CatchingUp { deadline, .. } => Some(deadline),
            LegPhase::Preparing | LegPhase::CaughtUp => None,
        });
        deadlines.min()
    }

    /// Drops new legs that are not level in time. The last leg has nobody to be level with, and counts.
    pub(super) fn poll_catch_up(&mut self, now: Duration) {
        for leg in LegIndex::all() {
            let phase = self.legs.get(leg).map(|leg| &leg.phase);
            if !matches!(phase, Some(LegPhase::CatchingUp { deadline, .. }) if *deadline <= now) {
                continue;
            }
            self.drop_leg(now, leg, DropReason::NeverCaughtUp);
            if let Some(state) = self.legs.get_mut(leg) {
                state.phase = LegPhase::CaughtUp;
                self.report(Event::CaughtUp { leg });
            }
        }
    }
}
