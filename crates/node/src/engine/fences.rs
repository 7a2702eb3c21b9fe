//! Flows of moving processes: passing, holding and forwarding their packets.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use holdfast_bpf::shared::FlowState;
use holdfast_proto::migration::FlowEpoch;
use holdfast_wire::migration::FlowAt;
use holdfast_wire::{Change, Flow, MoveId, NodeId, Protocol};

use super::Engine;
use super::tombstones::Tombstone;
use crate::dataplane::{Convoy, Entry, HeldPacket, in_order, monotonic_ns, monotonic_s};
use crate::migration::Place;

/// A flow of a process that is being moved here; its packets are held.
pub struct Fence {
    id: MoveId,
    slot: u32,
    epoch: u32,
    held: Vec<HeldPacket>,
    /// True if packets are given to the stack instead of being held.
    released: bool,
}

/// Flows of a process that is about to stop here and move away.
pub struct Leaving {
    to: NodeId,
    flows: Vec<FlowEpoch>,
    convoy: Convoy,
}

/// Flows of a process that is being moved here.
#[derive(Default)]
pub struct Coming {
    convoy: Convoy,
    /// Flows whose committed epoch differs from the epoch at which their packets are held.
    odd: Vec<FlowEpoch>,
    /// Flows that this node owns; set at the commit.
    flows: Vec<FlowEpoch>,
}

/// All held flows.
pub type Fences = HashMap<Flow, Fence, RandomState>;

/// Forwarding rule for packets of a process that is moving away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Data goes to the acceptor. Pure acknowledgements stay here as long as the process runs.
    Leaves,
    /// All packets go to the acceptor, because the process is stopped.
    Stands,
}

impl Engine {
    /// Returns this node's flows that belong to these sockets.
    pub(super) fn flows_of(&self, places: &[Place]) -> Vec<FlowAt> {
        let mut found = self.owned(places.iter().filter_map(Place::flow));
        let datagrams: Vec<&Place> = places
            .iter()
            .filter(|place| place.protocol == Protocol::Udp && place.remote.is_none())
            .collect();
        if datagrams.is_empty() {
            return found;
        }
        for (flow, state, value) in self.dataplane.flows() {
            if state == FlowState::Owned && datagrams.iter().any(|place| place.has(&flow)) {
                let epoch = value.epoch;
                found.push(FlowAt { flow, epoch });
            }
        }
        found
    }

    /// Returns the flows among `flows` that this node owns.
    pub(super) fn owned(&self, flows: impl IntoIterator<Item = Flow>) -> Vec<FlowAt> {
        let owned = |flow: Flow| match self.dataplane.flow(&flow)? {
            (FlowState::Owned, value) => Some(FlowAt {
                flow,
                epoch: value.epoch,
            }),
            _ => None,
        };
        flows.into_iter().filter_map(owned).collect()
    }

    /// Remembers a new datagram flow, which may belong to a process that is moving away.
    pub(super) fn note_newcomer(&mut self, flow: Flow) {
        if flow.protocol == Protocol::Udp {
            (self.newcomers.values_mut()).for_each(|newcomers| newcomers.push(flow));
        }
    }

    /// Starts holding packets of these flows here.
    pub(super) fn fence(&mut self, id: MoveId, flows: &[FlowAt]) -> Result<(), String> {
        if let Some(why) = flows.iter().find_map(|of| self.refuse_private(&of.flow)) {
            return Err(why);
        }
        for of in flows {
            self.refuse_own(&of.flow)
                .map_err(|why| format!("{}: {why}", of.flow))?;
        }
        let many = "too many processes or connections are in transit here; try again";
        if !self.coming.contains_key(&id) {
            let convoy = self.dataplane.form().ok_or(many)?;
            let coming = Coming {
                convoy,
                ..Coming::default()
            };
            self.coming.insert(id, coming);
        }
        let mut entries = Vec::with_capacity(flows.len());
        for of in flows {
            let slot = self.slots.take().ok_or(many)?;
            self.dataplane.programs.holds.reset(slot);
            let epoch = of.epoch.saturating_add(1);
            let fence = Fence {
                id,
                slot,
                epoch,
                held: Vec::new(),
                released: false,
            };
            if let Some(older) = self.fences.insert(of.flow, fence) {
                self.slots.give_back(older.slot);
            }
            entries.push(Entry {
                flow: of.flow,
                epoch,
                peer: id.donor,
                hold_slot: slot,
            });
        }
        let convoy = self.coming.get(&id).map_or(Convoy::NONE, |of| of.convoy);
        let set = self
            .dataplane
            .set_flows_in(&entries, FlowState::TransitIn, convoy);
        set.map_err(|error| error.to_string())
    }

    /// Announces the flows of the coming commit. Each flow's next epoch is normally that of its held entry; the others
    /// are noted.
    pub(super) fn expect_flows(&mut self, id: MoveId, flows: &[FlowAt]) {
        let fences = &self.fences;
        let is_odd = |of: &&FlowAt| {
            let fence = fences.get(&of.flow);
            fence.is_none_or(|fence| fence.epoch != of.epoch.saturating_add(1))
        };
        if let Some(coming) = self.coming.get_mut(&id) {
            let odd = flows.iter().filter(is_odd).map(|of| FlowEpoch {
                flow: of.flow,
                epoch: of.epoch.saturating_add(2),
            });
            coming.odd = odd.collect();
        }
    }

    /// Holds or replays a packet of a process's flow. Returns the packet if no process has the flow.
    pub(super) fn held(&mut self, flow: &Flow, packet: HeldPacket) -> Option<HeldPacket> {
        let Some(fence) = self.fences.get_mut(flow) else {
            return Some(packet);
        };
        if fence.released {
            self.hold.replay(&packet.bytes);
            self.dataplane.programs.holds.replayed(fence.slot);
        } else {
            fence.held.push(packet);
        }
        None
    }

    /// Prepares flows of a process that is about to stop. Their packets are still delivered here.
    pub(super) fn about_to_leave(
        &mut self,
        id: MoveId,
        to: NodeId,
        flows: &[FlowEpoch],
    ) -> Result<(), String> {
        if !self.leaving.contains_key(&id) {
            let many = "too many processes are moving here; try again";
            let leaving = Leaving {
                to,
                flows: Vec::new(),
                convoy: self.dataplane.form().ok_or(many)?,
            };
            self.leaving.insert(id, leaving);
        }
        let Some(leaving) = self.leaving.get_mut(&id) else {
            return Ok(());
        };
        let joined = (self.dataplane).join(flows.iter().map(|of| &of.flow), leaving.convoy);
        leaving.flows.extend(flows);
        joined.map_err(|error| error.to_string())
    }

    /// Sets the forwarding rule for packets of a departing process. A stop that is postponed sets the previous rule
    /// again.
    pub(super) fn turn_flows(&self, id: MoveId, turn: Turn) -> Result<(), String> {
        let leaving = self.leaving.get(&id).ok_or("the move was given up")?;
        let state = match turn {
            Turn::Leaves => FlowState::Leaving,
            Turn::Stands => FlowState::TransitOut,
        };
        self.dataplane.turn(leaving.convoy, state, leaving.to, 0);
        Ok(())
    }

    /// Takes the flows out of their flow group, closed ones included, after the process has moved or stayed.
    pub(super) fn no_longer_leaving(&mut self, id: MoveId) {
        let Some(Leaving { flows, convoy, .. }) = self.leaving.remove(&id) else {
            return;
        };
        self.dataplane.dissolve(convoy);
        let flows = flows.iter().map(|of| &of.flow);
        if let Err(error) = self.dataplane.join(flows, Convoy::NONE) {
            tracing::error!(%id, %error, "flows stay in a convoy that is no more");
        }
        self.dataplane.disband(convoy);
    }

    /// Keeps the flows at this node. Closing flows stay closing until their last packets have arrived.
    pub(super) fn keep_flows(&self, flows: &[FlowEpoch]) -> Result<(), String> {
        let (mut owned, mut closing) = (Vec::new(), Vec::new());
        for of in flows {
            match self.dataplane.flow(&of.flow) {
                Some((_, value)) if value.epoch > of.epoch => {}
                None | Some((FlowState::Moved, _)) => {}
                Some((FlowState::Closing, _)) => closing.push(*of),
                Some(_) => owned.push(*of),
            }
        }
        let set = self.set_all(&owned, NodeId(0), FlowState::Owned);
        let set = set.and_then(|()| self.set_all(&closing, NodeId(0), FlowState::Closing));
        set.map_err(|error| error.to_string())
    }

    /// Marks the flows as moved to another node, to which stragglers are forwarded for a while.
    pub(super) fn moved_away(&mut self, to: NodeId, flows: &[FlowEpoch]) -> Result<(), String> {
        let set = self.set_all(flows, to, FlowState::Moved);
        set.map_err(|error| error.to_string())?;
        for of in flows {
            let (flow, epoch) = (of.flow, of.epoch);
            // A private flow is forwarded as long as it lives.
            if !self.moves.addresses().is_private(&flow) {
                self.tombstones
                    .add(monotonic_s(), Tombstone { flow, epoch });
            }
            self.taken_at_ns.remove(&of.flow);
        }
        Ok(())
    }

    fn set_all(
        &self,
        flows: &[FlowEpoch],
        peer: NodeId,
        state: FlowState,
    ) -> Result<(), holdfast_bpf::Error> {
        let entry = |of: &FlowEpoch| Entry {
            flow: of.flow,
            epoch: of.epoch,
            peer,
            hold_slot: self.fences.get(&of.flow).map_or(0, |fence| fence.slot),
        };
        let entries: Vec<Entry> = flows.iter().map(entry).collect();
        self.dataplane.set_flows(&entries, state)
    }

    /// Takes ownership of the flows; their packets are held until the process runs.
    pub(super) fn take_flows(
        &mut self,
        id: MoveId,
        flows: &[FlowEpoch],
        lost: &[Flow],
    ) -> Result<(), String> {
        for flow in lost {
            self.unfence(flow);
        }
        let coming = self.coming.remove(&id).unwrap_or_default();
        match coming.convoy {
            // An earlier daemon restored the process, so no flow group exists.
            Convoy::NONE => self.set_all(flows, NodeId(0), FlowState::Flushing),
            convoy => {
                self.dataplane
                    .turn(convoy, FlowState::Flushing, NodeId(0), 1);
                self.set_all(&coming.odd, NodeId(0), FlowState::Flushing)
            }
        }
        .map_err(|error| error.to_string())?;
        for packet in self.moves.take_packets(id) {
            self.hold.inject(&packet);
        }
        let flows = flows.to_vec();
        self.coming.insert(id, Coming { flows, ..coming });
        Ok(())
    }

    /// Replays held packets in order, after the process has resumed.
    pub(super) fn flush_fences(&mut self, id: MoveId) {
        let Some(Coming { flows, convoy, .. }) = self.coming.remove(&id) else {
            return;
        };
        self.read_hold();
        for of in &flows {
            let Some(fence) = self.fences.get_mut(&of.flow) else {
                continue;
            };
            fence.released = true;
            let (slot, mut held) = (fence.slot, std::mem::take(&mut fence.held));
            in_order(&mut held);
            for packet in &held {
                self.hold.replay(&packet.bytes);
                self.dataplane.programs.holds.replayed(slot);
            }
        }
        self.read_hold();
        // A flow that the process has closed since it resumed has no entry.
        let is_there = |of: &&FlowEpoch| self.dataplane.flow(&of.flow).is_some();
        let there: Vec<FlowEpoch> = flows.iter().filter(is_there).copied().collect();
        if let Err(error) = self.set_all(&there, NodeId(0), FlowState::Owned) {
            tracing::error!(%error, "flows stay in the hold's care");
        }
        self.dataplane.disband(convoy);
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        for of in &there {
            self.taken_at_ns.insert(of.flow, monotonic_ns());
        }
        for of in &flows {
            if let Some(fence) = self.fences.remove(&of.flow) {
                self.slots.give_back(fence.slot);
            }
        }
        // Flows that the process had closed at the donor did not move with it.
        self.unfence_all(id);
        self.ask_about_private();
    }

    /// Stops holding packets after a move was given up.
    pub(super) fn discard_fences(&mut self, id: MoveId) {
        self.unfence_all(id);
        if let Some(coming) = self.coming.remove(&id) {
            self.dataplane.disband(coming.convoy);
        }
    }

    fn unfence_all(&mut self, id: MoveId) {
        let of_move = self.fences.iter().filter(|(_, fence)| fence.id == id);
        let flows: Vec<Flow> = of_move.map(|(flow, _)| *flow).collect();
        flows.iter().for_each(|flow| self.unfence(flow));
    }

    fn unfence(&mut self, flow: &Flow) {
        if let Some(fence) = self.fences.remove(flow) {
            self.slots.give_back(fence.slot);
        }
        // Only an entry in transit to this node is removed: the flow may have become owned or a tombstone in another
        // way.
        if matches!(self.dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = self.dataplane.forget(flow)
        {
            tracing::warn!(%flow, %error, "a flow that is not coming stays in the table");
        }
    }

    /// Reports begun and ended flows to the holder. Changes of a moving process's flows wait until the move has ended.
    pub(super) fn report(&mut self, changes: Vec<Change>) {
        let machine = self.moves.machine();
        let moving = |change: &Change| machine.is_moving(&change.flow);
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
