//! What operators, server programs and clients do.

use crate::node::{Entry, Node, Socket, State};
use crate::world::{World, change, id};
use holdfast_proto::handoff::{Drain, Request};
use holdfast_wire::{ChangeKind, Flow, NodeId};
use std::time::Duration;

impl World {
    pub fn request(&mut self) {
        let node = self.rng.index(self.nodes.len());
        let to = self.rng.index(self.nodes.len());
        let everything = self.rng.percent(70);
        let mut flows = Vec::new();
        for flow in self.flows.clone() {
            let here = self.nodes[node]
                .kernel
                .get(&flow)
                .is_some_and(Entry::speaks);
            if (here && everything) || self.rng.percent(10) {
                flows.push(flow);
            }
        }
        let drain = match self.rng.range(0, 3) {
            0 => Drain::No,
            1 => Drain::Yes,
            _ => Drain::Within(Duration::from_millis(3)),
        };
        let now = self.now;
        let Some(machine) = self.nodes[node].machine.as_mut() else {
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
            Err(_) => assert!(node == to || flows.is_empty(), "seed {}", self.seed),
        }
        self.input(node, |_, _| {});
    }

    /// An operator hands all flows of `node` to `to`.
    pub fn hand_all(&mut self, node: usize, to: usize) {
        let owned = |flow: &&Flow| self.nodes[node].kernel.get(flow).is_some_and(Entry::speaks);
        let flows: Vec<Flow> = self.flows.iter().filter(owned).copied().collect();
        let request = Request {
            flows: flows.clone(),
            to: id(to),
            drain: Drain::No,
        };
        let now = self.now;
        if let Some(machine) = self.nodes[node].machine.as_mut()
            && let Ok(request) = machine.handle_request(now, request)
        {
            self.nodes[node].open.insert(request, flows);
        }
        self.input(node, |_, _| {});
    }

    /// The server program does something on each connection it may.
    pub fn work(&mut self) {
        for flow in self.flows.clone() {
            for node in &mut self.nodes {
                if node.kernel.get(&flow).is_some_and(Entry::speaks)
                    && let Some(socket) = node.sockets.get_mut(&flow)
                    && let Some(truth) = self.truths.get_mut(&flow)
                {
                    socket.content += 1;
                    truth.content += 1;
                }
            }
            self.dirty.push(flow);
        }
    }

    /// A client and its server program close a connection.
    pub fn close(&mut self) {
        let flow = self.flows[self.rng.index(self.flows.len())];
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            let Some(entry) = node.kernel.get_mut(&flow) else {
                continue;
            };
            if !entry.speaks() || node.machine.is_none() {
                continue;
            }
            entry.state = State::Closing;
            let epoch = entry.epoch;
            node.sockets.remove(&flow);
            if let Some(truth) = self.truths.get_mut(&flow) {
                truth.alive = false;
            }
            self.count("closed");
            let report = vec![change(flow, ChangeKind::Remove, epoch)];
            self.input(index, |machine, now| machine.handle_changes(now, report));
        }
    }

    /// A client connects, with addresses and ports that may have been used before.
    pub fn open(&mut self) {
        let free = self.flows.iter().find(|flow| {
            let busy = |node: &Node| {
                node.kernel
                    .get(flow)
                    .is_some_and(|entry| entry.state != State::Moved)
            };
            !self.steering.contains_key(flow) && !self.nodes.iter().any(busy)
        });
        let Some(&flow) = free else {
            return;
        };
        let index = self.rng.index(self.nodes.len());
        if self.nodes[index].machine.is_none() {
            return;
        }
        self.count("opened");
        let (state, epoch, peer) = (State::Owned, 0, NodeId(0));
        self.nodes[index]
            .kernel
            .insert(flow, Entry { state, epoch, peer });
        let (content, restored) = (0, true);
        self.nodes[index]
            .sockets
            .insert(flow, Socket { content, restored });
        let truth = self.truths.entry(flow).or_default();
        truth.alive = true;
        truth.content = 0;
        let report = vec![change(flow, ChangeKind::Establish, 1)];
        self.input(index, |machine, now| machine.handle_changes(now, report));
    }
}
