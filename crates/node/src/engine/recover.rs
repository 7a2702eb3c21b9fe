//! Recovery after a restart, from the maps that an earlier daemon left.
//!
//! For flows in the middle of a handoff, the machine asks the holder for their fate and issues the commands that
//! follow. Their sockets are with the server programs, which reconnect and reclaim them ([`super::reclaim`]) before or
//! after the holder's answer. Steps that need no socket are done at once, the others when the program has reclaimed the
//! socket.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_bpf::shared::{FlowState, FlowValue};
use holdfast_proto::handoff::{FlowEpoch, RecoveredFlow, RecoveredRole};
use holdfast_sys::sock_diag;
use holdfast_wire::{Change, ChangeKind, Epoch, Flow, NodeId, Protocol};

use super::Engine;
use crate::dataplane::Entry;

/// Time for a server program to reclaim its flows after their fate is known.
const COME_BACK: Duration = Duration::from_secs(30);

/// A flow that an earlier daemon left in the middle of a handoff, until its server program reclaims it.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Slot of the hold counters; 0 for a donated flow.
    pub slot: u32,
    /// Fate of the flow, once known.
    pub verdict: Option<Verdict>,
    /// True if the program already uses the flow and will not reclaim it.
    pub in_use: bool,
    until: Option<Duration>,
}

/// Fate of a recovered flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Donated here, and stays.
    Kept,
    /// Donated here, and moved to another node.
    Gone {
        /// Name of that node.
        to: String,
    },
    /// Received here, and owned by this node at this epoch.
    Ours(Epoch),
    /// Received here, and given up.
    Cancelled,
}

impl Engine {
    /// Reports the state of the maps to the machine.
    pub(super) fn recover(&mut self) {
        let mut moving = Vec::new();
        let mut changes = Vec::new();
        let of_moves = self.moves.written_flows();
        self.flush_left();
        for (flow, state, value) in self.dataplane.flows() {
            let found = recovered(&flow, state, &value);
            if let Some(found) = found.filter(|_| !of_moves.contains(&flow)) {
                let slot = match found.role {
                    RecoveredRole::Acceptor => self.hold_again(&found),
                    _ => 0,
                };
                let of = Recovered {
                    slot,
                    ..Recovered::default()
                };
                self.recovered.insert(flow, of);
                moving.push(found);
            }
            // The holder may have missed the flow's report; it ignores known flows.
            changes.extend(self.reportable(flow, state, value.epoch));
        }
        changes.extend(self.closed_meanwhile());
        let moving_flows: BTreeSet<Flow> = moving.iter().map(|of| of.flow).collect();
        for flow in self.journal.flows() {
            if !moving_flows.contains(&flow) {
                self.journal.ended(&flow);
            }
        }
        let now = self.now();
        if !moving.is_empty() {
            tracing::warn!(
                flows = moving.len(),
                "an earlier daemon left flows in the middle of a handoff"
            );
            self.machine.handle_recovered(now, moving);
        }
        if !changes.is_empty() {
            self.machine.handle_changes(now, changes);
        }
    }

    /// Delivers packets to running processes whose packets an earlier daemon was still holding. The packets it held are
    /// lost.
    fn flush_left(&self) {
        let flushing = |flow: &Flow| match self.dataplane.flow(flow)? {
            (FlowState::Flushing, value) => Some(Entry {
                hold_slot: 0,
                ..Entry::of(*flow, &value)
            }),
            _ => None,
        };
        let running = self.moves.running_flows();
        let entries: Vec<Entry> = running.iter().filter_map(flushing).collect();
        if let Err(error) = self.dataplane.set_flows(&entries, FlowState::Owned) {
            tracing::error!(%error, "flows stay in the hold's care");
        }
    }

    /// Takes a new hold slot, since the earlier daemon's slot may be given to another flow. The flow stays silent until
    /// its fate is known, even if its hold was being flushed.
    fn hold_again(&mut self, of: &RecoveredFlow) -> u32 {
        let slot = self.slots.take().unwrap_or(0);
        self.dataplane.programs.holds.reset(slot);
        let entry = Entry {
            flow: of.flow,
            epoch: of.epoch,
            peer: of.peer,
            hold_slot: slot,
        };
        if let Err(error) = self.dataplane.set_flows(&[entry], FlowState::TransitIn) {
            tracing::warn!(flow = %of.flow, %error, "its hold is another's");
        }
        slot
    }

    /// Removes flows that closed while no daemon ran and whose sockets no longer exist. The other closing flows are
    /// removed when the last packets of their connections can no longer arrive.
    fn closed_meanwhile(&mut self) -> Vec<Change> {
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
                Ok(found) => sockets.extend(found.into_iter().map(|of| (of.local, of.remote))),
                Err(error) => {
                    tracing::warn!(%error, "sockets cannot be listed");
                    return Vec::new();
                }
            }
        }
        let gone = closing
            .iter()
            .filter(|flow| !sockets.contains(&(flow.local, flow.remote)));
        gone.filter_map(|flow| self.removal(flow)).collect()
    }

    /// Records a flow's fate. Returns true if its program has yet to reclaim it.
    pub(super) fn decided(&mut self, flow: &Flow, verdict: Verdict) -> bool {
        let until = self.now() + COME_BACK;
        match self.recovered.get_mut(flow) {
            Some(of) => {
                // No packet will be held for the flow again.
                if verdict == Verdict::Cancelled {
                    self.slots.give_back(std::mem::take(&mut of.slot));
                }
                of.verdict = Some(verdict);
                of.until = Some(until);
                true
            }
            None => false,
        }
    }

    /// Handles a recovered flow that this node owns and its program has not reclaimed.
    pub(super) fn decided_ours(&mut self, of: &FlowEpoch) -> Result<(), String> {
        if self.recovered.get(&of.flow).is_some_and(|of| of.in_use) {
            return self.use_recovered(of);
        }
        if self.queue_up_recovered(of) {
            return Ok(());
        }
        self.decided(&of.flow, Verdict::Ours(of.epoch));
        Ok(())
    }

    /// Handles a program's statement that it uses a flow.
    pub(super) fn in_use(&mut self, flow: &Flow) {
        let Some(of) = self.recovered.get_mut(flow) else {
            return;
        };
        of.in_use = true;
        let verdict = of.verdict.clone();
        match verdict {
            Some(Verdict::Ours(epoch)) => {
                let flow = *flow;
                if let Err(error) = self.use_recovered(&FlowEpoch { flow, epoch }) {
                    tracing::warn!(%flow, %error, "a flow that is ours stays silent");
                }
            }
            Some(_) => drop(self.recovered.remove(flow)),
            None => {}
        }
    }

    /// Takes a flow into use whose program was notified before the earlier daemon died: only the map entry is missing.
    fn use_recovered(&mut self, of: &FlowEpoch) -> Result<(), String> {
        let entry = Entry {
            flow: of.flow,
            epoch: of.epoch,
            peer: NodeId(0),
            hold_slot: 0,
        };
        self.dataplane
            .set_flows(&[entry], FlowState::Owned)
            .map_err(|error| error.to_string())?;
        if let Some(had) = self.recovered.remove(&of.flow) {
            self.slots.give_back(had.slot);
        }
        self.journal.ended(&of.flow);
        Ok(())
    }

    /// Gives up flows whose programs did not reclaim them in time.
    pub(super) fn give_up_recovered(&mut self) {
        let now = self.now();
        let late: Vec<Flow> = self
            .recovered
            .iter()
            .filter(|(_, of)| of.until.is_some_and(|until| until <= now))
            .map(|(flow, _)| *flow)
            .collect();
        let mut changes = Vec::new();
        for flow in late {
            let Some(of) = self.recovered.remove(&flow) else {
                continue;
            };
            self.slots.give_back(of.slot);
            self.journal.ended(&flow);
            let is_ours = matches!(of.verdict, Some(Verdict::Kept | Verdict::Ours(_)));
            if !is_ours || self.programs.owner(&flow).is_some() {
                continue;
            }
            tracing::warn!(%flow, "its server program did not come back");
            let epoch = match of.verdict {
                Some(Verdict::Ours(epoch)) => Some(epoch),
                _ => self.dataplane.flow(&flow).map(|(_, value)| value.epoch),
            };
            if let Err(error) = self.dataplane.forget(&flow) {
                tracing::warn!(%flow, %error, "it stays in the table");
            }
            changes.extend(epoch.map(|epoch| Change {
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

fn recovered(flow: &Flow, state: FlowState, value: &FlowValue) -> Option<RecoveredFlow> {
    let (role, epoch) = match state {
        FlowState::Prepared => (RecoveredRole::DonorPrepared, value.epoch),
        FlowState::TransitOut => (RecoveredRole::Donor, value.epoch),
        FlowState::TransitIn => (RecoveredRole::Acceptor, value.epoch),
        FlowState::Flushing => (RecoveredRole::Acceptor, value.epoch.saturating_sub(1)),
        FlowState::Owned | FlowState::Leaving | FlowState::Moved | FlowState::Closing => {
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
