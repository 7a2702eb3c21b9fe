//! Delivery of the registrars' outputs.

use crate::fault::Fault;
use crate::net::{End, address, end_at};
use crate::world::{What, World};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Output, Protocol};
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
                if self.fault != Fault::Careless || protocol != Protocol::Asap {
                    self.connect(node, dial, protocol, addresses[0]);
                }
            }
            Output::Multicast { protocol, message } => self.multicast(node, protocol, message),
            Output::Measure(_) => {}
            Output::Abort(association) => panic!("{association:?} was aborted"),
            Output::Event(event) => self.note(node, event),
        }
    }

    fn connect(&mut self, node: usize, dial: DialId, protocol: Protocol, at: SocketAddr) {
        let to = end_of(at, self.nodes.len());
        let after = if self.is_up(to) && self.net.is_cut(node, to) {
            // No host answers, not even with a refusal.
            Duration::from_secs(2)
        } else {
            self.delay()
        };
        let boot = self.nodes[node].boot;
        let what = What::Dialled {
            node,
            boot,
            dial,
            to,
            protocol,
        };
        self.at(after, what);
    }

    fn multicast(&mut self, node: usize, protocol: Protocol, message: Bytes) {
        let Some(bytes) = self.fault.sent(protocol, message) else {
            return;
        };
        for to in (0..self.nodes.len()).filter(|to| *to != node) {
            let lost = self.hostile && self.rng.percent(20);
            for _ in 0..1 + u32::from(self.rng.percent(5)) {
                if !lost && !self.net.is_cut(node, to) {
                    let (from, bytes) = (node, bytes.clone());
                    let after = self.delay();
                    let what = What::Datagram {
                        to,
                        from,
                        protocol,
                        bytes,
                    };
                    self.at(after, what);
                }
            }
        }
    }

    pub fn delay(&mut self) -> Duration {
        let slow = self.hostile && self.rng.percent(5);
        let max = if slow { 300_000 } else { 5_000 };
        Duration::from_micros(self.rng.range(200, max))
    }

    fn send_from(&mut self, node: usize, to: AssociationId, protocol: Protocol, message: Bytes) {
        if let Some(message) = self.fault.sent(protocol, message) {
            self.send(node, to.0, message);
        }
    }

    /// Puts a message on a link. A full buffer drops the message; a daemon that repeats a request sends it twice.
    pub fn send(&mut self, from: End, link: u64, message: Bytes) {
        let copies = match self.rng.range(0, 200) {
            0 if self.hostile => 0,
            1 if self.hostile => 2,
            _ => 1,
        };
        let ready = self.now + self.delay();
        let Some(known) = self.net.links.get_mut(&link) else {
            return;
        };
        let side = usize::from(known.ends[0] == from);
        if !known.open[1 - side] {
            return;
        }
        for _ in 0..copies {
            known.queues[side].push_back((ready, message.clone()));
        }
        for _ in 0..copies {
            self.at(ready - self.now, What::Deliver { link, side });
        }
    }

    pub fn deliver(&mut self, link: u64, side: usize) {
        let now = self.now;
        let Some(known) = self.net.links.get_mut(&link) else {
            return;
        };
        let [a, b] = known.ends;
        if self.net.is_cut(a, b) {
            let again = Duration::from_millis(150);
            return self.at(again, What::Deliver { link, side });
        }
        let Some(known) = self.net.links.get_mut(&link) else {
            return;
        };
        let (to, protocol) = (known.ends[side], known.protocol);
        let arrived = known.queues[side]
            .front()
            .is_some_and(|(ready, _)| *ready <= now);
        if !arrived {
            if let Some((ready, _)) = known.queues[side].front() {
                let after = *ready - now;
                self.at(after, What::Deliver { link, side });
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
                Protocol::Asap => machine.handle_asap(now, association, &message),
                Protocol::Enrp => machine.handle_enrp(now, association, &message),
            });
        } else {
            self.element_hears(to - self.nodes.len(), link, &message);
        }
    }
}

fn end_of(at: SocketAddr, registrars: usize) -> End {
    let end = end_at(at);
    let is_element = address(end, registrars, Protocol::Asap).port() == 5_000;
    assert_eq!(is_element, at.port() == 5_000);
    end
}
