//! The invariants after every step, and at the end.

use super::node::KernelFlowState;
use super::world::HandoffWorld;
use crate::node_group::{node_id, node_index, sender};
use holdfast_proto::flow_ownership::is_disputed;
use holdfast_wire::{Flow, OwnershipRecord, RecordState};

impl HandoffWorld {
    pub(super) fn check_changed_flows(&mut self) -> Result<(), String> {
        while let Some(flow) = self.core.changed_flows.pop() {
            self.check_flow(flow)?;
        }
        Ok(())
    }

    /// Checks that only the node in the holder's record may send, and has every byte of the flow, and that epochs only
    /// grow.
    fn check_flow(&mut self, flow: Flow) -> Result<(), String> {
        let Some(truth) = self.expected_flows.get_mut(&flow) else {
            return Ok(());
        };
        let record = self.core.steering.get(&flow).copied();
        // Several nodes claim the flow, and a report that explains why may be missing. The record may come back then.
        let is_undecided = record.is_some_and(is_disputed);
        let record = record.filter(|_| !is_undecided);
        let is_claimed = (self.liar.as_ref()).is_some_and(|liar| liar.claimed.contains(&flow));
        if record != truth.record && !is_claimed && !is_undecided {
            if let Some(record) = record {
                // A holder that crashes before its table is complete forgets removals.
                if record.epoch <= truth.epoch && truth.alive {
                    return Err(format!(
                        "the epoch of {flow} did not grow: was {}, is {record}",
                        truth.epoch
                    ));
                }
                truth.epoch = record.epoch;
            }
            truth.record = record;
        }
        let is_alive = truth.alive;
        let may_send = |node: &usize| {
            let entry = self.nodes[*node].kernel.get(&flow);
            entry.is_some_and(|entry| entry.may_send())
        };
        // Nothing keeps a liar from sending for a flow that it claims.
        let liar = (self.liar.as_ref()).filter(|liar| liar.claimed.contains(&flow));
        let is_liar = |node: &usize| liar.is_some_and(|liar| liar.node == *node);
        let nodes = (0..self.nodes.len()).filter(|node| !is_liar(node));
        let senders: Vec<usize> = nodes.filter(may_send).collect();
        self.check_liar(&flow)?;
        match senders[..] {
            [] => Ok(()),
            [_] if is_claimed => Ok(()),
            [_] if !is_alive => Ok(()),
            [node] => self.check_sender(flow, node, record),
            _ => Err(format!("{} nodes may send for {flow}", senders.len())),
        }
    }

    fn check_sender(
        &self,
        flow: Flow,
        at: usize,
        record: Option<OwnershipRecord>,
    ) -> Result<(), String> {
        let node = &self.nodes[at];
        let entry = &node.kernel[&flow];
        match record {
            // Reports are missing.
            _ if !self.rebuilds.is_table_complete => {}
            Some(record) if node_index(sender(&record)) != at => {
                return Err(format!(
                    "node {} may send for {flow} ({entry:?}), but the flow is {record}",
                    node_id(at)
                ));
            }
            None if entry.epoch != 0 => return Err(format!("{flow} may send without a record")),
            _ => {}
        }
        let content = self
            .expected_flows
            .get(&flow)
            .map_or(0, |truth| truth.content);
        match node.sockets.get(&flow) {
            None => Err(format!("{flow} may send without a socket")),
            Some(socket) if !socket.restored => {
                Err(format!("{flow} may send without restored state"))
            }
            Some(socket) if socket.content != content => {
                let at = node_id(at);
                Err(format!("{flow} lost or repeated bytes at node {at}"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks the state after all faults have ended and time has passed.
    pub(super) fn check_idle_state(&mut self) -> Result<(), String> {
        for (at, node) in self.nodes.iter().enumerate() {
            if !node.pending.is_empty() {
                return Err(format!(
                    "node {} has not reported outcomes of {:?}",
                    node_id(at),
                    node.pending
                ));
            }
        }
        for flow in self.flows.clone() {
            self.check_flow(flow)?;
            // A flow that the liar claims may be lost.
            if (self.liar.as_ref()).is_none_or(|liar| !liar.claimed.contains(&flow)) {
                self.check_owner(flow)?;
            }
        }
        Ok(())
    }

    /// Checks that a live flow has one owner, which serves it, and that a closed flow has left nothing.
    fn check_owner(&self, flow: Flow) -> Result<(), String> {
        let alive = self
            .expected_flows
            .get(&flow)
            .is_some_and(|truth| truth.alive);
        let record = self.core.steering.get(&flow);
        let owner = record.and_then(|record| match record.state {
            RecordState::Owned { owner } => Some((node_index(owner), record.epoch)),
            RecordState::Transit { .. } => None,
        });
        let entries = self.nodes.iter().enumerate().filter_map(|(node, of)| {
            let entry = of.kernel.get(&flow)?;
            (entry.state != KernelFlowState::Moved).then_some((node, *entry))
        });
        let entries: Vec<_> = entries.collect();
        if !alive {
            // An establish that overtakes a removal, which no real channel allows, leaves a record.
            let leftover = self.core.was_hostile && owner.is_some();
            if (record.is_some() && !leftover) || !entries.is_empty() {
                return Err(format!(
                    "closed flow {flow} still has record {record:?} and entries {entries:?}"
                ));
            }
            return Ok(());
        }
        match entries[..] {
            [(node, entry)]
                if entry.state == KernelFlowState::Owned && Some((node, entry.epoch)) == owner =>
            {
                Ok(())
            }
            _ => Err(format!(
                "{flow} has record {record:?} and entries {entries:?}"
            )),
        }
    }
}
