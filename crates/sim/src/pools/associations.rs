//! Associations like SCTP's: ordered, reliable while they last, with a four-way handshake.

use super::node_numbers::{self, NodeNumber, NodeRole};
use super::world::{PoolWorld, PoolWorldEvent};
use crate::time::Time;
use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::LinkId;
use holdfast_proto::registrar::{AssociationId, DialId, PoolProtocol};
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

/// Size of the headers below a message, in bytes: IP, UDP, SCTP and its chunk.
const HEADERS: usize = 20 + 8 + 12 + 16;

/// An end of an association; 0 is the initiator.
pub(super) type AssociationSide = u8;

#[derive(Debug)]
pub(super) struct SimulatedAssociation {
    pub(super) ends: [NodeNumber; 2],
    pub(super) protocol: PoolProtocol,
    /// The initiator's name for the association.
    pub(super) initiator_name: InitiatorName,
    /// Arrival time of the last message that each end sent.
    last_arrivals: [Time; 2],
    /// True for each end that knows the association.
    pub(super) is_up: [bool; 2],
    pub(super) is_open: bool,
    /// Messages that cannot be sent, in order, with their senders.
    queued: Vec<(AssociationSide, Bytes)>,
    /// The transport's smoothed round trip time, in seconds.
    round_trip_s: f64,
}

impl SimulatedAssociation {
    /// Returns the transport's smoothed round trip time.
    pub(super) fn round_trip(&self) -> Duration {
        Time::from_secs_f64(self.round_trip_s).into()
    }
}

/// The initiator's name for an association.
#[derive(Debug, Clone, Copy)]
pub(super) enum InitiatorName {
    Link(LinkId),
    Dial(DialId),
}

/// Returns the ID of an association at one of its ends, for a registrar there.
pub(super) fn association_id(association: u32, side: AssociationSide) -> AssociationId {
    AssociationId(u64::from(association) * 2 + u64::from(side))
}

/// Returns the association and the end of an ID: the inverse of [`id`].
pub(super) fn from_association_id(id: AssociationId) -> (u32, AssociationSide) {
    ((id.0 / 2) as u32, (id.0 % 2) as AssociationSide)
}

pub(super) fn encode(message: &Message) -> Bytes {
    let mut buffer = BytesMut::with_capacity(128);
    // Every message of the state machines has an encoding.
    let _ = message.encode(&mut buffer);
    buffer.freeze()
}

impl PoolWorld<'_> {
    /// Starts an association; `is_up` or `on_lost` follows.
    pub(super) fn connect(
        &mut self,
        from: NodeNumber,
        to: NodeNumber,
        protocol: PoolProtocol,
        name: InitiatorName,
    ) -> u32 {
        let association = self.associations.len() as u32;
        let mut new = SimulatedAssociation {
            ends: [from, to],
            protocol,
            initiator_name: name,
            last_arrivals: [Time::ZERO; 2],
            is_up: [false; 2],
            is_open: true,
            queued: Vec::new(),
            round_trip_s: 0.0,
        };
        let mut at = Some(self.now);
        let mut one_way_delays = [Time::ZERO; 4];
        for (way, arrival) in one_way_delays.iter_mut().enumerate() {
            let ends = if way % 2 == 0 { (from, to) } else { (to, from) };
            at = at.and_then(|at| self.arrival(at, ends, 0));
            *arrival = at.unwrap_or_default();
        }
        if at.is_none() {
            let timeout = self.now + self.config.association_timeout.into();
            self.queue.push(
                timeout,
                PoolWorldEvent::Lost {
                    association,
                    side: 0,
                },
            );
        } else if self.is_alive(to) {
            new.last_arrivals = [one_way_delays[2], one_way_delays[3]];
            new.round_trip_s = (one_way_delays[1] - self.now).as_secs_f64();
            self.queue.push(
                one_way_delays[2],
                PoolWorldEvent::Up {
                    association,
                    side: 1,
                },
            );
            self.queue.push(
                one_way_delays[3],
                PoolWorldEvent::Up {
                    association,
                    side: 0,
                },
            );
        } else {
            self.queue.push(
                one_way_delays[1],
                PoolWorldEvent::Lost {
                    association,
                    side: 0,
                },
            );
        }
        self.associations.push(new);
        association
    }

    fn arrival(
        &mut self,
        at: Time,
        (from, to): (NodeNumber, NodeNumber),
        bytes: usize,
    ) -> Option<Time> {
        let zones = (self.nodes.zone(from), self.nodes.zone(to));
        let bytes = bytes + HEADERS;
        self.network
            .send_reliably(&mut self.random, at, zones, bytes)
    }

    /// Returns the arrival time of a message between a user and an element that is sent at `at`; none if it does not
    /// arrive.
    pub(super) fn arrival_of_request(
        &mut self,
        at: Time,
        from: NodeNumber,
        to: NodeNumber,
    ) -> Option<Time> {
        self.arrival(at, (from, to), 0)
    }

    #[inline]
    pub(super) fn send(&mut self, association: u32, side: AssociationSide, message: Bytes) {
        let association_state = &self.associations[association as usize];
        if !association_state.is_open {
            return;
        }
        let message = match self.config.bug {
            None => message,
            Some(bug) => match bug.apply(association_state.protocol, message) {
                Some(message) => message,
                None => return,
            },
        };
        let (from, to) = (usize::from(side), usize::from(1 - side));
        let ends = (association_state.ends[from], association_state.ends[to]);
        let arrival = match association_state.queued.is_empty() {
            true => self.arrival(self.now, ends, message.len()),
            false => None,
        };
        let association_state = &mut self.associations[association as usize];
        let Some(arrival) = arrival else {
            if association_state.queued.is_empty() {
                let timeout = self.now + self.config.association_timeout.into();
                self.queue
                    .push(timeout, PoolWorldEvent::Break { association });
            }
            return association_state.queued.push((side, message));
        };
        let arrival = arrival.max(association_state.last_arrivals[from]);
        association_state.last_arrivals[from] = arrival;
        let side = 1 - side;
        let deliver = PoolWorldEvent::Deliver {
            association,
            side,
            message,
        };
        self.queue.push(arrival, deliver);
    }

    /// Sends the held messages that can be sent again.
    pub(super) fn send_queued(&mut self) {
        for association in 0..self.associations.len() {
            let held = std::mem::take(&mut self.associations[association].queued);
            for (side, message) in held {
                self.send(association as u32, side, message);
            }
        }
    }

    /// Ends an association after a timeout without arrivals: both ends give up.
    pub(super) fn time_out(&mut self, association: u32) {
        let association_state = &mut self.associations[association as usize];
        if !association_state.is_open || association_state.queued.is_empty() {
            return;
        }
        association_state.is_open = false;
        for side in [0, 1] {
            self.queue
                .push(self.now, PoolWorldEvent::Lost { association, side });
        }
    }

    /// Ends an association because one end closes it or dies; the other end is notified.
    pub(super) fn close(&mut self, association: u32, side: AssociationSide) {
        let association_state = &mut self.associations[association as usize];
        if !association_state.is_open {
            return;
        }
        association_state.is_open = false;
        association_state.is_up[usize::from(side)] = false;
        let other = usize::from(1 - side);
        let ends = (
            association_state.ends[usize::from(side)],
            association_state.ends[other],
        );
        let last = association_state.last_arrivals[usize::from(side)];
        // Messages sent earlier still arrive.
        let arrival = self.arrival(self.now, ends, 0);
        let timeout = self.now + self.config.association_timeout.into();
        let at = arrival.unwrap_or(timeout).max(last);
        let side = other as AssociationSide;
        self.queue
            .push(at, PoolWorldEvent::Lost { association, side });
    }

    /// Ends all associations of a node that dies.
    pub(super) fn close_all(&mut self, node: NodeNumber) {
        for association in 0..self.associations.len() {
            let ends = self.associations[association].ends;
            if let Some(side) = ends.iter().position(|end| *end == node) {
                self.close(association as u32, side as AssociationSide);
            }
        }
    }

    /// Handles the step of the handshake at which this end has the association.
    pub(super) fn on_up(&mut self, association: u32, side: AssociationSide) {
        let association_state = &mut self.associations[association as usize];
        if !association_state.is_open {
            return;
        }
        association_state.is_up[usize::from(side)] = true;
        let (node, other) = (
            association_state.ends[usize::from(side)],
            association_state.ends[usize::from(1 - side)],
        );
        let (protocol, name) = (association_state.protocol, association_state.initiator_name);
        match (self.nodes.role(node), name) {
            (NodeRole::Registrar(index), name) => {
                let dial = match name {
                    InitiatorName::Dial(dial) if side == 0 => Some(dial),
                    _ => None,
                };
                let at = node_numbers::endpoint(other, protocol);
                let id = association_id(association, side);
                self.open_associations
                    .insert((node, other, protocol), (association, side));
                self.drive_registrar(index, |machine, now| {
                    machine.handle_association_up(now, id, protocol, &[at], dial);
                });
            }
            (NodeRole::Element(index), InitiatorName::Link(link)) if side == 0 => {
                self.drive_element(index, |machine, now| machine.handle_connected(now, link));
            }
            (NodeRole::User(index), InitiatorName::Link(link)) => {
                self.drive_user(index, |machine, now| machine.handle_connected(now, link));
            }
            _ => {}
        }
    }

    /// Notifies an end that the association has ended, or was never established.
    pub(super) fn on_lost(&mut self, association: u32, side: AssociationSide) {
        let association_state = &mut self.associations[association as usize];
        let was_up = std::mem::replace(&mut association_state.is_up[usize::from(side)], false);
        association_state.is_open = false;
        let (node, other) = (
            association_state.ends[usize::from(side)],
            association_state.ends[usize::from(1 - side)],
        );
        let (protocol, name) = (association_state.protocol, association_state.initiator_name);
        match (self.nodes.role(node), name) {
            (NodeRole::Registrar(index), InitiatorName::Dial(dial)) if side == 0 && !was_up => {
                self.drive_registrar(index, |machine, now| machine.handle_dial_failed(now, dial));
            }
            (NodeRole::Registrar(index), _) if was_up => {
                let id = association_id(association, side);
                let key = (node, other, protocol);
                if self.open_associations.get(&key) == Some(&(association, side)) {
                    self.open_associations.remove(&key);
                }
                self.drive_registrar(index, |machine, now| {
                    machine.handle_association_down(now, id)
                });
            }
            (NodeRole::Element(index), InitiatorName::Link(link)) if side == 0 => {
                self.drive_element(index, |machine, now| machine.handle_lost(now, link));
            }
            (NodeRole::Element(index), _) => {
                let link = LinkId::Accepted(u64::from(association));
                self.drive_element(index, |machine, now| machine.handle_lost(now, link));
            }
            (NodeRole::User(index), InitiatorName::Link(link)) => {
                self.drive_user(index, |machine, now| machine.handle_lost(now, link));
            }
            _ => {}
        }
    }

    /// Handles the arrival of a message.
    #[inline]
    pub(super) fn on_message(&mut self, association: u32, side: AssociationSide, message: &Bytes) {
        let association_state = &self.associations[association as usize];
        if !association_state.is_up[usize::from(side)] {
            return;
        }
        let (node, protocol, name) = (
            association_state.ends[usize::from(side)],
            association_state.protocol,
            association_state.initiator_name,
        );
        match self.nodes.role(node) {
            NodeRole::Registrar(index) => {
                self.measure_round_trip(association);
                let id = association_id(association, side);
                self.drive_registrar(index, |machine, now| match protocol {
                    PoolProtocol::Asap => machine.handle_asap(now, id, message),
                    PoolProtocol::Enrp => machine.handle_enrp(now, id, message),
                });
            }
            NodeRole::Element(index) => {
                let Ok(parsed) = Message::parse(message) else {
                    return;
                };
                let link = match name {
                    InitiatorName::Link(link) => link,
                    InitiatorName::Dial(_) => LinkId::Accepted(u64::from(association)),
                };
                self.drive_element(index, |machine, now| {
                    machine.handle_message(now, link, parsed.message)
                });
            }
            NodeRole::User(index) => {
                let (Ok(parsed), InitiatorName::Link(link)) = (Message::parse(message), name)
                else {
                    return;
                };
                self.drive_user(index, |machine, now| {
                    machine.handle_message(now, link, parsed.message)
                });
            }
        }
    }

    /// Updates the transport's estimate if delays vary (RFC 9260 section 6.3.1: an eighth of each new measurement).
    fn measure_round_trip(&mut self, association: u32) {
        if !self.has_variable_delays {
            return;
        }
        let [a, b] = self.associations[association as usize].ends;
        let zones = (self.nodes.zone(a), self.nodes.zone(b));
        let measured = self
            .network
            .round_trip(&mut self.random, zones)
            .as_secs_f64();
        let association_state = &mut self.associations[association as usize];
        association_state.round_trip_s += (measured - association_state.round_trip_s) / 8.0;
    }
}
