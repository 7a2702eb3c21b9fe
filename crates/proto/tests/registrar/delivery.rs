//! Delivery of the registrars' outputs.

use crate::fault::Fault;
use crate::net::{NodeIndex, address, node_at};
use crate::world::{World, WorldEvent};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Output, PoolProtocol};
use std::net::SocketAddr;
use std::time::Duration;

impl World {
    pub fn carry_out(&mut self, node: usize, output: Output) {
        match output {
            Output::Send {
                to,
                protocol,
                message,
            } => self.send_from(node, to, protocol, message),
            Output::SendMany {
                to,
                protocol,
                message,
            } => {
                for to in to.iter() {
                    self.send_from(node, *to, protocol, message.clone());
                }
            }
            Output::Connect {
                dial,
                protocol,
                addresses,
            } => {
                if self.fault != Fault::NoSupervision || protocol != PoolProtocol::Asap {
                    self.connect(node, dial, protocol, addresses[0]);
                }
            }
            Output::Multicast { protocol, message } => self.multicast(node, protocol, message),
            Output::Measure(_) => {}
            Output::Abort(association) => panic!("{association:?} was aborted"),
            Output::Event(event) => self.record_event(node, event),
        }
    }

    fn connect(&mut self, node: usize, dial: DialId, protocol: PoolProtocol, at: SocketAddr) {
        let to = node_of(at, self.nodes.len());
        let after = if self.is_up(to) && self.network.is_cut(node, to) {
            // No host answers, not even with a refusal.
            Duration::from_secs(2)
        } else {
            self.delay()
        };
        let boot = self.nodes[node].boot;
        let event = WorldEvent::Dialled {
            node,
            boot,
            dial,
            to,
            protocol,
        };
        self.schedule(after, event);
    }

    fn multicast(&mut self, node: usize, protocol: PoolProtocol, message: Bytes) {
        let Some(bytes) = self.fault.apply_to_registrar_message(protocol, message) else {
            return;
        };
        for to in (0..self.nodes.len()).filter(|to| *to != node) {
            let lost = self.loses_messages && self.rng.percent(20);
            for _ in 0..1 + u32::from(self.rng.percent(5)) {
                if !lost && !self.network.is_cut(node, to) {
                    let (from, bytes) = (node, bytes.clone());
                    let after = self.delay();
                    let event = WorldEvent::Datagram {
                        to,
                        from,
                        protocol,
                        bytes,
                    };
                    self.schedule(after, event);
                }
            }
        }
    }

    pub fn delay(&mut self) -> Duration {
        let slow = self.loses_messages && self.rng.percent(5);
        let max = if slow { 300_000 } else { 5_000 };
        Duration::from_micros(self.rng.range(200, max))
    }

    fn send_from(
        &mut self,
        node: usize,
        to: AssociationId,
        protocol: PoolProtocol,
        message: Bytes,
    ) {
        if let Some(message) = self.fault.apply_to_registrar_message(protocol, message) {
            self.send(node, to.0, message);
        }
    }

    /// Puts a message on a link. A full buffer drops the message; a daemon that repeats a request sends it twice.
    pub fn send(&mut self, from: NodeIndex, link: u64, message: Bytes) {
        let copies = match self.rng.range(0, 200) {
            0 if self.loses_messages => 0,
            1 if self.loses_messages => 2,
            _ => 1,
        };
        let arrival = self.now + self.delay();
        let Some(known) = self.network.links.get_mut(&link) else {
            return;
        };
        let side = usize::from(known.ends[0] == from);
        if !known.open[1 - side] {
            return;
        }
        for _ in 0..copies {
            known.queues[side].push_back((arrival, message.clone()));
        }
        for _ in 0..copies {
            self.schedule(arrival - self.now, WorldEvent::Deliver { link, side });
        }
    }

    pub fn deliver(&mut self, link: u64, side: usize) {
        let now = self.now;
        let Some(known) = self.network.links.get_mut(&link) else {
            return;
        };
        let [a, b] = known.ends;
        if self.network.is_cut(a, b) {
            let retry_delay = Duration::from_millis(150);
            return self.schedule(retry_delay, WorldEvent::Deliver { link, side });
        }
        let Some(known) = self.network.links.get_mut(&link) else {
            return;
        };
        let (to, protocol) = (known.ends[side], known.protocol);
        let arrived = known.queues[side]
            .front()
            .is_some_and(|(ready, _)| *ready <= now);
        if !arrived {
            if let Some((ready, _)) = known.queues[side].front() {
                let after = *ready - now;
                self.schedule(after, WorldEvent::Deliver { link, side });
            }
            return;
        }
        let Some((_, message)) = known.queues[side].pop_front() else {
            return;
        };
        if !known.open[side] {
            return;
        }
        let association = AssociationId(link);
        if to < self.nodes.len() {
            self.feed(to, |machine, now| match protocol {
                PoolProtocol::Asap => machine.handle_asap(now, association, &message),
                PoolProtocol::Enrp => machine.handle_enrp(now, association, &message),
            });
        } else {
            self.on_element_message(to - self.nodes.len(), link, &message);
        }
    }
}

fn node_of(at: SocketAddr, registrars: usize) -> NodeIndex {
    let end = node_at(at);
    let is_element = address(end, registrars, PoolProtocol::Asap).port() == 5_000;
    assert_eq!(is_element, at.port() == 5_000);
    end
}
