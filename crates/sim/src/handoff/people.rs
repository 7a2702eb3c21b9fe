//! Actions of operators, server programs and clients.

use super::node::{Entry, Node, Socket, State};
use super::world::World;
use crate::group::{World as _, change, id};
use crate::random::Random;
use holdfast_proto::handoff::{Drain, Request};
use holdfast_wire::{ChangeKind, Flow, NodeId};
use std::time::Duration;

impl World {
    /// An operator requests a handoff: of all flows of a node, or of some.
    pub(super) fn ask(&mut self, random: &mut Random) {
        let (node, to) = (
            random.below(self.nodes.len()),
            random.below(self.nodes.len()),
        );
        let everything = random.chance(0.7);
        let chosen = |flow: &&Flow| {
            let here = self.nodes[node].kernel.get(flow).is_some_and(Entry::speaks);
            (here && everything) || random.chance(0.1)
        };
        let flows: Vec<Flow> = self.flows.iter().filter(chosen).copied().collect();
        let drain = match random.below(3) {
            0 => Drain::No,
            1 => Drain::Yes,
            _ => Drain::Within(Duration::from_millis(3)),
        };
        self.hand(node, to, flows, drain);
    }

    pub(super) fn hand(&mut self, node: usize, to: usize, flows: Vec<Flow>, drain: Drain) {
        let now = Duration::from(self.core.now);
        let Some(machine) = self.core.daemons[node].machine.as_mut() else {
            return;
        };
        let request = Request {
            flows: flows.clone(),
            to: id(to),
            drain,
        };
        match machine.handle_request(now, request) {
            Ok(request) => {
                self.nodes[node].open.insert(request, flows);
            }
            Err(_) if node == to || flows.is_empty() => {}
            Err(error) => self.core.violated(format!("a request is refused: {error}")),
        }
        self.input(node, |_, _| {});
    }

    /// The server program processes a byte on each active connection.
    pub(super) fn serve(&mut self) {
        for flow in &self.flows {
            for node in &mut self.nodes {
                if node.kernel.get(flow).is_some_and(Entry::speaks)
                    && let Some(socket) = node.sockets.get_mut(flow)
                    && let Some(truth) = self.truths.get_mut(flow)
                {
                    socket.content += 1;
                    truth.content += 1;
                }
            }
        }
        self.core.dirty.extend(&self.flows);
    }

    /// A client and its server program close a connection.
    pub(super) fn close_flow(&mut self, flow: Flow) {
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            let Some(entry) = node.kernel.get_mut(&flow) else {
                continue;
            };
            if !entry.speaks() || !self.core.is_alive(index) {
                continue;
            }
            entry.state = State::Closing;
            let epoch = entry.epoch;
            node.sockets.remove(&flow);
            if let Some(truth) = self.truths.get_mut(&flow) {
                truth.alive = false;
            }
            self.core.count("closed");
            let report = vec![change(flow, ChangeKind::Remove, epoch)];
            self.input(index, |machine, now| machine.handle_changes(now, report));
        }
    }

    /// A client connects to a node, with addresses and ports that may have been used before.
    pub(super) fn connects(&mut self, node: usize) {
        let free = self.flows.iter().find(|flow| {
            let busy = |node: &Node| {
                let entry = node.kernel.get(flow);
                entry.is_some_and(|entry| entry.state != State::Moved)
            };
            !self.core.steering.contains_key(flow) && !self.nodes.iter().any(busy)
        });
        let Some(&flow) = free.filter(|_| self.core.is_alive(node)) else {
            return;
        };
        self.core.count("opened");
        let (state, epoch, peer) = (State::Owned, 0, NodeId(0));
        let of = &mut self.nodes[node];
        of.kernel.insert(flow, Entry { state, epoch, peer });
        let (content, restored) = (0, true);
        of.sockets.insert(flow, Socket { content, restored });
        let truth = self.truths.entry(flow).or_default();
        (truth.alive, truth.content) = (true, 0);
        let report = vec![change(flow, ChangeKind::Establish, 1)];
        self.input(node, |machine, now| machine.handle_changes(now, report));
    }
}
