//! Actions of operators, server programs and clients.

use super::node::{KernelFlowEntry, KernelFlowState, ServerSocket, SimulatedNode};
use super::world::{HandoffWorld, first_epoch};
use crate::node_group::{GroupWorld as _, change, node_id};
use crate::random::Random;
use holdfast_proto::handoff::{DrainPolicy, FlowHandoffRequest};
use holdfast_wire::{ChangeKind, Flow, NodeId};
use std::time::Duration;

impl HandoffWorld {
    /// An operator requests a handoff: of all flows of a node, or of some.
    pub(super) fn request_handoff(&mut self, random: &mut Random) {
        let (node, to) = (
            random.below(self.nodes.len()),
            random.below(self.nodes.len()),
        );
        let everything = random.chance(0.7);
        let chosen = |flow: &&Flow| {
            let is_owned_here = self.nodes[node]
                .kernel
                .get(flow)
                .is_some_and(KernelFlowEntry::may_send);
            (is_owned_here && everything) || random.chance(0.1)
        };
        let flows: Vec<Flow> = self.flows.iter().filter(chosen).copied().collect();
        let drain = match random.below(3) {
            0 => DrainPolicy::No,
            1 => DrainPolicy::Yes,
            _ => DrainPolicy::Within(Duration::from_millis(3)),
        };
        self.start_handoff(node, to, flows, drain);
    }

    pub(super) fn start_handoff(
        &mut self,
        node: usize,
        to: usize,
        flows: Vec<Flow>,
        drain: DrainPolicy,
    ) {
        let now = Duration::from(self.core.now);
        let Some(machine) = self.core.daemons[node].machine.as_mut() else {
            return;
        };
        let request = FlowHandoffRequest {
            flows: flows.clone(),
            to: node_id(to),
            drain,
        };
        match machine.handle_request(now, request) {
            Ok(request) => {
                self.nodes[node].pending.insert(request, flows);
            }
            Err(_) if node == to || flows.is_empty() => {}
            Err(error) => self
                .core
                .set_violation(format!("a request is refused: {error}")),
        }
        self.drive_machine(node, |_, _| {});
    }

    /// The server program processes a byte on each active connection.
    pub(super) fn serve(&mut self) {
        for flow in &self.flows {
            for node in &mut self.nodes {
                if node.kernel.get(flow).is_some_and(KernelFlowEntry::may_send)
                    && let Some(socket) = node.sockets.get_mut(flow)
                    && let Some(truth) = self.expected_flows.get_mut(flow)
                {
                    socket.content += 1;
                    truth.content += 1;
                }
            }
        }
        self.core.changed_flows.extend(&self.flows);
    }

    /// A client and its server program close a connection.
    pub(super) fn close_flow(&mut self, flow: Flow) {
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            let Some(entry) = node.kernel.get_mut(&flow) else {
                continue;
            };
            if !entry.may_send() || !self.core.is_alive(index) {
                continue;
            }
            entry.state = KernelFlowState::Closing;
            let epoch = entry.epoch;
            node.sockets.remove(&flow);
            if let Some(truth) = self.expected_flows.get_mut(&flow) {
                truth.alive = false;
            }
            self.core.count("closed");
            let report = vec![change(flow, ChangeKind::Remove, epoch)];
            self.drive_machine(index, |machine, now| machine.handle_changes(now, report));
        }
    }

    /// The client resets a connection that has come back after its end: a donor that was not told of the end of its
    /// handoff resumed the connection, because two holders lost their tables.
    pub(super) fn reset_closed_flow(&mut self, index: usize, flow: Flow) {
        let is_alive = self
            .expected_flows
            .get(&flow)
            .is_some_and(|truth| truth.alive);
        let node = &mut self.nodes[index];
        let Some(entry) = node.kernel.get_mut(&flow).filter(|entry| entry.may_send()) else {
            return;
        };
        if is_alive {
            return;
        }
        self.core.count("closed flow came back");
        entry.state = KernelFlowState::Closing;
        let report = vec![change(flow, ChangeKind::Remove, entry.epoch)];
        node.sockets.remove(&flow);
        self.drive_machine(index, |machine, now| machine.handle_changes(now, report));
    }

    /// A client connects to a node, with addresses and ports that may have been used before.
    pub(super) fn connect_client(&mut self, node: usize) {
        let free = self.flows.iter().find(|flow| {
            let busy = |node: &SimulatedNode| {
                let entry = node.kernel.get(flow);
                entry.is_some_and(|entry| entry.state != KernelFlowState::Moved)
            };
            !self.core.steering.contains_key(flow) && !self.nodes.iter().any(busy)
        });
        let Some(&flow) = free.filter(|_| self.core.is_alive(node)) else {
            return;
        };
        self.core.count("opened");
        let (state, epoch, peer) = (KernelFlowState::Owned, 0, NodeId(0));
        let flow_node = &mut self.nodes[node];
        flow_node
            .kernel
            .insert(flow, KernelFlowEntry { state, epoch, peer });
        let (content, restored) = (0, true);
        flow_node
            .sockets
            .insert(flow, ServerSocket { content, restored });
        let truth = self.expected_flows.entry(flow).or_default();
        (truth.alive, truth.content) = (true, 0);
        let start = first_epoch(self.core.now);
        let report = vec![change(flow, ChangeKind::Establish, start)];
        self.drive_machine(node, |machine, now| machine.handle_changes(now, report));
    }
}
