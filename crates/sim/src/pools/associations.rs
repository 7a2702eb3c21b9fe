//! The associations of registrars, elements and users, and the delivery of their messages.

use super::node_numbers::{self, NodeRole};
use super::world::{PoolWorld, PoolWorldEvent};
use crate::associations::{
    Association, AssociationEvent, AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use crate::event_queue::FutureEvents;
use crate::time::Time;
use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::LinkId;
use holdfast_proto::registrar::{AssociationId, DialId, PoolProtocol};
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

/// Size of the headers below a message, in bytes: IP, UDP, SCTP and its chunk.
const HEADERS: usize = 20 + 8 + 12 + 16;

/// Data that the world of pools keeps with each association.
#[derive(Debug)]
pub(super) struct PoolAssociation {
    pub(super) protocol: PoolProtocol,
    initiator_name: InitiatorName,
    /// The transport's smoothed round trip time, in seconds.
    round_trip_s: f64,
}

impl PoolAssociation {
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
pub(super) fn association_id(
    association: AssociationNumber,
    side: AssociationSide,
) -> AssociationId {
    AssociationId(u64::from(association) * 2 + u64::from(side))
}

/// Returns the association and the end of an ID: the inverse of [`association_id`].
pub(super) fn from_association_id(id: AssociationId) -> (AssociationNumber, AssociationSide) {
    ((id.0 / 2) as u32, (id.0 % 2) as AssociationSide)
}

pub(super) fn encode(message: &Message) -> Bytes {
    let mut buffer = BytesMut::with_capacity(128);
    // Every message of the state machines has an encoding.
    let _ = message.encode(&mut buffer);
    buffer.freeze()
}

impl PoolWorld<'_> {
    /// Starts an association from one node to another.
    pub(super) fn connect(
        &mut self,
        from: NodeNumber,
        to: NodeNumber,
        protocol: PoolProtocol,
        initiator_name: InitiatorName,
    ) -> AssociationNumber {
        let data = PoolAssociation {
            protocol,
            initiator_name,
            round_trip_s: 0.0,
        };
        let association = self.associate(from, to, data);
        let state = &mut self.associations[association as usize];
        state.data.round_trip_s = state.handshake_round_trip().as_secs_f64();
        association
    }

    /// Sends a message from an end.
    #[inline]
    pub(super) fn send(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
        message: Bytes,
    ) {
        let message = match self.config.bug {
            None => message,
            Some(bug) => {
                let protocol = self.associations[association as usize].data.protocol;
                match bug.apply(protocol, message) {
                    Some(message) => message,
                    None => return,
                }
            }
        };
        self.transmit(association, side, message);
    }

    /// Returns the arrival time of a message between a user and an element that is sent at `at`; none if it does not
    /// arrive.
    pub(super) fn arrival_of_request(
        &mut self,
        at: Time,
        from: NodeNumber,
        to: NodeNumber,
    ) -> Option<Time> {
        self.arrival(at, (from, to), None)
    }

    /// Updates the transport's estimate if delays vary (RFC 9260 section 6.3.1: an eighth of each new measurement).
    fn measure_round_trip(&mut self, association: AssociationNumber) {
        if !self.has_variable_delays {
            return;
        }
        let [a, b] = self.associations[association as usize].ends;
        let zones = (self.nodes.zone(a), self.nodes.zone(b));
        let measured = self
            .network
            .round_trip(&mut self.random, zones)
            .as_secs_f64();
        let data = &mut self.associations[association as usize].data;
        data.round_trip_s += (measured - data.round_trip_s) / 8.0;
    }
}

impl AssociationWorld for PoolWorld<'_> {
    type Data = PoolAssociation;
    type Message = Bytes;
    type Event = PoolWorldEvent;

    fn now(&self) -> Time {
        self.now
    }

    fn queue(&mut self) -> &mut FutureEvents<PoolWorldEvent> {
        &mut self.queue
    }

    fn associations(&mut self) -> &mut Vec<Association<PoolAssociation, Bytes>> {
        &mut self.associations
    }

    fn is_alive(&self, node: NodeNumber) -> bool {
        match self.nodes.role(node) {
            NodeRole::Registrar(index) => self.registrars[index].machine.is_some(),
            NodeRole::Element(index) => self.elements[index].machine.is_some(),
            NodeRole::User(_) => true,
        }
    }

    fn association_timeout(&self) -> Time {
        self.config.association_timeout.into()
    }

    #[inline]
    fn arrival(
        &mut self,
        at: Time,
        (from, to): (NodeNumber, NodeNumber),
        message: Option<&Bytes>,
    ) -> Option<Time> {
        let zones = (self.nodes.zone(from), self.nodes.zone(to));
        let bytes = message.map_or(0, Bytes::len) + HEADERS;
        self.network
            .send_reliably(&mut self.random, at, zones, bytes)
    }

    fn handle_up(&mut self, association: AssociationNumber, side: AssociationSide) {
        let state = &self.associations[association as usize];
        let (node, other) = (state.end(side), state.end(1 - side));
        let (protocol, name) = (state.data.protocol, state.data.initiator_name);
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

    fn handle_lost(&mut self, association: AssociationNumber, side: AssociationSide, was_up: bool) {
        let state = &self.associations[association as usize];
        let (node, other) = (state.end(side), state.end(1 - side));
        let (protocol, name) = (state.data.protocol, state.data.initiator_name);
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

    #[inline]
    fn handle_message(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
        message: &Bytes,
    ) {
        let state = &self.associations[association as usize];
        let (protocol, name) = (state.data.protocol, state.data.initiator_name);
        match self.nodes.role(state.end(side)) {
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
}

impl From<AssociationEvent<Bytes>> for PoolWorldEvent {
    #[inline]
    fn from(event: AssociationEvent<Bytes>) -> PoolWorldEvent {
        PoolWorldEvent::Association(event)
    }
}
