//! Flows of moving processes: passing, holding and forwarding their packets.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::migration::FlowEpoch;
use holdfast_wire::move_frames::DonorFlow;
use holdfast_wire::{Flow, MoveId, NodeId, OwnershipChange, Protocol};

use super::Engine;
use super::tombstones::Tombstone;
use crate::dataplane::{
    FilterEntry, FlowGroup, HeldPacket, monotonic_ns, monotonic_s, sort_for_replay,
};
use crate::migration::SocketEndpoint;

/// A flow of a process that is being moved here; its packets are held.
pub struct HeldFlow {
    id: MoveId,
    slot: u32,
    epoch: u32,
    packets: Vec<HeldPacket>,
    /// True if packets are given to the stack instead of being held.
    released: bool,
}

/// Flows of a process that is about to stop here and move away.
pub struct OutboundProcess {
    to: NodeId,
    flows: Vec<FlowEpoch>,
    flow_group: FlowGroup,
}

/// Flows of a process that is being moved here.
#[derive(Default)]
pub struct InboundProcess {
    flow_group: FlowGroup,
    /// Flows whose committed epoch differs from the epoch at which their packets are held.
    epoch_exceptions: Vec<FlowEpoch>,
    /// Flows that this node owns; set at the commit.
    owned_flows: Vec<FlowEpoch>,
}

/// All held flows.
pub type HeldFlows = HashMap<Flow, HeldFlow, RandomState>;

/// Forwarding rule for packets of a process that is moving away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// Data goes to the acceptor. Pure acknowledgements stay here as long as the process runs.
    Data,
    /// All packets go to the acceptor, because the process is stopped.
    All,
}

impl Engine {
    /// Returns this node's flows that belong to these sockets.
    pub(super) fn flows_of_sockets(&self, endpoints: &[SocketEndpoint]) -> Vec<DonorFlow> {
        let mut found = self.owned_flows(endpoints.iter().filter_map(SocketEndpoint::flow));
        let datagram_endpoints: Vec<&SocketEndpoint> = endpoints
            .iter()
            .filter(|endpoint| endpoint.protocol == Protocol::Udp && endpoint.remote.is_none())
            .collect();
        if datagram_endpoints.is_empty() {
            return found;
        }
        for (flow, state, value) in self.dataplane.flows() {
            if state == FlowState::Owned
                && datagram_endpoints
                    .iter()
                    .any(|endpoint| endpoint.receives_flow(&flow))
            {
                let epoch = value.epoch;
                found.push(DonorFlow { flow, epoch });
            }
        }
        found
    }

    /// Returns the flows among `flows` that this node owns.
    pub(super) fn owned_flows(&self, flows: impl IntoIterator<Item = Flow>) -> Vec<DonorFlow> {
        let owned_flow = |flow: Flow| match self.dataplane.flow(&flow)? {
            (FlowState::Owned, value) => Some(DonorFlow {
                flow,
                epoch: value.epoch,
            }),
            _ => None,
        };
        flows.into_iter().filter_map(owned_flow).collect()
    }

    /// Remembers a new datagram flow, which may belong to a process that is moving away.
    pub(super) fn note_new_flow(&mut self, flow: Flow) {
        if flow.protocol == Protocol::Udp {
            (self.new_datagram_flows.values_mut()).for_each(|newcomers| newcomers.push(flow));
        }
    }

    /// Starts holding packets of these flows here.
    pub(super) fn hold_flows(&mut self, id: MoveId, flows: &[DonorFlow]) -> Result<(), String> {
        if let Some(why) = flows
            .iter()
            .find_map(|flow_at| self.refuse_private_flow(&flow_at.flow))
        {
            return Err(why);
        }
        for flow_at in flows {
            self.refuse_owned_flow(&flow_at.flow)
                .map_err(|why| format!("{}: {why}", flow_at.flow))?;
        }
        let capacity_error = "too many processes or connections are in transit here; try again";
        if !self.inbound.contains_key(&id) {
            let flow_group = self.dataplane.create_group().ok_or(capacity_error)?;
            let inbound = InboundProcess {
                flow_group,
                ..InboundProcess::default()
            };
            self.inbound.insert(id, inbound);
        }
        let mut entries = Vec::with_capacity(flows.len());
        for flow_at in flows {
            let slot = self.hold_slots.take().ok_or(capacity_error)?;
            self.dataplane.programs.hold_counters.reset(slot);
            let epoch = flow_at.epoch.saturating_add(1);
            let held_flow = HeldFlow {
                id,
                slot,
                epoch,
                packets: Vec::new(),
                released: false,
            };
            if let Some(previous) = self.held_flows.insert(flow_at.flow, held_flow) {
                self.hold_slots.release(previous.slot);
            }
            entries.push(FilterEntry {
                flow: flow_at.flow,
                epoch,
                peer: id.donor,
                hold_slot: slot,
            });
        }
        let flow_group = self
            .inbound
            .get(&id)
            .map_or(FlowGroup::NONE, |inbound| inbound.flow_group);
        let set = self
            .dataplane
            .set_flows_in_group(&entries, FlowState::TransitIn, flow_group);
        set.map_err(|error| error.to_string())
    }

    /// Announces the flows of the coming commit. Each flow's next epoch is normally that of its held entry; the others
    /// are noted.
    pub(super) fn announce_flows(&mut self, id: MoveId, flows: &[DonorFlow]) {
        let held_flows = &self.held_flows;
        let has_other_epoch = |flow_at: &&DonorFlow| {
            let held_flow = held_flows.get(&flow_at.flow);
            held_flow.is_none_or(|held_flow| held_flow.epoch != flow_at.epoch.saturating_add(1))
        };
        if let Some(inbound) = self.inbound.get_mut(&id) {
            let exceptions = flows
                .iter()
                .filter(has_other_epoch)
                .map(|flow_at| FlowEpoch {
                    flow: flow_at.flow,
                    epoch: flow_at.epoch.saturating_add(2),
                });
            inbound.epoch_exceptions = exceptions.collect();
        }
    }

    /// Holds or replays a packet of a process's flow. Returns the packet if no process has the flow.
    pub(super) fn hold_or_replay(&mut self, flow: &Flow, packet: HeldPacket) -> Option<HeldPacket> {
        let Some(held_flow) = self.held_flows.get_mut(flow) else {
            return Some(packet);
        };
        if held_flow.released {
            self.hold.replay(&packet.bytes);
            self.dataplane
                .programs
                .hold_counters
                .count_replayed(held_flow.slot);
        } else {
            held_flow.packets.push(packet);
        }
        None
    }

    /// Prepares flows of a process that is about to stop. Their packets are still delivered here.
    pub(super) fn add_outbound_flows(
        &mut self,
        id: MoveId,
        to: NodeId,
        flows: &[FlowEpoch],
    ) -> Result<(), String> {
        if !self.outbound.contains_key(&id) {
            let capacity_error = "too many processes are moving here; try again";
            let outbound = OutboundProcess {
                to,
                flows: Vec::new(),
                flow_group: self.dataplane.create_group().ok_or(capacity_error)?,
            };
            self.outbound.insert(id, outbound);
        }
        let Some(outbound) = self.outbound.get_mut(&id) else {
            return Ok(());
        };
        let joined = (self.dataplane).join_group(
            flows.iter().map(|flow_epoch| &flow_epoch.flow),
            outbound.flow_group,
        );
        outbound.flows.extend(flows);
        joined.map_err(|error| error.to_string())
    }

    /// Sets the forwarding rule for packets of a departing process. A stop that is postponed sets the previous rule
    /// again.
    pub(super) fn set_redirect(&self, id: MoveId, redirect: Redirect) -> Result<(), String> {
        let outbound = self.outbound.get(&id).ok_or("the move was given up")?;
        let state = match redirect {
            Redirect::Data => FlowState::RedirectingData,
            Redirect::All => FlowState::TransitOut,
        };
        self.dataplane
            .set_group_state(outbound.flow_group, state, outbound.to, 0);
        Ok(())
    }

    /// Takes the flows out of their flow group, closed ones included, after the process has moved or stayed.
    pub(super) fn end_outbound(&mut self, id: MoveId) {
        let Some(OutboundProcess {
            flows, flow_group, ..
        }) = self.outbound.remove(&id)
        else {
            return;
        };
        self.dataplane.reset_group(flow_group);
        let flows = flows.iter().map(|flow_epoch| &flow_epoch.flow);
        if let Err(error) = self.dataplane.join_group(flows, FlowGroup::NONE) {
            tracing::error!(%id, %error, "cannot remove flows from the flow group of an ended move");
        }
        self.dataplane.remove_group(flow_group);
    }

    /// Keeps the flows at this node. Closing flows stay closing until their last packets have arrived.
    pub(super) fn keep_flows(&self, flows: &[FlowEpoch]) -> Result<(), String> {
        let (mut owned, mut closing) = (Vec::new(), Vec::new());
        for flow_epoch in flows {
            match self.dataplane.flow(&flow_epoch.flow) {
                Some((_, value)) if value.epoch > flow_epoch.epoch => {}
                None | Some((FlowState::Moved, _)) => {}
                Some((FlowState::Closing, _)) => closing.push(*flow_epoch),
                Some(_) => owned.push(*flow_epoch),
            }
        }
        let set = self.set_flow_states(&owned, NodeId(0), FlowState::Owned);
        let set = set.and_then(|()| self.set_flow_states(&closing, NodeId(0), FlowState::Closing));
        set.map_err(|error| error.to_string())
    }

    /// Marks the flows as moved to another node, to which stragglers are forwarded for a while.
    pub(super) fn mark_moved(&mut self, to: NodeId, flows: &[FlowEpoch]) -> Result<(), String> {
        let set = self.set_flow_states(flows, to, FlowState::Moved);
        set.map_err(|error| error.to_string())?;
        for flow_epoch in flows {
            let (flow, epoch) = (flow_epoch.flow, flow_epoch.epoch);
            // A private flow is forwarded as long as it lives.
            if !self.migrations.addresses().is_private(&flow) {
                self.tombstones
                    .add(monotonic_s(), Tombstone { flow, epoch });
            }
            self.taken_at_ns.remove(&flow_epoch.flow);
        }
        Ok(())
    }

    fn set_flow_states(
        &self,
        flows: &[FlowEpoch],
        peer: NodeId,
        state: FlowState,
    ) -> Result<(), holdfast_bpf::Error> {
        let entry = |flow_epoch: &FlowEpoch| FilterEntry {
            flow: flow_epoch.flow,
            epoch: flow_epoch.epoch,
            peer,
            hold_slot: self
                .held_flows
                .get(&flow_epoch.flow)
                .map_or(0, |held_flow| held_flow.slot),
        };
        let entries: Vec<FilterEntry> = flows.iter().map(entry).collect();
        self.dataplane.set_flows(&entries, state)
    }

    /// Takes ownership of the flows; their packets are held until the process runs.
    pub(super) fn take_ownership(
        &mut self,
        id: MoveId,
        flows: &[FlowEpoch],
        lost: &[Flow],
    ) -> Result<(), String> {
        for flow in lost {
            self.unhold(flow);
        }
        let inbound = self.inbound.remove(&id).unwrap_or_default();
        match inbound.flow_group {
            // An earlier daemon restored the process, so no flow group exists.
            FlowGroup::NONE => self.set_flow_states(flows, NodeId(0), FlowState::Flushing),
            group => {
                self.dataplane
                    .set_group_state(group, FlowState::Flushing, NodeId(0), 1);
                self.set_flow_states(&inbound.epoch_exceptions, NodeId(0), FlowState::Flushing)
            }
        }
        .map_err(|error| error.to_string())?;
        for packet in self.migrations.take_packets(id) {
            self.hold.inject(&packet);
        }
        let flows = flows.to_vec();
        self.inbound.insert(
            id,
            InboundProcess {
                owned_flows: flows,
                ..inbound
            },
        );
        Ok(())
    }

    /// Replays held packets in order, after the process has resumed.
    pub(super) fn replay_held_flows(&mut self, id: MoveId) {
        let Some(InboundProcess {
            owned_flows: flows,
            flow_group,
            ..
        }) = self.inbound.remove(&id)
        else {
            return;
        };
        self.read_hold();
        for flow_epoch in &flows {
            let Some(held_flow) = self.held_flows.get_mut(&flow_epoch.flow) else {
                continue;
            };
            held_flow.released = true;
            let (slot, mut packets) = (held_flow.slot, std::mem::take(&mut held_flow.packets));
            sort_for_replay(&mut packets);
            for packet in &packets {
                self.hold.replay(&packet.bytes);
                self.dataplane.programs.hold_counters.count_replayed(slot);
            }
        }
        self.read_hold();
        // A flow that the process has closed since it resumed has no entry.
        let has_entry = |flow_epoch: &&FlowEpoch| self.dataplane.flow(&flow_epoch.flow).is_some();
        let remaining: Vec<FlowEpoch> = flows.iter().filter(has_entry).copied().collect();
        if let Err(error) = self.set_flow_states(&remaining, NodeId(0), FlowState::Owned) {
            tracing::error!(%error, "cannot mark flows as owned: their packets stay held");
        }
        self.dataplane.remove_group(flow_group);
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        for flow_epoch in &remaining {
            self.taken_at_ns.insert(flow_epoch.flow, monotonic_ns());
        }
        for flow_epoch in &flows {
            if let Some(held_flow) = self.held_flows.remove(&flow_epoch.flow) {
                self.hold_slots.release(held_flow.slot);
            }
        }
        // Flows that the process had closed at the donor did not move with it.
        self.unhold_all(id);
        self.query_private_flows();
    }

    /// Stops holding packets after a move was given up.
    pub(super) fn release_held_flows(&mut self, id: MoveId) {
        self.unhold_all(id);
        if let Some(inbound) = self.inbound.remove(&id) {
            self.dataplane.remove_group(inbound.flow_group);
        }
    }

    fn unhold_all(&mut self, id: MoveId) {
        let move_flows = self.held_flows.iter().filter(|(_, fence)| fence.id == id);
        let flows: Vec<Flow> = move_flows.map(|(flow, _)| *flow).collect();
        flows.iter().for_each(|flow| self.unhold(flow));
    }

    fn unhold(&mut self, flow: &Flow) {
        if let Some(held_flow) = self.held_flows.remove(flow) {
            self.hold_slots.release(held_flow.slot);
        }
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(self.dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = self.dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a flow that did not arrive from the flow table");
        }
    }

    /// Reports begun and ended flows to the holder. Changes of a moving process's flows wait until the move has ended.
    pub(super) fn report_changes(&mut self, changes: Vec<OwnershipChange>) {
        let machine = self.migrations.machine();
        let moving = |change: &OwnershipChange| machine.is_moving(&change.flow);
        let (moving, others): (Vec<_>, Vec<_>) = changes.into_iter().partition(moving);
        if !moving.is_empty() {
            machine.handle_changes(moving);
        }
        if !others.is_empty() {
            let now = self.now();
            self.machine.handle_changes(now, others);
        }
    }
}
