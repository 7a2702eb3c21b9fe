//! Recovery after a restart, from the maps that an earlier daemon left.
//!
//! For flows in the middle of a handoff, the machine asks the holder for their fate and issues the commands that
//! follow. Their sockets are with the server programs, which reconnect and reclaim them ([`super::flow_reclaim`]) before or
//! after the holder's answer. Steps that need no socket are done at once, the others when the program has reclaimed the
//! socket.

use std::collections::BTreeSet;

use holdfast_bpf::shared_with_c::{FlowState, FlowValue};
use holdfast_proto::handoff::{FlowEpoch, RecoveredFlow, RecoveredFlowRole};
use holdfast_sys::sock_diag;
use holdfast_wire::failure::Failure;
use holdfast_wire::{ChangeKind, Flow, NodeId, OwnershipChange, Protocol};

use super::Engine;
use super::recovered_flows::RecoveryVerdict;
use crate::dataplane::FilterEntry;
use crate::failure_conversion::IntoFailure;

impl Engine {
    /// Reports the state of the maps to the machine.
    pub(super) fn recover(&mut self) {
        let mut in_handoff = Vec::new();
        let mut changes = Vec::new();
        let migrating_flows = self.migrations.recorded_flows();
        self.deliver_flushing_flows();
        for (flow, state, value) in self.dataplane.flows() {
            let recovered_flow = to_recovered_flow(&flow, state, &value);
            if let Some(recovered_flow) =
                recovered_flow.filter(|_| !migrating_flows.contains(&flow))
            {
                let slot = match recovered_flow.role {
                    RecoveredFlowRole::Acceptor => self.hold_recovered(&recovered_flow),
                    _ => 0,
                };
                self.recovered.add(flow, slot);
                in_handoff.push(recovered_flow);
            }
            // The holder may have missed the flow's report; it ignores known flows.
            changes.extend(self.missed_change(flow, state, value.epoch));
        }
        changes.extend(self.remove_closed_flows());
        let handoff_flows: BTreeSet<Flow> = in_handoff
            .iter()
            .map(|recovered_flow| recovered_flow.flow)
            .collect();
        let journal = self.arrivals.journal();
        for flow in journal.earlier_flows() {
            if !handoff_flows.contains(&flow) {
                journal.remove(&flow);
            }
        }
        let now = self.now();
        if !in_handoff.is_empty() {
            tracing::warn!(
                flows = in_handoff.len(),
                "recovering flows from handoffs of an earlier daemon"
            );
            self.machine.handle_recovered(now, in_handoff);
        }
        if !changes.is_empty() {
            self.machine.handle_changes(now, changes);
        }
    }

    /// Delivers packets to running processes whose packets an earlier daemon was still holding. The packets it held are
    /// lost.
    fn deliver_flushing_flows(&self) {
        let flushing_entry = |flow: &Flow| match self.dataplane.flow(flow)? {
            (FlowState::Flushing, value) => Some(FilterEntry {
                hold_slot: 0,
                ..FilterEntry::from_value(*flow, &value)
            }),
            _ => None,
        };
        let running_flows = self.migrations.running_flows();
        let entries: Vec<FilterEntry> = running_flows.iter().filter_map(flushing_entry).collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Owned) {
            tracing::error!(%error, "cannot mark flows as owned: their packets stay held");
        }
    }

    /// Takes a new hold slot, since the earlier daemon's slot may be given to another flow. The flow stays silent until
    /// its fate is known, even if its hold was being flushed.
    fn hold_recovered(&mut self, recovered_flow: &RecoveredFlow) -> u32 {
        let slot = self.hold.take_slot().unwrap_or(0);
        self.dataplane.programs.hold_counters.reset(slot);
        let entry = FilterEntry {
            flow: recovered_flow.flow,
            epoch: recovered_flow.epoch,
            peer: recovered_flow.peer,
            hold_slot: slot,
        };
        if let Err(error) = self.dataplane.set_flows(&[entry], FlowState::TransitIn) {
            tracing::warn!(flow = %recovered_flow.flow, %error, "cannot assign a hold slot to a recovered flow");
        }
        slot
    }

    /// Begins to remove flows that closed while no daemon ran and whose sockets no longer exist. The other closing flows are
    /// removed when the last packets of their connections can no longer arrive.
    fn remove_closed_flows(&mut self) -> Vec<OwnershipChange> {
        let closing: Vec<Flow> = self
            .dataplane
            .flows()
            .into_iter()
            .filter(|(flow, state, _)| {
                *state == FlowState::Closing && flow.protocol == Protocol::Tcp
            })
            .map(|(flow, ..)| flow)
            .collect();
        let ports: BTreeSet<u16> = closing.iter().map(|flow| flow.local.port()).collect();
        let mut sockets = BTreeSet::new();
        for port in ports {
            match sock_diag::tcp_connections(None, port) {
                Ok(found) => sockets.extend(
                    found
                        .into_iter()
                        .map(|connection| (connection.local, connection.remote)),
                ),
                Err(error) => {
                    tracing::warn!(%error, "cannot list sockets");
                    return Vec::new();
                }
            }
        }
        let closed = closing
            .iter()
            .filter(|flow| !sockets.contains(&(flow.local, flow.remote)));
        closed
            .filter_map(|flow| self.removal_of_closed_flow(flow))
            .collect()
    }

    /// Records a recovered flow's fate. Does nothing if the flow does not wait for its program.
    pub(super) fn set_recovery_verdict(&mut self, flow: &Flow, verdict: RecoveryVerdict) {
        let now = self.now();
        let freed_slot = self.recovered.set_verdict(now, flow, verdict);
        self.hold.release_slot(freed_slot);
    }

    /// Handles a recovered flow that this node owns and its program has not reclaimed.
    pub(super) fn on_owned_verdict(&mut self, flow_epoch: &FlowEpoch) -> Result<(), Failure> {
        if self.recovered.is_in_use(&flow_epoch.flow) {
            return self.set_recovered_owned(flow_epoch);
        }
        if self.create_recovered_or_wait(flow_epoch) {
            return Ok(());
        }
        self.set_recovery_verdict(&flow_epoch.flow, RecoveryVerdict::Owned(flow_epoch.epoch));
        Ok(())
    }

    /// Creates the connection of a recovered flow from its journal entry, or lets it wait. Returns false if the flow is
    /// not an unaccepted connection.
    fn create_recovered_or_wait(&mut self, flow_epoch: &FlowEpoch) -> bool {
        let Some(connection) = self.arrivals.journaled_unaccepted(flow_epoch) else {
            return false;
        };
        if let Some(unreclaimed) = self.recovered.remove(&flow_epoch.flow) {
            self.hold.release_slot(unreclaimed.slot);
        }
        self.arrivals
            .try_to_queue(&self.dataplane, self.hold.device(), connection);
        true
    }

    /// Handles a program's statement that it uses a flow.
    pub(super) fn on_in_use(&mut self, flow: &Flow) {
        let Some(epoch) = self.recovered.on_in_use(flow) else {
            return;
        };
        let flow = *flow;
        if let Err(error) = self.set_recovered_owned(&FlowEpoch { flow, epoch }) {
            tracing::warn!(%flow, %error, "cannot resume a flow that this node owns");
        }
    }

    /// Takes a flow into use whose program was notified before the earlier daemon died: only the map entry is missing.
    fn set_recovered_owned(&mut self, flow_epoch: &FlowEpoch) -> Result<(), Failure> {
        let entry = FilterEntry {
            flow: flow_epoch.flow,
            epoch: flow_epoch.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        self.dataplane
            .set_flows(&[entry], FlowState::Owned)
            .map_err(IntoFailure::into_failure)?;
        if let Some(unreclaimed) = self.recovered.remove(&flow_epoch.flow) {
            self.hold.release_slot(unreclaimed.slot);
        }
        self.arrivals.journal().remove(&flow_epoch.flow);
        Ok(())
    }

    /// Gives up flows whose programs did not reclaim them in time.
    pub(super) fn give_up_recovered(&mut self) {
        let now = self.now();
        let mut changes = Vec::new();
        for (flow, unreclaimed) in self.recovered.take_overdue(now) {
            self.hold.release_slot(unreclaimed.slot);
            self.arrivals.journal().remove(&flow);
            let is_owned = matches!(
                unreclaimed.verdict,
                Some(RecoveryVerdict::Kept | RecoveryVerdict::Owned(_))
            );
            if !is_owned || self.programs.owner(&flow).is_some() {
                continue;
            }
            tracing::warn!(%flow, "the flow's server program did not reconnect");
            let epoch = match unreclaimed.verdict {
                Some(RecoveryVerdict::Owned(epoch)) => Some(epoch),
                _ => self.dataplane.flow(&flow).map(|(_, value)| value.epoch),
            };
            if let Err(error) = self.dataplane.remove_flow(&flow) {
                tracing::warn!(%flow, %error, "cannot remove a flow from the flow table");
            }
            changes.extend(epoch.map(|epoch| OwnershipChange {
                flow,
                kind: ChangeKind::Remove,
                epoch,
            }));
        }
        if !changes.is_empty() {
            self.machine.handle_changes(now, changes);
        }
    }
}

fn to_recovered_flow(flow: &Flow, state: FlowState, value: &FlowValue) -> Option<RecoveredFlow> {
    let (role, epoch) = match state {
        FlowState::Prepared => (RecoveredFlowRole::DonorPrepared, value.epoch),
        FlowState::TransitOut => (RecoveredFlowRole::Donor, value.epoch),
        FlowState::TransitIn => (RecoveredFlowRole::Acceptor, value.epoch),
        FlowState::Flushing => (RecoveredFlowRole::Acceptor, value.epoch.saturating_sub(1)),
        FlowState::Owned | FlowState::RedirectingData | FlowState::Moved | FlowState::Closing => {
            return None;
        }
    };
    Some(RecoveredFlow {
        flow: *flow,
        epoch,
        role,
        peer: NodeId(value.peer),
    })
}
