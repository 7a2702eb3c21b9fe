//! The associations and datagrams between the nodes, and the registrars' outputs.

use crate::world::{PoolAssociation, World, WorldEvent};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Output, PoolProtocol};
use holdfast_sim::associations::{
    Association, AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use holdfast_sim::pools::PoolBug;
use holdfast_sim::pools::node_numbers::{self, NodeRole};
use holdfast_sim::{FutureEvents, Time};
use holdfast_wire::rserpool::enrp::{EnrpBody, Message};
use std::net::SocketAddr;
use std::time::Duration;

/// Time after which a registrar or its transport gives up without an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

impl World {
    pub fn carry_out(&mut self, index: usize, output: Output) {
        match output {
            Output::Send { to, message, .. } => self.send_from_registrar(index, to, message),
            Output::SendMany { to, message, .. } => {
                for to in to.iter() {
                    self.send_from_registrar(index, *to, message.clone());
                }
            }
            Output::Connect {
                dial,
                protocol,
                addresses,
            } => {
                if self.bug != Some(PoolBug::NoMonitoring) || protocol != PoolProtocol::Asap {
                    self.dial(index, dial, protocol, addresses[0]);
                }
            }
            Output::Multicast { protocol, message } => self.multicast(index, protocol, message),
            Output::Measure(_) => {}
            Output::Abort(association) => panic!("{association:?} was aborted"),
            Output::Event(event) => self.record_event(index, event),
        }
    }

    fn dial(&mut self, index: usize, dial: DialId, protocol: PoolProtocol, at: SocketAddr) {
        let node = self.numbers.number(NodeRole::Registrar(index));
        let to = node_numbers::node_at(at.ip()).expect("the address of a node");
        let boot = self.registrars[index].boot;
        match self.established_association(node, to, protocol) {
            Some(association) => {
                let event = WorldEvent::DialledAgain {
                    registrar: index,
                    boot,
                    dial,
                    association,
                };
                let after = self.delay().into();
                self.schedule(after, event);
            }
            None => {
                self.connect(node, to, protocol, Some((dial, boot)));
            }
        }
    }

    /// Handles the second dial of an association that exists already.
    pub fn on_dialled_again(&mut self, index: usize, dial: DialId, number: AssociationNumber) {
        let association = self.association(number);
        let node = self.numbers.number(NodeRole::Registrar(index));
        let side = association
            .side_of(node)
            .expect("an end of the association");
        if !association.is_open() || !association.is_up(side) {
            return self.feed(index, |machine, now| machine.handle_dial_failed(now, dial));
        }
        self.report_association_up(index, number, side, Some(dial));
    }

    fn report_association_up(
        &mut self,
        index: usize,
        number: AssociationNumber,
        side: AssociationSide,
        dial: Option<DialId>,
    ) {
        let association = self.association(number);
        let protocol = association.data.protocol;
        let at = node_numbers::endpoint(association.end(1 - side), protocol);
        self.feed(index, |machine, now| {
            machine.handle_association_up(now, id_of(number), protocol, &[at], dial);
        });
    }

    /// Starts an association. `dial` is the dial of a registrar in one of its lives.
    pub fn connect(
        &mut self,
        from: NodeNumber,
        to: NodeNumber,
        protocol: PoolProtocol,
        dial: Option<(DialId, u64)>,
    ) -> AssociationNumber {
        let data = PoolAssociation {
            protocol,
            dial,
            sent_presence: [false; 2],
        };
        self.associate(from, to, data)
    }

    /// Returns the open associations between two nodes.
    pub fn associations_between(&self, a: NodeNumber, b: NodeNumber) -> Vec<AssociationNumber> {
        let numbered = (0..).zip(&self.associations);
        let between = numbered.filter(|(_, association)| {
            association.is_open() && (association.ends == [a, b] || association.ends == [b, a])
        });
        between.map(|(number, _)| number).collect()
    }

    /// Returns an association of two nodes that is up at the first of them.
    pub fn established_association(
        &self,
        node: NodeNumber,
        other: NodeNumber,
        protocol: PoolProtocol,
    ) -> Option<AssociationNumber> {
        let between = self.associations_between(node, other).into_iter();
        let mut established = between.filter(|number| {
            let association = self.association(*number);
            let side = association.side_of(node);
            association.data.protocol == protocol
                && side.is_some_and(|side| association.is_up(side))
        });
        established.next()
    }

    fn multicast(&mut self, index: usize, protocol: PoolProtocol, message: Bytes) {
        let Some(message) = self.with_bug(protocol, message) else {
            return;
        };
        let from = self.numbers.number(NodeRole::Registrar(index));
        for to in (0..self.registrars.len()).filter(|to| *to != index) {
            let lost = self.loses_messages && self.random.chance(0.2);
            let is_cut = self.is_cut(from, self.numbers.number(NodeRole::Registrar(to)));
            for _ in 0..1 + u32::from(self.random.chance(0.05)) {
                if !lost && !is_cut {
                    let event = WorldEvent::Datagram {
                        to,
                        from,
                        protocol,
                        message: message.clone(),
                    };
                    let after = self.delay().into();
                    self.schedule(after, event);
                }
            }
        }
    }

    pub fn delay(&mut self) -> Time {
        let slow = self.loses_messages && self.random.chance(0.05);
        let max = if slow { 300_000 } else { 5_000 };
        Time::from_micros(self.random.between(200, max))
    }

    fn send_from_registrar(&mut self, index: usize, to: AssociationId, message: Bytes) {
        let node = self.numbers.number(NodeRole::Registrar(index));
        self.send(node, to.0 as AssociationNumber, message);
    }

    /// Sends a message from a node.
    pub fn send(&mut self, from: NodeNumber, number: AssociationNumber, message: Bytes) {
        let association = self.association(number);
        let side = association
            .side_of(from)
            .expect("an end of the association");
        let protocol = association.data.protocol;
        let Some(message) = self.with_bug(protocol, message) else {
            return;
        };
        if self.loses_first_presence && self.is_first_presence(number, side, &message) {
            return self.tally.count("first presence lost");
        }
        self.transmit(number, side, message);
    }

    fn with_bug(&self, protocol: PoolProtocol, message: Bytes) -> Option<Bytes> {
        match self.bug {
            None => Some(message),
            Some(bug) => bug.apply(protocol, message),
        }
    }

    fn is_first_presence(
        &mut self,
        number: AssociationNumber,
        side: AssociationSide,
        message: &Bytes,
    ) -> bool {
        let data = &mut self.associations[number as usize].data;
        let sent = &mut data.sent_presence[usize::from(side)];
        let is_presence = data.protocol == PoolProtocol::Enrp
            && Message::parse(message)
                .is_ok_and(|parsed| matches!(parsed.message.body, EnrpBody::Presence { .. }));
        is_presence && !std::mem::replace(sent, true)
    }
}

/// Returns the ID of an association, which is the same at both ends.
fn id_of(number: AssociationNumber) -> AssociationId {
    AssociationId(number.into())
}

impl AssociationWorld for World {
    type Data = PoolAssociation;
    type Message = Bytes;
    type Event = WorldEvent;

    fn now(&self) -> Time {
        self.now.into()
    }

    fn queue(&mut self) -> &mut FutureEvents<WorldEvent> {
        &mut self.queue
    }

    fn associations(&mut self) -> &mut Vec<Association<PoolAssociation, Bytes>> {
        &mut self.associations
    }

    fn is_alive(&self, node: NodeNumber) -> bool {
        match self.numbers.role(node) {
            NodeRole::Registrar(index) => self.registrars[index].machine.is_some(),
            NodeRole::Element(index) => self.elements[index].alive,
            NodeRole::User(_) => false,
        }
    }

    fn association_timeout(&self) -> Time {
        ANSWER_TIMEOUT.into()
    }

    fn arrival(
        &mut self,
        at: Time,
        (from, to): (NodeNumber, NodeNumber),
        _: Option<&Bytes>,
    ) -> Option<Time> {
        let delay = self.delay();
        (!self.is_cut(from, to)).then_some(at + delay)
    }

    /// A full buffer drops a message; a daemon that repeats a request sends a message twice.
    fn copies(&mut self, _: AssociationNumber, _: AssociationSide) -> usize {
        if !self.loses_messages {
            return 1;
        }
        match self.random.below(200) {
            0 => 0,
            1 => 2,
            _ => 1,
        }
    }

    fn handle_up(&mut self, number: AssociationNumber, side: AssociationSide) {
        let association = self.association(number);
        if let NodeRole::Registrar(index) = self.numbers.role(association.end(side)) {
            let dial = association.data.dial.filter(|_| side == 0);
            self.report_association_up(index, number, side, dial.map(|(dial, _)| dial));
        }
    }

    fn handle_lost(&mut self, number: AssociationNumber, side: AssociationSide, was_up: bool) {
        let association = self.association(number);
        match self.numbers.role(association.end(side)) {
            NodeRole::Registrar(index) => match association.data.dial {
                Some((dial, boot))
                    if side == 0 && !was_up && self.registrars[index].boot == boot =>
                {
                    self.feed(index, |machine, now| machine.handle_dial_failed(now, dial));
                }
                _ if was_up => self.feed(index, |machine, now| {
                    machine.handle_association_down(now, id_of(number));
                }),
                _ => {}
            },
            NodeRole::Element(index) => {
                if self.elements[index].home == Some(number) {
                    self.seek_registrar(index);
                }
            }
            NodeRole::User(_) => {}
        }
    }

    fn handle_message(
        &mut self,
        number: AssociationNumber,
        side: AssociationSide,
        message: &Bytes,
    ) {
        let association = self.association(number);
        let protocol = association.data.protocol;
        match self.numbers.role(association.end(side)) {
            NodeRole::Registrar(index) => self.feed(index, |machine, now| match protocol {
                PoolProtocol::Asap => machine.handle_asap(now, id_of(number), message),
                PoolProtocol::Enrp => machine.handle_enrp(now, id_of(number), message),
            }),
            NodeRole::Element(index) => self.on_element_message(index, number, message),
            NodeRole::User(_) => {}
        }
    }
}
