//! How frames travel between daemons, and how channels break and come back.

use crate::fault::Fault;
use crate::node::State;
use crate::world::{What, World, id};
use holdfast_wire::{Flow, Frame};
use std::time::Duration;

impl World {
    pub fn send(&mut self, from: usize, to: usize, frame: Frame) {
        assert_ne!(from, to, "seed {}: a frame to oneself", self.seed);
        if let Frame::Ask { request, changes } = &frame {
            self.asks(from, changes);
            let life = self.nodes[from].life;
            let again = !self.asked.insert((from, life, *request));
            if again && self.fault == Fault::AsksOnce {
                return;
            }
        }
        let frame = if self.fault == Fault::DoneLies {
            lie(frame)
        } else {
            frame
        };
        if !self.net.channel(from, to).up {
            return;
        }
        let copies = match self.hostile {
            true if self.rng.percent(3) => 0,
            true if self.rng.percent(3) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let slow = if self.trouble(3) { 200_000 } else { 600 };
            let mut arrival = self.now + self.micros(50, slow);
            let in_order = !(self.hostile && self.rng.percent(5));
            let channel = self.net.channel(from, to);
            let life = channel.life;
            if in_order {
                let last = &mut channel.last[usize::from(from > to)];
                arrival = arrival.max(*last);
                *last = arrival;
            }
            let frame = frame.clone();
            self.at(
                arrival - self.now,
                What::Deliver {
                    from,
                    to,
                    life,
                    frame,
                },
            );
        }
    }

    pub fn deliver(&mut self, from: usize, to: usize, life: u64, frame: Frame) {
        let channel = self.net.channel(from, to);
        if !channel.up || channel.life != life {
            return;
        }
        if self.fault == Fault::ClosesEarly && matches!(frame, Frame::Prepared { .. }) {
            let entries = self.nodes[to].kernel.iter();
            let prepared = entries.filter(|(_, entry)| entry.state == State::Prepared);
            let prepared: Vec<Flow> = prepared.map(|(flow, _)| *flow).collect();
            for flow in prepared {
                self.nodes[to].close(flow, id(from));
            }
        }
        self.input(to, |machine, now| {
            machine.handle_frame(now, id(from), frame)
        });
    }

    pub fn break_channel(&mut self, a: usize, b: usize, slow: u64) {
        let channel = self.net.channel(a, b);
        if !channel.up {
            return;
        }
        channel.up = false;
        channel.life += 1;
        channel.unaware = vec![a, b];
        for (node, peer) in [(a, b), (b, a)] {
            let delay = self.micros(10, slow);
            self.at(delay, What::Lost { node, peer });
        }
        self.at(Duration::from_millis(5), What::Connect { a, b });
    }

    pub fn learn_lost(&mut self, node: usize, peer: usize) {
        self.net
            .channel(node, peer)
            .unaware
            .retain(|other| *other != node);
        self.input(node, |machine, now| machine.handle_peer_lost(now, id(peer)));
    }

    pub fn connect(&mut self, a: usize, b: usize) {
        let alive = self.nodes[a].machine.is_some() && self.nodes[b].machine.is_some();
        let channel = self.net.channel(a, b);
        if channel.up || channel.cut || !alive {
            return;
        }
        if !channel.unaware.is_empty() {
            return self.at(Duration::from_millis(10), What::Connect { a, b });
        }
        channel.up = true;
        channel.last = [self.now; 2];
        for (node, peer) in [(a, b), (b, a)] {
            self.input(node, |machine, now| {
                machine.handle_peer_connected(now, id(peer))
            });
        }
    }
}

/// Says that all moved. The donor's own epochs are not known here; one that is refused is enough.
fn lie(frame: Frame) -> Frame {
    match frame {
        Frame::Done {
            batch,
            results,
            times,
        } => {
            let best = results.iter().flatten().max().copied().unwrap_or(3);
            let results = results.into_iter().map(|result| Ok(result.unwrap_or(best)));
            let results = results.collect();
            Frame::Done {
                batch,
                results,
                times,
            }
        }
        frame => frame,
    }
}
