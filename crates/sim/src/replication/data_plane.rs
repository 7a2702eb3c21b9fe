//! The data plane of the replicator: which segment goes where, by the rules of `feasibility/replication` in virtual time.

use super::ReplicationBug;
use super::endpoint::{Endpoint, Segment};
use super::flow::{Flow, Handshake, LegCheck};
use crate::time::Time;
use holdfast_proto::replication::{DataPlaneEvent, WatchLimits};
use holdfast_wire::replication_frames::{
    ConnectionRecord, LEGS_MAX, LegIndex, LegSet, LegTranslation,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Port of the first client.
const PORT: u16 = 1_000;
/// Time for which a connection is remembered after its end.
const LINGER: Time = Time::from_micros(500_000);

/// An end of a connection: a sender or receiver of packets beside the replicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    Client(usize),
    /// The leg's end of a client's connection.
    Leg(usize, LegIndex),
}

/// A packet between a client, the replicator and a leg.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Packet {
    Syn,
    SynAck,
    Reset,
    Segment(Segment),
}

/// Returns the address of the client with this index.
pub(super) fn client_address(client: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, 1], PORT + client as u16))
}

/// Returns the index of the client with this address.
pub(super) fn client_index(address: SocketAddr) -> usize {
    usize::from(address.port() - PORT)
}

/// The replicator's data plane.
#[derive(Debug)]
pub(super) struct DataPlane {
    pub primary: LegIndex,
    pub live: LegSet,
    /// True once the state machine has set the roles.
    has_roles: bool,
    pub flows: BTreeMap<usize, Flow>,
    pub limits: WatchLimits,
    pub bug: Option<ReplicationBug>,
    /// Legs from which a packet has come since the last tick.
    pub heard: LegSet,
    packets: Vec<(ConnectionEnd, Packet)>,
    events: Vec<DataPlaneEvent>,
}

impl DataPlane {
    pub fn new(limits: WatchLimits, bug: Option<ReplicationBug>) -> DataPlane {
        DataPlane {
            primary: LegIndex::FIRST,
            live: LegSet::EMPTY,
            has_roles: false,
            flows: BTreeMap::new(),
            limits,
            bug,
            heard: LegSet::EMPTY,
            packets: Vec::new(),
            events: Vec::new(),
        }
    }

    pub fn take_packets(&mut self) -> Vec<(ConnectionEnd, Packet)> {
        std::mem::take(&mut self.packets)
    }

    pub fn take_events(&mut self) -> Vec<DataPlaneEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the primary and the live legs of a connection.
    pub fn roles(&self, client: usize) -> (LegIndex, LegSet) {
        let own = self.flows.get(&client).and_then(|flow| flow.own_roles);
        own.unwrap_or((self.primary, self.live))
    }

    /// Takes a packet of a client.
    pub fn handle_client(&mut self, now: Time, client: usize, packet: Packet) {
        match packet {
            Packet::Syn => self.on_syn(now, client),
            Packet::Segment(segment) => self.on_client_segment(now, client, &segment),
            Packet::SynAck | Packet::Reset => {}
        }
    }

    fn on_syn(&mut self, now: Time, client: usize) {
        if self.has_roles && self.live.is_empty() {
            // No leg is left: the client learns it as from a host without a server.
            return self.reset_client(client);
        }
        let flow = self.flows.entry(client).or_insert_with(|| Flow::new(now));
        match &mut flow.handshake {
            Handshake::Pending { since, attempts } => {
                *since = now;
                *attempts += 1;
                for leg in self.live.iter() {
                    self.packets
                        .push((ConnectionEnd::Leg(client, leg), Packet::Syn));
                }
            }
            Handshake::Answered => {}
            Handshake::Shown => self
                .packets
                .push((ConnectionEnd::Client(client), Packet::SynAck)),
        }
    }

    /// Takes a packet of a leg.
    pub fn handle_leg(&mut self, now: Time, client: usize, leg: LegIndex, packet: Packet) {
        self.heard.insert(leg);
        let live = self.roles(client).1;
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        match packet {
            _ if !live.contains(leg) => {}
            Packet::SynAck => {
                flow.answered.insert(leg);
                self.on_handshake_answer(client);
            }
            Packet::Reset if matches!(flow.handshake, Handshake::Pending { .. }) => {
                flow.refused.insert(leg);
                self.on_handshake_answer(client);
            }
            Packet::Reset => self.on_leg_reset(client, leg),
            Packet::Segment(segment) => self.on_leg_segment(now, client, leg, &segment),
            Packet::Syn => {}
        }
    }

    fn on_handshake_answer(&mut self, client: usize) {
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        let is_pending = matches!(flow.handshake, Handshake::Pending { .. });
        if !is_pending || self.live.is_empty() {
            return;
        }
        if self.live.difference(flow.answered).is_empty() {
            flow.handshake = Handshake::Answered;
            let record = record(client, self.live);
            self.events.push(DataPlaneEvent::Opened { record });
        } else if !flow.refused.is_empty() {
            self.events.push(DataPlaneEvent::HandshakeRefused {
                client: client_address(client),
                refused: flow.refused,
                answered: flow.answered,
            });
        }
    }

    fn on_leg_reset(&mut self, client: usize, leg: LegIndex) {
        if self.bug == Some(ReplicationBug::PassesReset) && self.roles(client).0 == leg {
            return self.reset_client(client);
        }
        if let Some(flow) = self.flows.get(&client) {
            let acknowledged = flow.legs[leg.position()].ack.min(flow.client_data_end());
            self.events.push(DataPlaneEvent::LegReset {
                client: client_address(client),
                leg,
                acknowledged: acknowledged as u32,
            });
        }
    }

    fn on_client_segment(&mut self, now: Time, client: usize, segment: &Segment) {
        let (primary, live) = self.roles(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        if !matches!(flow.handshake, Handshake::Shown) {
            return;
        }
        flow.take_client_segment(now, segment, live);
        for leg in live.iter() {
            let copy = Segment {
                ack: flow.told_ack(leg),
                edge: flow.window_for(leg, primary, live, &self.limits),
                ..segment.clone()
            };
            flow.note_told(leg, copy.ack, copy.edge);
            self.packets
                .push((ConnectionEnd::Leg(client, leg), Packet::Segment(copy)));
        }
    }

    fn on_leg_segment(&mut self, now: Time, client: usize, leg: LegIndex, segment: &Segment) {
        let (primary, live) = self.roles(client);
        let address = client_address(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        if !matches!(flow.handshake, Handshake::Shown) {
            return;
        }
        let was = flow.legs[leg.position()].clone();
        flow.take_leg_segment(now, leg, segment);
        let own = flow.legs[leg.position()].clone();
        if own.is_finished() && !was.is_finished() {
            self.events.push(DataPlaneEvent::LegFinished {
                client: address,
                leg,
                acknowledged: own.ack.min(flow.client_data_end()) as u32,
            });
        }
        let early = flow.finished_before(own.received_end(), live);
        if !early.is_empty() && !flow.is_end_passed {
            self.events.push(DataPlaneEvent::OutputAfterFin {
                client: address,
                finished: early,
            });
        }
        let is_waiting = segment.is_probe || segment.fin && segment.data.is_empty();
        if is_waiting && flow.base().is_none() {
            // A client that waits for the leg may have nothing to say, and its position and window are known once it has spoken.
            self.ask_client(client);
        }
        if leg == primary {
            self.pass_primary_segment(client, segment);
        } else if let Some(flow) = self.flows.get_mut(&client) {
            flow.note_probe(leg, segment);
        }
        self.compare(client, leg);
        self.pass_fin(client);
        let is_repetition = own.ack == was.ack && own.edge == was.edge;
        self.tell_client(client, is_repetition && !segment.has_content());
        if leg != primary {
            self.wake(client, primary, false);
        }
        let is_old = segment.has_content() && segment.end() <= was.sent_max;
        if leg != primary || is_old || segment.is_probe {
            self.wake(client, leg, is_old || segment.is_probe);
        }
    }

    /// Passes a segment of the primary on, unless the client has acknowledged it. A FIN is held back until all legs agree.
    fn pass_primary_segment(&mut self, client: usize, segment: &Segment) {
        let (primary, live) = self.roles(client);
        let passes_fin = self.bug == Some(ReplicationBug::PassesFinAtOnce);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        flow.ahead = match segment.has_content() && segment.end() >= flow.sent {
            true => LegSet::EMPTY,
            false => flow.ahead,
        };
        let fin = segment.fin && (flow.is_end_passed || passes_fin);
        let is_old = segment.seq + segment.data.len() as u64 <= flow.client_ack;
        if !fin && (segment.data.is_empty() || is_old) {
            return;
        }
        flow.record_shown(segment);
        flow.sent = flow
            .sent
            .max(segment.seq + segment.data.len() as u64 + u64::from(fin));
        let (ack, edge) = flow.shown(primary, live, self.bug);
        let passed = Segment {
            fin,
            ack,
            edge,
            ..segment.clone()
        };
        flow.shown_ack = flow.shown_ack.max(ack);
        flow.shown_edge = flow.shown_edge.max(edge);
        self.packets
            .push((ConnectionEnd::Client(client), Packet::Segment(passed)));
    }

    /// Passes the end of the output on, once all live legs have ended theirs.
    fn pass_fin(&mut self, client: usize) {
        let (primary, live) = self.roles(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        let is_finished = |leg: LegIndex| flow.legs[leg.position()].is_finished();
        let is_agreed = !live.is_empty() && live.iter().all(is_finished);
        if flow.is_end_passed || !is_agreed {
            return;
        }
        let Some(fin_at) = flow.legs[primary.position()].fin_at else {
            return;
        };
        flow.is_end_passed = true;
        flow.sent = flow.sent.max(fin_at + 1);
        let (ack, edge) = flow.shown(primary, live, self.bug);
        let fin = Segment {
            seq: fin_at,
            data: Vec::new(),
            fin: true,
            ack,
            edge,
            is_probe: false,
        };
        self.packets
            .push((ConnectionEnd::Client(client), Packet::Segment(fin)));
    }

    /// Shows the client an acknowledgement, if it says something new or answers a repetition.
    fn tell_client(&mut self, client: usize, may_repeat: bool) {
        let (primary, live) = self.roles(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        if live.is_empty() {
            return;
        }
        let (ack, edge) = flow.shown(primary, live, self.bug);
        let is_new = ack > flow.shown_ack || edge > flow.shown_edge;
        if !is_new && !may_repeat {
            return;
        }
        flow.shown_ack = flow.shown_ack.max(ack);
        flow.shown_edge = flow.shown_edge.max(edge);
        let told = Segment {
            seq: flow.sent,
            data: Vec::new(),
            fin: false,
            ack,
            edge,
            is_probe: false,
        };
        self.packets
            .push((ConnectionEnd::Client(client), Packet::Segment(told)));
    }

    /// Asks the client of an adopted connection to repeat what it has acknowledged, like a keep-alive.
    fn ask_client(&mut self, client: usize) {
        let (primary, live) = self.roles(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        let (ack, edge) = flow.shown(primary, live, self.bug);
        flow.shown_ack = flow.shown_ack.max(ack);
        flow.shown_edge = flow.shown_edge.max(edge);
        let question = Segment {
            seq: flow.sent,
            data: Vec::new(),
            fin: false,
            ack,
            edge,
            is_probe: true,
        };
        self.packets
            .push((ConnectionEnd::Client(client), Packet::Segment(question)));
    }

    /// Tells a leg what the client has acknowledged, and how far the leg may send, if that is new or `is_forced`.
    fn wake(&mut self, client: usize, leg: LegIndex, is_forced: bool) {
        let (primary, live) = self.roles(client);
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        if !live.contains(leg) || !matches!(flow.handshake, Handshake::Shown) {
            return;
        }
        let told = Segment {
            seq: flow.client_nxt,
            data: Vec::new(),
            fin: false,
            ack: flow.told_ack(leg),
            edge: flow.window_for(leg, primary, live, &self.limits),
            is_probe: false,
        };
        if flow.note_told(leg, told.ack, told.edge) || is_forced {
            self.packets
                .push((ConnectionEnd::Leg(client, leg), Packet::Segment(told)));
        }
    }

    /// Compares a leg's output with the output that the client was shown.
    fn compare(&mut self, client: usize, leg: LegIndex) {
        let live = self.roles(client).1;
        let Some(flow) = self.flows.get_mut(&client) else {
            return;
        };
        let positions = flow.compare(leg, live);
        if self.bug == Some(ReplicationBug::NoComparison) {
            return;
        }
        for position in positions {
            let mut digests = [None; LEGS_MAX];
            for leg in live.iter() {
                digests[leg.position()] = flow.digest(leg, position);
            }
            self.events.push(DataPlaneEvent::Diverged {
                client: client_address(client),
                position,
                digests,
            });
        }
    }

    pub fn set_roles(&mut self, primary: LegIndex, live: LegSet) {
        (self.primary, self.live) = (primary, live);
        self.has_roles = true;
    }

    pub fn set_own_roles(&mut self, client: usize, roles: Option<(LegIndex, LegSet)>) {
        if let Some(flow) = self.flows.get_mut(&client) {
            flow.own_roles = roles;
        }
    }

    /// Sends what follows from new roles.
    pub fn send_window_update(&mut self, client: usize) {
        self.on_handshake_answer(client);
        let live = self.roles(client).1;
        let is_shown = |flow: &Flow| matches!(flow.handshake, Handshake::Shown);
        if !self.flows.get(&client).is_some_and(is_shown) {
            return;
        }
        for leg in live.iter() {
            self.wake(client, leg, true);
        }
        self.tell_client(client, false);
        self.pass_fin(client);
    }

    /// Sends what follows from new roles in all connections.
    pub fn send_all_window_updates(&mut self) {
        let clients: Vec<usize> = self.flows.keys().copied().collect();
        clients
            .into_iter()
            .for_each(|client| self.send_window_update(client));
    }

    /// Completes a client's handshake.
    pub fn show_syn_ack(&mut self, client: usize) {
        if let Some(flow) = self.flows.get_mut(&client)
            && matches!(flow.handshake, Handshake::Answered)
        {
            flow.handshake = Handshake::Shown;
            self.packets
                .push((ConnectionEnd::Client(client), Packet::SynAck));
        }
    }

    pub fn reset_client(&mut self, client: usize) {
        self.flows.remove(&client);
        self.packets
            .push((ConnectionEnd::Client(client), Packet::Reset));
    }

    /// Goes on with a connection of the former contact node.
    pub fn adopt(&mut self, now: Time, record: &ConnectionRecord) {
        let client = client_index(record.client);
        self.flows.insert(client, Flow::adopted(now, record.live));
    }

    /// Checks all connections: silent, stalled and slow legs, progress, ends.
    pub fn tick(&mut self, now: Time) {
        let clients: Vec<usize> = self.flows.keys().copied().collect();
        for client in clients {
            let (primary, live) = self.roles(client);
            let Some(flow) = self.flows.get_mut(&client) else {
                continue;
            };
            let address = client_address(client);
            flow.check_legs(&mut LegCheck {
                now,
                client: address,
                primary,
                live,
                limits: &self.limits,
                events: &mut self.events,
            });
            if flow.is_over(live) {
                let since = *flow.over_since.get_or_insert(now);
                if now >= since + LINGER {
                    self.flows.remove(&client);
                    self.events.push(DataPlaneEvent::Closed { client: address });
                }
            }
        }
    }
}

/// Returns the record of a connection; the numbers that the simulation leaves out are arbitrary.
fn record(client: usize, live: LegSet) -> ConnectionRecord {
    let translation = LegTranslation {
        sequence_offset: 0,
        timestamp_offset: 0,
        mss: super::endpoint::MSS as u16,
        window_scale: 0,
    };
    ConnectionRecord {
        client: client_address(client),
        client_isn: 0,
        service_isn: 0,
        mss: super::endpoint::MSS as u16,
        client_window_scale: 0,
        service_window_scale: 0,
        has_timestamps: false,
        live,
        legs: [Some(translation); LEGS_MAX],
    }
}

/// Window that each side grants before it has sent a segment.
pub(super) const INITIAL_EDGE: u64 = Endpoint::INITIAL_EDGE;
