//! How frames travel between daemons, and how channels break and come back.

use crate::fault::Fault;
use crate::world::{What, World, id};
use holdfast_wire::migration::MoveFrame;
use holdfast_wire::{Change, ChangeKind, Frame};
use std::time::Duration;

impl World {
    pub fn send(&mut self, from: usize, to: usize, frame: Frame) {
        assert_ne!(from, to, "seed {}: a frame to oneself", self.seed);
        let life = self.hosts[from].life;
        match &frame {
            Frame::Ask { request, changes } => {
                let changes = changes.clone();
                let again = !self.asked.insert((from, life, *request));
                self.asks(from, &changes);
                if again && self.fault == Fault::AsksOnce {
                    return;
                }
            }
            Frame::Move { id, frame } => {
                let (id, frame) = (*id, frame.clone());
                if self.bent(from, to, id, &frame) {
                    return;
                }
            }
            _ => {}
        }
        if !self.net.channel(from, to).up {
            return;
        }
        let frame = match self.fault {
            Fault::DoneLies => lied(frame),
            _ => frame,
        };
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
            let what = What::Deliver {
                from,
                to,
                life,
                frame,
            };
            self.at(arrival - self.now, what);
        }
    }

    /// The machine asks the holder: where the faults that do not wait for the answer come in.
    pub fn asks(&mut self, node: usize, changes: &[Change]) {
        let process = changes.iter().find_map(|change| {
            let deciding = matches!(change.kind, ChangeKind::Commit | ChangeKind::Rollback);
            Some((change.flow.move_id().filter(|_| deciding)?, change.kind))
        });
        match (self.fault, process) {
            (Fault::GoesBeforeCommitted, Some((id, ChangeKind::Commit))) => {
                self.start(node, id, &[]);
            }
            (Fault::ThawsUnasked, Some((id, ChangeKind::Rollback))) => self.thaw(node, id),
            _ => {}
        }
    }

    /// Faults of what is said about moves; whether the frame is not sent.
    fn bent(
        &mut self,
        from: usize,
        to: usize,
        id: holdfast_wire::MoveId,
        frame: &MoveFrame,
    ) -> bool {
        let life = self.hosts[from].life;
        match frame {
            MoveFrame::Final { .. } if self.fault == Fault::ReleasesEarly => {
                self.release(from, id);
                false
            }
            MoveFrame::Translate { step, .. } if self.fault == Fault::TellsOnce => {
                !self.told.insert((from, life, id, to, *step as u8))
            }
            _ => false,
        }
    }

    pub fn deliver(&mut self, from: usize, to: usize, life: u64, frame: Frame) {
        let channel = self.net.channel(from, to);
        if !channel.up || channel.life != life || self.hosts[to].machine.is_none() {
            return;
        }
        match frame {
            Frame::Ask { request, changes } => {
                assert_eq!(to, self.holder, "only the holder arbitrates");
                let results = self.arbitrate(id(from), &changes);
                self.send(to, from, Frame::Answer { request, results });
            }
            Frame::Query { request, flows } => {
                let records = flows.iter().map(|flow| self.steering.get(flow).copied());
                let records = records.collect();
                self.send(to, from, Frame::QueryAnswer { request, records });
            }
            frame => self.input(to, |machine, now| {
                machine.handle_frame(now, id(from), frame);
            }),
        }
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
        let channel = self.net.channel(node, peer);
        channel.unaware.retain(|other| *other != node);
        self.input(node, |machine, now| machine.handle_peer_lost(now, id(peer)));
    }

    pub fn connect(&mut self, a: usize, b: usize) {
        let alive = self.hosts[a].machine.is_some() && self.hosts[b].machine.is_some();
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
                machine.handle_peer_connected(now, id(peer));
            });
        }
    }
}

/// The frame, or if it says how a move has ended, one that says that all is well.
fn lied(frame: Frame) -> Frame {
    match frame {
        Frame::Move {
            id,
            frame: MoveFrame::Done { times, steps, .. },
        } => {
            let result = Ok(3);
            let frame = MoveFrame::Done {
                result,
                times,
                steps,
            };
            Frame::Move { id, frame }
        }
        frame => frame,
    }
}
