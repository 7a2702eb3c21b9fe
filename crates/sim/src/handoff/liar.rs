//! A node that lies: it claims flows of other nodes in its reports, repeats complete reports with such claims, and asks
//! for changes of such flows. Its machines are unmodified and go on beside the lies.

use super::node::KernelFlowState;
use super::world::HandoffWorld;
use crate::node_group::{change, node_id};
use holdfast_proto::table_rebuild::Claim;
use holdfast_wire::flow_report_frames::FlowReportFrame;
use holdfast_wire::{ChangeKind, Epoch, Flow, Frame, OwnershipRecord, RecordState};
use std::collections::BTreeSet;

/// The node that lies, and its lies.
#[derive(Debug)]
pub(super) struct Liar {
    pub(super) node: usize,
    /// Flows of other nodes that the node has claimed. Their connections may be lost, and may not change hands.
    pub(super) claimed: BTreeSet<Flow>,
    /// Flows whose owners have asked for a transit to the liar, which may then decide about the flows.
    given: BTreeSet<Flow>,
    /// Number of frames made.
    frames: u64,
}

impl Liar {
    pub(super) fn new(node: usize) -> Liar {
        Liar {
            node,
            claimed: BTreeSet::new(),
            given: BTreeSet::new(),
            frames: 0,
        }
    }
}

impl HandoffWorld {
    /// Returns a node other than the liar that has a confirmed flow, and the flow's epoch there; none if the liar has an
    /// entry of the flow.
    pub(super) fn victim_of_liar(&self, flow: &Flow) -> Option<(usize, Epoch)> {
        let liar = self.liar.as_ref()?;
        let entry = |node: usize| self.nodes[node].kernel.get(flow);
        let has_entry =
            |node| entry(node).is_some_and(|entry| entry.state != KernelFlowState::Moved);
        if has_entry(liar.node) {
            return None;
        }
        (0..self.nodes.len()).find_map(|node| {
            let entry = entry(node).filter(|entry| entry.epoch > 0)?;
            // An acceptor decides about a flow that its donor gives it.
            let is_given =
                entry.state == KernelFlowState::Outgoing && entry.peer == node_id(liar.node);
            let is_own = matches!(
                entry.state,
                KernelFlowState::Owned | KernelFlowState::Prepared | KernelFlowState::Outgoing
            );
            (is_own && !is_given).then_some((node, entry.epoch))
        })
    }

    /// Returns claims of the liar to flows of other nodes, of another kind for each flow and time.
    fn lies(&self, draw: u64) -> Vec<Claim> {
        let Some(liar) = self.liar.as_ref().map(|liar| node_id(liar.node)) else {
            return Vec::new();
        };
        let lie = |flow: &Flow| {
            let (victim, epoch) = self.victim_of_liar(flow)?;
            let victim = node_id(victim);
            let record = match (draw + u64::from(flow.remote.port())) % 6 {
                0 => OwnershipRecord::owned(liar, epoch + 1_000),
                1 => OwnershipRecord::owned(liar, epoch),
                2 => OwnershipRecord::owned(liar, Epoch::MAX),
                3 => OwnershipRecord::transit(liar, victim, epoch + 1_000),
                4 => OwnershipRecord::transit(victim, liar, epoch + 1),
                _ => OwnershipRecord::owned(victim, epoch + 2),
            };
            Some((*flow, record))
        };
        self.flows.iter().filter_map(lie).collect()
    }

    /// Adds lies to the claims that the liar reports.
    pub(super) fn add_lies(&mut self, claims: &mut Vec<Claim>) {
        let mut lies = self.lies(self.rebuilds.view.epoch);
        if let Some(liar) = &mut self.liar {
            liar.claimed.extend(lies.iter().map(|(flow, _)| *flow));
            claims.append(&mut lies);
        }
    }

    /// Lets the liar send a report that nobody requested, and requests for changes of other nodes' flows.
    pub(super) fn lie_to_holder(&mut self) {
        let holder = self.core.holder;
        let Some(node) = self.liar.as_ref().map(|liar| liar.node) else {
            return;
        };
        if node == holder || !self.core.is_alive(node) {
            return;
        }
        let draw = self.core.now.0 / 1_000;
        let claims = self.lies(draw);
        let Some(liar) = &mut self.liar else { return };
        liar.claimed.extend(claims.iter().map(|(flow, _)| *flow));
        liar.frames += 1;
        let number = u64::MAX - liar.frames;
        let kind = match draw % 3 {
            0 => ChangeKind::Establish,
            1 => ChangeKind::Remove,
            _ => ChangeKind::Commit,
        };
        let changes = claims.iter().map(|(flow, record)| {
            let epoch = if kind == ChangeKind::Commit {
                record.epoch
            } else {
                Epoch::MAX
            };
            change(*flow, kind, epoch)
        });
        let request = Frame::ChangeRequest {
            request: number,
            changes: changes.collect(),
        };
        let report = FlowReportFrame::Report {
            term: self.rebuilds.view.epoch,
            report: number,
            part: 0,
            claims,
            is_last: true,
        };
        // Before, the lies are part of the report that the holder has requested.
        if self.rebuilds.is_table_complete {
            self.core.transmit(node, holder, &Frame::FlowReport(report));
        }
        self.core.transmit(node, holder, &request);
        self.core.count("lies sent");
    }

    /// Checks that the liar has not taken another node's flow.
    pub(super) fn check_liar(&mut self, flow: &Flow) -> Result<(), String> {
        let Some(liar) = &mut self.liar else {
            return Ok(());
        };
        let own = node_id(liar.node);
        let state = self.core.steering.get(flow).map(|record| record.state);
        if let Some(RecordState::Transit { donor, acceptor }) = state
            && acceptor == own
            && donor != own
        {
            liar.given.insert(*flow);
        }
        let Some(liar) = self.liar.as_ref().filter(|liar| !liar.given.contains(flow)) else {
            return Ok(());
        };
        let is_alive = self
            .expected_flows
            .get(flow)
            .is_some_and(|truth| truth.alive);
        let record = self
            .core
            .steering
            .get(flow)
            .filter(|_| is_alive && self.rebuilds.is_table_complete);
        let has_taken =
            record.is_some_and(|record| crate::node_group::sender(record) == node_id(liar.node));
        match self.victim_of_liar(flow) {
            Some((victim, _)) if has_taken && liar.node != self.core.holder => Err(format!(
                "node {} has taken {flow} of node {}",
                node_id(liar.node),
                node_id(victim)
            )),
            _ => Ok(()),
        }
    }
}
