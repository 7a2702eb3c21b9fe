//! The data plane's state of one connection.

use super::ReplicationBug;
use super::data_plane::INITIAL_EDGE;
use super::endpoint::{MSS, Segment};
use crate::time::Time;
use holdfast_proto::replication::{DataPlaneEvent, WatchLimits};
use holdfast_wire::replication_frames::{LEGS_MAX, LegIndex, LegSet};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Smoothed round trip of all connections.
const ROUND_TRIP: Duration = Duration::from_millis(3);

/// The state of a connection's handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handshake {
    /// Legs have not answered.
    Pending { since: Time, attempts: u32 },
    /// All live legs have answered, and the client does not know.
    Answered,
    /// The client was shown the answer.
    Shown,
}

/// A leg in one connection.
#[derive(Debug, Clone, Default)]
pub(super) struct FlowLeg {
    /// Input that the leg has acknowledged.
    pub ack: u64,
    /// How far the leg lets the client send.
    pub edge: u64,
    /// Acknowledgement that the leg was last told.
    pub told_ack: u64,
    /// Window edge that the leg was last told.
    pub told_edge: u64,
    /// Position after the last byte that the leg has sent.
    pub sent_max: u64,
    pub fin_at: Option<u64>,
    /// Output without a gap, from `base` on.
    base: u64,
    output: Vec<u8>,
    early: BTreeMap<u64, Vec<u8>>,
    /// Position up to which the output is compared.
    compared: u64,
    /// Time since which the leg owes an answer to input.
    owes_since: Option<Time>,
    /// Time since which the leg lacks output without progress.
    lacks_since: Option<Time>,
    /// Time since which the leg holds up the client.
    holds_up_since: Option<Time>,
}

impl FlowLeg {
    /// Returns the position after the output that has arrived without a gap.
    pub fn received_end(&self) -> u64 {
        self.base + self.output.len() as u64
    }

    pub fn is_finished(&self) -> bool {
        self.fin_at == Some(self.received_end())
    }

    fn receive(&mut self, segment: &Segment) {
        self.early.insert(segment.seq, segment.data.clone());
        while let Some((&seq, _)) = self.early.first_key_value() {
            let have = self.received_end();
            if seq > have {
                break;
            }
            let data = self.early.remove(&seq).unwrap_or_default();
            let known = ((have - seq) as usize).min(data.len());
            self.output.extend_from_slice(&data[known..]);
        }
    }
}

/// A check of a connection's legs: time, roles, limits, and the list to which observations are added.
pub(super) struct LegCheck<'a> {
    pub now: Time,
    pub client: SocketAddr,
    pub primary: LegIndex,
    pub live: LegSet,
    pub limits: &'a WatchLimits,
    pub events: &'a mut Vec<DataPlaneEvent>,
}

/// A client's connection as the replicator's data plane keeps it.
#[derive(Debug)]
pub(super) struct Flow {
    pub handshake: Handshake,
    pub answered: LegSet,
    pub refused: LegSet,
    pub own_roles: Option<(LegIndex, LegSet)>,
    pub legs: [FlowLeg; LEGS_MAX],
    /// Position after the last byte that the client was sent.
    pub sent: u64,
    /// True once the end of the output was passed on.
    pub is_end_passed: bool,
    pub shown_ack: u64,
    pub shown_edge: u64,
    pub client_nxt: u64,
    pub client_ack: u64,
    client_edge: u64,
    client_fin_at: Option<u64>,
    /// Time of the client's last input.
    input_at: Time,
    /// Replicas whose probes show that they have more output than the primary.
    pub ahead: LegSet,
    /// First compared position; none until an adopted connection's client has spoken.
    base: Option<u64>,
    /// Output that the client was sent, from `base` on.
    shown_output: Vec<Option<u8>>,
    disputed: Vec<u64>,
    pub over_since: Option<Time>,
}

impl Flow {
    pub fn new(now: Time) -> Flow {
        let leg = FlowLeg {
            edge: INITIAL_EDGE,
            ..FlowLeg::default()
        };
        Flow {
            handshake: Handshake::Pending {
                since: now,
                attempts: 0,
            },
            answered: LegSet::EMPTY,
            refused: LegSet::EMPTY,
            own_roles: None,
            legs: std::array::from_fn(|_| leg.clone()),
            sent: 0,
            is_end_passed: false,
            shown_ack: 0,
            shown_edge: INITIAL_EDGE,
            client_nxt: 0,
            client_ack: 0,
            client_edge: INITIAL_EDGE,
            client_fin_at: None,
            input_at: now,
            ahead: LegSet::EMPTY,
            base: Some(0),
            shown_output: Vec::new(),
            disputed: Vec::new(),
            over_since: None,
        }
    }

    /// Returns a connection of the former contact node, of which packets will tell the rest.
    pub fn adopted(now: Time, live: LegSet) -> Flow {
        Flow {
            handshake: Handshake::Shown,
            answered: live,
            shown_edge: 0,
            client_edge: 0,
            base: None,
            legs: std::array::from_fn(|_| FlowLeg::default()),
            ..Flow::new(now)
        }
    }

    /// Returns the position after the client's input, without its FIN.
    pub fn client_data_end(&self) -> u64 {
        self.client_fin_at.unwrap_or(u64::MAX).min(self.client_nxt)
    }

    /// Returns the first position at which outputs are compared.
    pub fn base(&self) -> Option<u64> {
        self.base
    }

    pub fn take_client_segment(&mut self, now: Time, segment: &Segment, live: LegSet) {
        if self.base.is_none() {
            // Output before this position was on its way when the former contact node died.
            let base = self.sent.max(segment.ack);
            self.base = Some(base);
            self.sent = base;
            for leg in &mut self.legs {
                leg.base = base;
                leg.compared = base;
                leg.output.clear();
                leg.early.clear();
            }
        }
        if segment.fin {
            self.client_fin_at = Some(segment.end() - 1);
        }
        if segment.end() > self.client_nxt {
            self.client_nxt = segment.end();
            self.input_at = now;
        }
        self.client_ack = self.client_ack.max(segment.ack.min(self.sent));
        self.client_edge = self.client_edge.max(segment.edge);
        for leg in live.iter() {
            let leg = &mut self.legs[leg.position()];
            if leg.ack < self.client_nxt && segment.has_content() {
                leg.owes_since.get_or_insert(now);
            }
        }
    }

    pub fn take_leg_segment(&mut self, now: Time, index: LegIndex, segment: &Segment) {
        let leg = &mut self.legs[index.position()];
        leg.ack = leg.ack.max(segment.ack);
        leg.edge = leg.edge.max(segment.edge);
        leg.sent_max = leg.sent_max.max(segment.end());
        leg.owes_since = (leg.ack < self.client_nxt).then_some(now);
        let before = leg.received_end();
        if segment.has_content() && self.base.is_some() {
            leg.receive(segment);
        }
        if segment.fin {
            leg.fin_at = Some(segment.end() - 1);
        }
        if leg.received_end() > before {
            leg.lacks_since = None;
        }
    }

    /// Records the output that the client is shown.
    pub fn record_shown(&mut self, segment: &Segment) {
        let Some(base) = self.base else {
            return;
        };
        for (position, byte) in (segment.seq..).zip(&segment.data) {
            let Some(index) = position.checked_sub(base) else {
                continue;
            };
            let index = index as usize;
            if index >= self.shown_output.len() {
                self.shown_output.resize(index + 1, None);
            }
            self.shown_output[index].get_or_insert(*byte);
        }
    }

    /// Records a replica's probe: the replica has more output, and only the primary's silence keeps its window shut.
    pub fn note_probe(&mut self, leg: LegIndex, segment: &Segment) {
        let end = self.legs[leg.position()].received_end();
        if segment.is_probe && end >= self.sent && self.client_edge > self.sent {
            self.ahead.insert(leg);
        }
    }

    /// Returns the live legs that have ended their output before a position.
    pub fn finished_before(&self, end: u64, live: LegSet) -> LegSet {
        let is_early = |leg: &LegIndex| {
            let leg = &self.legs[leg.position()];
            leg.is_finished() && leg.received_end() < end
        };
        live.iter().filter(is_early).collect()
    }

    /// Returns the acknowledgement for a leg: of what the client has, but nothing that the leg has not sent or that was not
    /// compared.
    pub fn told_ack(&self, index: LegIndex) -> u64 {
        let leg = &self.legs[index.position()];
        let received = leg.received_end() + u64::from(leg.is_finished());
        let known = match self.base {
            Some(_) => received.min(leg.sent_max),
            None => leg.sent_max,
        };
        self.client_ack.min(known)
    }

    /// Records what a leg is told; returns false if nothing of it is new.
    pub fn note_told(&mut self, index: LegIndex, ack: u64, edge: u64) -> bool {
        let leg = &mut self.legs[index.position()];
        let is_new = ack > leg.told_ack || edge > leg.told_edge;
        leg.told_ack = leg.told_ack.max(ack);
        leg.told_edge = leg.told_edge.max(edge);
        is_new
    }

    /// Returns how far a leg may send: a replica to where the client has been sent to, the primary not too far ahead of the
    /// slowest.
    pub fn window_for(
        &self,
        leg: LegIndex,
        primary: LegIndex,
        live: LegSet,
        limits: &WatchLimits,
    ) -> u64 {
        if leg == primary {
            let slowest = self.slowest(live).map_or(u64::MAX, |(end, _)| end);
            let bound = slowest.saturating_add(u64::from(limits.lag_bytes_max));
            return self.client_edge.min(bound);
        }
        match self.legs[primary.position()].is_finished() {
            true => self.client_edge,
            false => self.client_edge.min(self.sent),
        }
    }

    fn slowest(&self, live: LegSet) -> Option<(u64, LegIndex)> {
        let end = |leg: LegIndex| (self.legs[leg.position()].received_end(), leg);
        live.iter().map(end).min()
    }

    /// Returns the acknowledgement and the right edge for the client: the lowest of all live legs.
    pub fn shown(
        &self,
        primary: LegIndex,
        live: LegSet,
        bug: Option<ReplicationBug>,
    ) -> (u64, u64) {
        let first = &self.legs[primary.position()];
        let live = match bug {
            Some(ReplicationBug::NoAckClamp) => LegSet::of(primary),
            _ => live,
        };
        let legs = live.iter().map(|leg| &self.legs[leg.position()]);
        legs.fold((first.ack, first.edge), |(ack, edge), leg| {
            (ack.min(leg.ack), edge.min(leg.edge))
        })
    }

    /// Compares the output of a leg, and returns the positions after differing bytes, as far as they are new or were disputed
    /// before.
    pub fn compare(&mut self, index: LegIndex, live: LegSet) -> Vec<u64> {
        let Some(base) = self.base.filter(|_| live.contains(index)) else {
            return Vec::new();
        };
        let leg = &mut self.legs[index.position()];
        let mut positions = Vec::new();
        while leg.compared < leg.received_end() {
            let at = (leg.compared - base) as usize;
            let Some(Some(shown)) = self.shown_output.get(at) else {
                break;
            };
            let differs = *shown != leg.output[(leg.compared - leg.base) as usize];
            leg.compared += 1;
            let is_disputed = self.disputed.contains(&leg.compared);
            if differs && !is_disputed {
                self.disputed.push(leg.compared);
            }
            if differs || is_disputed {
                positions.push(leg.compared);
            }
        }
        positions
    }

    /// Returns the digest of a leg's output up to a position.
    pub fn digest(&self, index: LegIndex, position: u64) -> Option<u64> {
        let leg = &self.legs[index.position()];
        let length = position.checked_sub(leg.base)? as usize;
        let output = leg.output.get(..length)?;
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        Some(output.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }

    /// Returns true once both directions have ended everywhere.
    pub fn is_over(&self, live: LegSet) -> bool {
        let has_ended = |leg: LegIndex| {
            let leg = &self.legs[leg.position()];
            self.client_fin_at.is_some_and(|fin_at| leg.ack > fin_at)
        };
        self.is_end_passed && self.client_ack >= self.sent && live.iter().all(has_ended)
    }

    /// Checks the legs; called at regular times.
    pub fn check_legs(&mut self, check: &mut LegCheck<'_>) {
        if let Handshake::Pending { since, attempts } = self.handshake {
            return self.check_handshake(check, since, attempts);
        }
        for leg in check.live.iter() {
            self.check_silence(check, leg);
            self.check_output(check, leg);
            self.check_lag(check, leg);
        }
        let best = self.best_ack(check.live);
        let behind = |leg: &FlowLeg| {
            let output = self.sent.saturating_sub(leg.received_end());
            (best.saturating_sub(leg.ack) + output) as u32
        };
        let base = self.base.unwrap_or(u64::MAX);
        let is_compared = |leg: &LegIndex| self.legs[leg.position()].sent_max >= base;
        check.events.push(DataPlaneEvent::Progress {
            client: check.client,
            acknowledged: self.shown_ack.min(self.client_data_end()) as u32,
            behind: std::array::from_fn(|index| behind(&self.legs[index])),
            compared: check.live.iter().filter(is_compared).collect(),
        });
    }

    /// Returns the furthest acknowledgement of a live leg.
    fn best_ack(&self, live: LegSet) -> u64 {
        let ack = |leg: LegIndex| self.legs[leg.position()].ack;
        live.iter().map(ack).max().unwrap_or(0)
    }

    fn check_handshake(&mut self, check: &mut LegCheck<'_>, since: Time, attempts: u32) {
        let silent = check
            .live
            .difference(self.answered)
            .difference(self.refused);
        let is_late = check.now >= since + Time::from(check.limits.silence_max(ROUND_TRIP));
        if !is_late || silent.is_empty() || self.answered.is_empty() {
            return;
        }
        self.handshake = Handshake::Pending {
            since: check.now,
            attempts,
        };
        check.events.push(DataPlaneEvent::HandshakeUnanswered {
            client: check.client,
            silent,
            answered: self.answered,
            attempts,
        });
    }

    fn check_silence(&self, check: &mut LegCheck<'_>, index: LegIndex) {
        let leg = &self.legs[index.position()];
        let Some(since) = leg.owes_since else {
            return;
        };
        let silence = Duration::from(check.now.since(since));
        if silence >= check.limits.silence_max(ROUND_TRIP) / 2 {
            let has_answered = |other: &LegIndex| self.legs[other.position()].ack > leg.ack;
            check.events.push(DataPlaneEvent::LegSilent {
                client: check.client,
                leg: index,
                silence,
                round_trip: ROUND_TRIP,
                answered: check.live.iter().filter(has_answered).collect(),
            });
        }
    }

    fn check_output(&mut self, check: &mut LegCheck<'_>, index: LegIndex) {
        let best = self.best_ack(check.live);
        let end = self.legs[index.position()].received_end();
        let is_primary = index == check.primary;
        let ahead = match is_primary {
            true => self.ahead,
            false => {
                let has_more = |other: &LegIndex| self.legs[other.position()].received_end() > end;
                check.live.iter().filter(has_more).collect()
            }
        };
        let begin = match is_primary {
            true => self.input_at,
            false => check.now,
        };
        let lacks = match is_primary {
            true => !ahead.is_empty(),
            false => end < self.sent && !self.is_end_passed,
        };
        let leg = &mut self.legs[index.position()];
        // A leg that lacks input is silent, not stalled.
        if !lacks || leg.ack < best {
            leg.lacks_since = None;
            return;
        }
        let since = *leg.lacks_since.get_or_insert(begin);
        if check.now.since(since) >= Time::from(check.limits.stall_max) {
            check.events.push(DataPlaneEvent::LegStalled {
                client: check.client,
                leg: index,
                ahead,
            });
        }
    }

    fn check_lag(&mut self, check: &mut LegCheck<'_>, index: LegIndex) {
        let bound = u64::from(check.limits.lag_bytes_max);
        let first_end = self.legs[check.primary.position()].received_end();
        let others = check.live.without(index);
        let edge = |other: LegIndex| self.legs[other.position()].edge;
        let best_edge = others.iter().map(edge).max();
        let leg = &self.legs[index.position()];
        let distance = first_end.saturating_sub(leg.received_end());
        let holds_output = index != check.primary
            && distance + MSS > bound
            && self.client_edge > leg.received_end() + bound;
        let is_client_blocked = self.client_nxt + MSS > self.shown_edge;
        // Several slow legs may hold up the client together.
        let is_at_limit = leg.edge < self.shown_edge + MSS;
        let holds_input = is_client_blocked
            && is_at_limit
            && best_edge.is_some_and(|best| best >= leg.edge + MSS);
        let leg = &mut self.legs[index.position()];
        if !holds_output && !holds_input {
            leg.holds_up_since = None;
            return;
        }
        let since = *leg.holds_up_since.get_or_insert(check.now);
        if check.now.since(since) >= Time::from(check.limits.lag_time_max) {
            check.events.push(DataPlaneEvent::LegLagging {
                client: check.client,
                leg: index,
                bytes: distance as u32,
            });
        }
    }
}
