//! Flows of moving processes: passing, holding and forwarding their packets.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use foldhash::fast::RandomState;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::migration::FlowEpoch;
use holdfast_wire::failure::{Failure, NodeFault, PeerFault};
use holdfast_wire::move_frames::DonorFlowEpoch;
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};

use super::packet_hold::{HeldPackets, PacketHold};
use crate::dataplane::{Dataplane, FilterEntry, FlowGroup, HeldPacket};
use crate::failure_conversion::IntoFailure;
use crate::migration::{Redirect, SocketEndpoint};

/// Flows of all processes that are moving to or away from this node.
#[derive(Default)]
pub struct ProcessFlows {
    /// Flows of processes that are being moved to this node; their packets are held.
    held: HashMap<Flow, HeldFlow, RandomState>,
    /// Processes that are being moved to this node.
    inbound: BTreeMap<MoveId, InboundProcess>,
    /// Processes that are about to stop here and move away.
    outbound: BTreeMap<MoveId, OutboundProcess>,
    /// Datagram flows that began here since the last pre-copy round of each move.
    new_datagram_flows: BTreeMap<MoveId, Vec<Flow>>,
}

/// A flow of a process that is being moved here; its packets are held.
struct HeldFlow {
    id: MoveId,
    epoch: u32,
    packets: HeldPackets,
}

/// Flows of a process that is about to stop here and move away.
struct OutboundProcess {
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

/// Returns this node's flows that belong to these sockets.
pub fn flows_of_sockets(
    dataplane: &Dataplane,
    endpoints: &[SocketEndpoint],
) -> Vec<DonorFlowEpoch> {
    let mut found = owned_flows(dataplane, endpoints.iter().filter_map(SocketEndpoint::flow));
    let datagram_endpoints: Vec<&SocketEndpoint> = endpoints
        .iter()
        .filter(|endpoint| endpoint.protocol == Protocol::Udp && endpoint.remote.is_none())
        .collect();
    if datagram_endpoints.is_empty() {
        return found;
    }
    for (flow, state, value) in dataplane.flows() {
        if state == FlowState::Owned
            && datagram_endpoints
                .iter()
                .any(|endpoint| endpoint.receives_flow(&flow))
        {
            let epoch = value.epoch;
            found.push(DonorFlowEpoch { flow, epoch });
        }
    }
    found
}

/// Returns the flows among `flows` that this node owns.
pub fn owned_flows(
    dataplane: &Dataplane,
    flows: impl IntoIterator<Item = Flow>,
) -> Vec<DonorFlowEpoch> {
    let owned_flow = |flow: Flow| match dataplane.flow(&flow)? {
        (FlowState::Owned, value) => Some(DonorFlowEpoch {
            flow,
            epoch: value.epoch,
        }),
        _ => None,
    };
    flows.into_iter().filter_map(owned_flow).collect()
}

/// Flows of departing processes.
impl ProcessFlows {
    /// Begins a new list of datagram flows, because a pre-copy round has found the earlier ones.
    pub fn begin_round(&mut self, id: MoveId) {
        self.new_datagram_flows.insert(id, Vec::new());
    }

    /// Remembers a new datagram flow, which may belong to a process that is moving away.
    pub fn note_new_flow(&mut self, flow: Flow) {
        if flow.protocol == Protocol::Udp {
            (self.new_datagram_flows.values_mut()).for_each(|newcomers| newcomers.push(flow));
        }
    }

    /// Returns the datagram flows that began since the last pre-copy round of a move.
    pub fn new_datagram_flows(&self, id: MoveId) -> Vec<Flow> {
        self.new_datagram_flows
            .get(&id)
            .cloned()
            .unwrap_or_default()
    }

    /// Forgets the new datagram flows of a move that has ended.
    pub fn forget_new_flows(&mut self, id: MoveId) {
        self.new_datagram_flows.remove(&id);
    }

    /// Prepares flows of a process that is about to stop and move to node `to`. Their packets are still delivered here.
    ///
    /// # Errors
    /// Too many processes are moving, or the kernel refuses the change.
    pub fn add_outbound(
        &mut self,
        dataplane: &Dataplane,
        id: MoveId,
        to: NodeId,
        flows: &[FlowEpoch],
    ) -> Result<(), Failure> {
        let outbound = match self.outbound.entry(id) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let flow_group = dataplane.create_group();
                entry.insert(OutboundProcess {
                    to,
                    flows: Vec::new(),
                    flow_group: flow_group.ok_or(NodeFault::TooManyProcessesMoving)?,
                })
            }
        };
        let joined = dataplane.join_group(
            flows.iter().map(|flow_epoch| &flow_epoch.flow),
            outbound.flow_group,
        );
        outbound.flows.extend(flows);
        joined.map_err(IntoFailure::into_failure)
    }

    /// Sets the forwarding rule for packets of a departing process. A stop that is postponed sets the previous rule
    /// again.
    ///
    /// # Errors
    /// The move was given up.
    pub fn set_redirect(
        &self,
        dataplane: &Dataplane,
        id: MoveId,
        redirect: Redirect,
    ) -> Result<(), Failure> {
        let outbound = self.outbound.get(&id).ok_or(PeerFault::MoveGivenUp)?;
        let state = match redirect {
            Redirect::Data => FlowState::RedirectingData,
            Redirect::All => FlowState::TransitOut,
        };
        dataplane.set_group_state(outbound.flow_group, state, outbound.to, 0);
        Ok(())
    }

    /// Takes the flows out of their flow group, closed ones included, after the process has moved or stayed.
    pub fn end_outbound(&mut self, dataplane: &Dataplane, id: MoveId) {
        let Some(OutboundProcess {
            flows, flow_group, ..
        }) = self.outbound.remove(&id)
        else {
            return;
        };
        dataplane.reset_group(flow_group);
        let flows = flows.iter().map(|flow_epoch| &flow_epoch.flow);
        if let Err(error) = dataplane.join_group(flows, FlowGroup::NONE) {
            tracing::error!(%id, %error, "cannot remove flows from the flow group of an ended move");
        }
        dataplane.remove_group(flow_group);
    }

    /// Keeps the flows at this node. Closing flows stay closing until their last packets have arrived.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn keep(&self, dataplane: &Dataplane, flows: &[FlowEpoch]) -> Result<(), Failure> {
        let (mut owned, mut closing) = (Vec::new(), Vec::new());
        for flow_epoch in flows {
            match dataplane.flow(&flow_epoch.flow) {
                Some((_, value)) if value.epoch > flow_epoch.epoch => {}
                None | Some((FlowState::Moved, _)) => {}
                Some((FlowState::Closing, _)) => closing.push(*flow_epoch),
                Some(_) => owned.push(*flow_epoch),
            }
        }
        let none = NodeId(0);
        let set = self.set_states(dataplane, &owned, (none, FlowState::Owned));
        let set =
            set.and_then(|()| self.set_states(dataplane, &closing, (none, FlowState::Closing)));
        set.map_err(IntoFailure::into_failure)
    }

    /// Marks the flows as moved to another node, to which stragglers are forwarded.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn mark_moved(
        &self,
        dataplane: &Dataplane,
        to: NodeId,
        flows: &[FlowEpoch],
    ) -> Result<(), Failure> {
        let set = self.set_states(dataplane, flows, (to, FlowState::Moved));
        set.map_err(IntoFailure::into_failure)
    }

    fn set_states(
        &self,
        dataplane: &Dataplane,
        flows: &[FlowEpoch],
        (peer, state): (NodeId, FlowState),
    ) -> Result<(), holdfast_bpf::Error> {
        let entry = |flow_epoch: &FlowEpoch| FilterEntry {
            flow: flow_epoch.flow,
            epoch: flow_epoch.epoch,
            peer,
            hold_slot: self
                .held
                .get(&flow_epoch.flow)
                .map_or(0, |held_flow| held_flow.packets.slot()),
        };
        let entries: Vec<FilterEntry> = flows.iter().map(entry).collect();
        dataplane.set_flows(&entries, state)
    }
}

/// Flows of arriving processes.
impl ProcessFlows {
    /// Starts holding packets of these flows here.
    ///
    /// # Errors
    /// Too many processes or connections are in transit, or the kernel refuses the change.
    pub fn hold(
        &mut self,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
        id: MoveId,
        flows: &[DonorFlowEpoch],
    ) -> Result<(), Failure> {
        let flow_group = match self.inbound.entry(id) {
            Entry::Occupied(entry) => entry.get().flow_group,
            Entry::Vacant(entry) => {
                let flow_group = dataplane.create_group();
                let flow_group = flow_group.ok_or(NodeFault::TooManyProcessesMoving)?;
                let inbound = InboundProcess {
                    flow_group,
                    ..InboundProcess::default()
                };
                entry.insert(inbound).flow_group
            }
        };
        let mut entries = Vec::with_capacity(flows.len());
        for flow_at in flows {
            let packets = HeldPackets::start(dataplane, hold)
                .ok_or(NodeFault::TooManyConnectionsInTransit)?;
            let slot = packets.slot();
            let epoch = flow_at.epoch.saturating_add(1);
            let held_flow = HeldFlow { id, epoch, packets };
            if let Some(previous) = self.held.insert(flow_at.flow, held_flow) {
                previous.packets.free_slot(hold);
            }
            entries.push(FilterEntry {
                flow: flow_at.flow,
                epoch,
                peer: id.donor,
                hold_slot: slot,
            });
        }
        let set = dataplane.set_flows_in_group(&entries, FlowState::TransitIn, flow_group);
        set.map_err(IntoFailure::into_failure)
    }

    /// Announces the flows of the coming commit. Each flow's next epoch is normally that of its held entry; the others
    /// are noted.
    pub fn announce(&mut self, id: MoveId, flows: &[DonorFlowEpoch]) {
        let held = &self.held;
        let has_other_epoch = |flow_at: &&DonorFlowEpoch| {
            let held_flow = held.get(&flow_at.flow);
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
    pub fn hold_or_replay(
        &mut self,
        dataplane: &Dataplane,
        hold: &PacketHold,
        flow: &Flow,
        packet: HeldPacket,
    ) -> Option<HeldPacket> {
        let Some(held_flow) = self.held.get_mut(flow) else {
            return Some(packet);
        };
        held_flow.packets.hold_or_replay(dataplane, hold, packet);
        None
    }

    /// Takes ownership of the flows; their packets are held until the process runs.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn take_ownership(
        &mut self,
        dataplane: &Dataplane,
        id: MoveId,
        flows: &[FlowEpoch],
    ) -> Result<(), Failure> {
        let inbound = self.inbound.remove(&id).unwrap_or_default();
        let owned_here = (NodeId(0), FlowState::Flushing);
        match inbound.flow_group {
            // An earlier daemon restored the process, so no flow group exists.
            FlowGroup::NONE => self.set_states(dataplane, flows, owned_here),
            group => {
                dataplane.set_group_state(group, FlowState::Flushing, NodeId(0), 1);
                self.set_states(dataplane, &inbound.epoch_exceptions, owned_here)
            }
        }
        .map_err(IntoFailure::into_failure)?;
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

    /// Takes the flows of a process that has resumed here; `None` if there are none.
    pub fn take_inbound(&mut self, id: MoveId) -> Option<InboundProcess> {
        self.inbound.remove(&id)
    }

    /// Replays held packets of a process that has resumed, in order. Later packets go to the stack at once.
    pub fn replay(&mut self, dataplane: &Dataplane, hold: &PacketHold, inbound: &InboundProcess) {
        for flow_epoch in &inbound.owned_flows {
            if let Some(held_flow) = self.held.get_mut(&flow_epoch.flow) {
                held_flow.packets.replay(dataplane, hold);
            }
        }
    }

    /// Marks the flows of a process that has resumed as owned, and ends its flow group. Returns the flows that the
    /// process has not closed.
    pub fn mark_owned(&self, dataplane: &Dataplane, inbound: &InboundProcess) -> Vec<FlowEpoch> {
        // A flow that the process has closed since it resumed has no entry.
        let has_entry = |flow_epoch: &&FlowEpoch| dataplane.flow(&flow_epoch.flow).is_some();
        let flows = inbound.owned_flows.iter();
        let remaining: Vec<FlowEpoch> = flows.filter(has_entry).copied().collect();
        let owned = (NodeId(0), FlowState::Owned);
        if let Err(error) = self.set_states(dataplane, &remaining, owned) {
            tracing::error!(%error, "cannot mark flows as owned: their packets stay held");
        }
        dataplane.remove_group(inbound.flow_group);
        remaining
    }

    /// Stops holding packets for a process whose held packets are replayed.
    pub fn end_hold_after_replay(
        &mut self,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
        id: MoveId,
        inbound: &InboundProcess,
    ) {
        for flow_epoch in &inbound.owned_flows {
            if let Some(held_flow) = self.held.remove(&flow_epoch.flow) {
                held_flow.packets.free_slot(hold);
            }
        }
        // Ends the hold also for flows that the process had closed at the donor, which did not move with it.
        self.release_all(dataplane, hold, id);
    }

    /// Stops holding packets after a move was given up.
    pub fn give_up_inbound(&mut self, dataplane: &Dataplane, hold: &mut PacketHold, id: MoveId) {
        self.release_all(dataplane, hold, id);
        if let Some(inbound) = self.inbound.remove(&id) {
            dataplane.remove_group(inbound.flow_group);
        }
    }

    fn release_all(&mut self, dataplane: &Dataplane, hold: &mut PacketHold, id: MoveId) {
        let move_flows = self.held.iter().filter(|(_, held_flow)| held_flow.id == id);
        let flows: Vec<Flow> = move_flows.map(|(flow, _)| *flow).collect();
        flows
            .iter()
            .for_each(|flow| self.release(dataplane, hold, flow));
    }

    /// Stops holding packets of a flow that does not arrive.
    pub fn release(&mut self, dataplane: &Dataplane, hold: &mut PacketHold, flow: &Flow) {
        if let Some(held_flow) = self.held.remove(flow) {
            held_flow.packets.free_slot(hold);
        }
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a flow that did not arrive from the flow table");
        }
    }
}
