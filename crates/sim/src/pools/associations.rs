//! Associations like SCTP's: ordered, reliable while they last, with a four-way handshake.

use super::node::{self, Node, Role};
use super::world::{Event, World};
use crate::time::Time;
use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::Link;
use holdfast_proto::registrar::{AssociationId, DialId, Protocol};
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

/// Size of the headers below a message, in bytes: IP, UDP, SCTP and its chunk.
const HEADERS: usize = 20 + 8 + 12 + 16;

/// An end of an association; 0 is the initiator.
pub(super) type Side = u8;

#[derive(Debug)]
pub(super) struct Association {
    pub(super) ends: [Node; 2],
    pub(super) protocol: Protocol,
    /// The initiator's name for the association.
    pub(super) name: Name,
    /// Arrival time of the last message that each end sent.
    last: [Time; 2],
    /// True for each end that knows the association.
    pub(super) up: [bool; 2],
    pub(super) open: bool,
    /// Messages that cannot be sent, in order, with their senders.
    held: Vec<(Side, Bytes)>,
    /// The transport's smoothed round trip time, in seconds.
    round_trip_s: f64,
}

impl Association {
    /// Returns the transport's smoothed round trip time.
    pub(super) fn round_trip(&self) -> Duration {
        Time::from_secs_f64(self.round_trip_s).into()
    }
}

/// The initiator's name for an association.
#[derive(Debug, Clone, Copy)]
pub(super) enum Name {
    Link(Link),
    Dial(DialId),
}

/// Returns the ID of an association at one of its ends, for a registrar there.
pub(super) fn id(association: u32, side: Side) -> AssociationId {
    AssociationId(u64::from(association) * 2 + u64::from(side))
}

/// Returns the association and the end of an ID: the inverse of [`id`].
pub(super) fn of_id(id: AssociationId) -> (u32, Side) {
    ((id.0 / 2) as u32, (id.0 % 2) as Side)
}

pub(super) fn encoded(message: &Message) -> Bytes {
    let mut buffer = BytesMut::with_capacity(128);
    // Every message of the state machines has an encoding.
    let _ = message.encode(&mut buffer);
    buffer.freeze()
}

impl World<'_> {
    /// Starts an association; `up` or `lost` follows.
    pub(super) fn connect(&mut self, from: Node, to: Node, protocol: Protocol, name: Name) -> u32 {
        let association = self.associations.len() as u32;
        let mut new = Association {
            ends: [from, to],
            protocol,
            name,
            last: [Time::ZERO; 2],
            up: [false; 2],
            open: true,
            held: Vec::new(),
            round_trip_s: 0.0,
        };
        let mut at = Some(self.now);
        let mut ways = [Time::ZERO; 4];
        for (way, arrival) in ways.iter_mut().enumerate() {
            let ends = if way % 2 == 0 { (from, to) } else { (to, from) };
            at = at.and_then(|at| self.arrival(at, ends, 0));
            *arrival = at.unwrap_or_default();
        }
        if at.is_none() {
            let timeout = self.now + self.config.association_timeout.into();
            self.queue.push(
                timeout,
                Event::Lost {
                    association,
                    side: 0,
                },
            );
        } else if self.is_alive(to) {
            new.last = [ways[2], ways[3]];
            new.round_trip_s = (ways[1] - self.now).as_secs_f64();
            self.queue.push(
                ways[2],
                Event::Up {
                    association,
                    side: 1,
                },
            );
            self.queue.push(
                ways[3],
                Event::Up {
                    association,
                    side: 0,
                },
            );
        } else {
            self.queue.push(
                ways[1],
                Event::Lost {
                    association,
                    side: 0,
                },
            );
        }
        self.associations.push(new);
        association
    }

    fn arrival(&mut self, at: Time, (from, to): (Node, Node), bytes: usize) -> Option<Time> {
        let way = (self.nodes.zone(from), self.nodes.zone(to));
        let bytes = bytes + HEADERS;
        self.network.reliable(&mut self.random, at, way, bytes)
    }

    /// Returns the arrival time of a message between a user and an element that is sent at `at`; none if it does not
    /// arrive.
    pub(super) fn way_at(&mut self, at: Time, from: Node, to: Node) -> Option<Time> {
        self.arrival(at, (from, to), 0)
    }

    #[inline]
    pub(super) fn send(&mut self, association: u32, side: Side, message: Bytes) {
        let known = &self.associations[association as usize];
        if !known.open {
            return;
        }
        let message = match self.config.bug {
            None => message,
            Some(bug) => match bug.sent(known.protocol, message) {
                Some(message) => message,
                None => return,
            },
        };
        let (from, to) = (usize::from(side), usize::from(1 - side));
        let ends = (known.ends[from], known.ends[to]);
        let arrival = match known.held.is_empty() {
            true => self.arrival(self.now, ends, message.len()),
            false => None,
        };
        let known = &mut self.associations[association as usize];
        let Some(arrival) = arrival else {
            if known.held.is_empty() {
                let timeout = self.now + self.config.association_timeout.into();
                self.queue.push(timeout, Event::Break { association });
            }
            return known.held.push((side, message));
        };
        let arrival = arrival.max(known.last[from]);
        known.last[from] = arrival;
        let side = 1 - side;
        let deliver = Event::Deliver {
            association,
            side,
            message,
        };
        self.queue.push(arrival, deliver);
    }

    /// Sends the held messages that can be sent again.
    pub(super) fn send_held(&mut self) {
        for association in 0..self.associations.len() {
            let held = std::mem::take(&mut self.associations[association].held);
            for (side, message) in held {
                self.send(association as u32, side, message);
            }
        }
    }

    /// Ends an association after a timeout without arrivals: both ends give up.
    pub(super) fn break_up(&mut self, association: u32) {
        let known = &mut self.associations[association as usize];
        if !known.open || known.held.is_empty() {
            return;
        }
        known.open = false;
        for side in [0, 1] {
            self.queue.push(self.now, Event::Lost { association, side });
        }
    }

    /// Ends an association because one end closes it or dies; the other end is notified.
    pub(super) fn close(&mut self, association: u32, side: Side) {
        let known = &mut self.associations[association as usize];
        if !known.open {
            return;
        }
        known.open = false;
        known.up[usize::from(side)] = false;
        let other = usize::from(1 - side);
        let ends = (known.ends[usize::from(side)], known.ends[other]);
        let last = known.last[usize::from(side)];
        // Messages sent earlier still arrive.
        let arrival = self.arrival(self.now, ends, 0);
        let timeout = self.now + self.config.association_timeout.into();
        let at = arrival.unwrap_or(timeout).max(last);
        let side = other as Side;
        self.queue.push(at, Event::Lost { association, side });
    }

    /// Ends all associations of a node that dies.
    pub(super) fn close_all(&mut self, node: Node) {
        for association in 0..self.associations.len() {
            let ends = self.associations[association].ends;
            if let Some(side) = ends.iter().position(|end| *end == node) {
                self.close(association as u32, side as Side);
            }
        }
    }

    /// Handles the step of the handshake at which this end has the association.
    pub(super) fn up(&mut self, association: u32, side: Side) {
        let known = &mut self.associations[association as usize];
        if !known.open {
            return;
        }
        known.up[usize::from(side)] = true;
        let (node, other) = (
            known.ends[usize::from(side)],
            known.ends[usize::from(1 - side)],
        );
        let (protocol, name) = (known.protocol, known.name);
        match (self.nodes.role(node), name) {
            (Role::Registrar(index), name) => {
                let dial = match name {
                    Name::Dial(dial) if side == 0 => Some(dial),
                    _ => None,
                };
                let at = node::endpoint(other, protocol);
                let id = id(association, side);
                self.directory
                    .insert((node, other, protocol), (association, side));
                self.registrar(index, |machine, now| {
                    machine.handle_up(now, id, protocol, &[at], dial);
                });
            }
            (Role::Element(index), Name::Link(link)) if side == 0 => {
                self.element(index, |machine, now| machine.handle_connected(now, link));
            }
            (Role::User(index), Name::Link(link)) => {
                self.user(index, |machine, now| machine.handle_connected(now, link));
            }
            _ => {}
        }
    }

    /// Notifies an end that the association has ended, or was never established.
    pub(super) fn lost(&mut self, association: u32, side: Side) {
        let known = &mut self.associations[association as usize];
        let was_up = std::mem::replace(&mut known.up[usize::from(side)], false);
        known.open = false;
        let (node, other) = (
            known.ends[usize::from(side)],
            known.ends[usize::from(1 - side)],
        );
        let (protocol, name) = (known.protocol, known.name);
        match (self.nodes.role(node), name) {
            (Role::Registrar(index), Name::Dial(dial)) if side == 0 && !was_up => {
                self.registrar(index, |machine, now| machine.handle_dial_failed(now, dial));
            }
            (Role::Registrar(index), _) if was_up => {
                let id = id(association, side);
                let key = (node, other, protocol);
                if self.directory.get(&key) == Some(&(association, side)) {
                    self.directory.remove(&key);
                }
                self.registrar(index, |machine, now| machine.handle_down(now, id));
            }
            (Role::Element(index), Name::Link(link)) if side == 0 => {
                self.element(index, |machine, now| machine.handle_lost(now, link));
            }
            (Role::Element(index), _) => {
                let link = Link::Theirs(u64::from(association));
                self.element(index, |machine, now| machine.handle_lost(now, link));
            }
            (Role::User(index), Name::Link(link)) => {
                self.user(index, |machine, now| machine.handle_lost(now, link));
            }
            _ => {}
        }
    }

    /// Handles the arrival of a message.
    #[inline]
    pub(super) fn deliver(&mut self, association: u32, side: Side, message: &Bytes) {
        let known = &self.associations[association as usize];
        if !known.up[usize::from(side)] {
            return;
        }
        let (node, protocol, name) = (known.ends[usize::from(side)], known.protocol, known.name);
        match self.nodes.role(node) {
            Role::Registrar(index) => {
                self.feel_round_trip(association);
                let id = id(association, side);
                self.registrar(index, |machine, now| match protocol {
                    Protocol::Asap => machine.handle_asap(now, id, message),
                    Protocol::Enrp => machine.handle_enrp(now, id, message),
                });
            }
            Role::Element(index) => {
                let Ok(parsed) = Message::parse(message) else {
                    return;
                };
                let link = match name {
                    Name::Link(link) => link,
                    Name::Dial(_) => Link::Theirs(u64::from(association)),
                };
                self.element(index, |machine, now| {
                    machine.handle_message(now, link, parsed.message)
                });
            }
            Role::User(index) => {
                let (Ok(parsed), Name::Link(link)) = (Message::parse(message), name) else {
                    return;
                };
                self.user(index, |machine, now| {
                    machine.handle_message(now, link, parsed.message)
                });
            }
        }
    }

    /// Updates the transport's estimate if delays vary (RFC 9260 section 6.3.1: an eighth of each new measurement).
    fn feel_round_trip(&mut self, association: u32) {
        if !self.delays_vary {
            return;
        }
        let [a, b] = self.associations[association as usize].ends;
        let way = (self.nodes.zone(a), self.nodes.zone(b));
        let measured = self.network.round_trip(&mut self.random, way).as_secs_f64();
        let known = &mut self.associations[association as usize];
        known.round_trip_s += (measured - known.round_trip_s) / 8.0;
    }
}
