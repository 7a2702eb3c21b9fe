//! The flows of a process that moves: what of their packets passes, waits, or goes on to the other node.

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

/// A flow of a process that comes: its packets wait.
pub struct Fence {
    id: MoveId,
    slot: u32,
    epoch: u32,
    held: Vec<HeldPacket>,
    /// Packets no longer wait, but go to the stack.
    released: bool,
}

/// The flows of a process that is about to stop here.
pub struct Leaving {
    to: NodeId,
    flows: Vec<FlowEpoch>,
    convoy: Convoy,
}

/// The flows of a process that is to run here.
#[derive(Default)]
pub struct Coming {
    convoy: Convoy,
    /// Those that are not at the epochs at which their packets wait.
    odd: Vec<FlowEpoch>,
    /// When they are this node's.
    flows: Vec<FlowEpoch>,
}

/// All of them.
pub type Fences = HashMap<Flow, Fence, RandomState>;

/// Where what comes for a process on its way from here goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Data to the acceptor; what acknowledges comes here, as long as the process runs.
    Leaves,
    /// All to the acceptor: it stands still.
    Stands,
}

impl Engine {
    /// The flows of this node that come to these sockets.
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

    /// Those of these flows that are this node's.
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

    /// Datagram flows that begin while processes are on their way from here may be theirs.
    pub(super) fn note_newcomer(&mut self, flow: Flow) {
        if flow.protocol == Protocol::Udp {
            (self.newcomers.values_mut()).for_each(|newcomers| newcomers.push(flow));
        }
    }

    /// From now on packets of these flows wait here.
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

    /// The process is about to be committed with these: the next epoch of each is that of its fence, unless it is odd.
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

    /// A packet that waited for a flow of a process; given back if there is no such flow.
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

    /// Flows of a process that is about to stop here. What comes for them comes here still.
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

    /// What comes for a process on its way from here goes to where it says; that is undone where it stays a while longer.
    pub(super) fn turn_flows(&self, id: MoveId, turn: Turn) -> Result<(), String> {
        let leaving = self.leaving.get(&id).ok_or("the move was given up")?;
        let state = match turn {
            Turn::Leaves => FlowState::Leaving,
            Turn::Stands => FlowState::TransitOut,
        };
        self.dataplane.turn(leaving.convoy, state, leaving.to, 0);
        Ok(())
    }

    /// The process has left, or stays: each of its flows is by itself again, those that closed meanwhile too.
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

    /// The flows stay here; those that are closing too, until their last packets have come.
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

    /// The flows are another node's: stragglers go on to it for a while.
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

    /// The flows are this node's; their packets wait until the process runs.
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
            // What an earlier daemon had put together.
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

    /// The process runs: what waited comes, in order.
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
        // What the process has closed since it runs has no entry any more.
        let is_there = |of: &&FlowEpoch| self.dataplane.flow(&of.flow).is_some();
        let there: Vec<FlowEpoch> = flows.iter().filter(is_there).copied().collect();
        if let Err(error) = self.set_all(&there, NodeId(0), FlowState::Owned) {
            tracing::error!(%error, "flows stay in the hold's care");
        }
        self.dataplane.disband(convoy);
        // What slipped into the hold between the last look and the change.
        self.read_hold();
        for of in &there {
            self.taken_at_ns.insert(of.flow, monotonic_ns());
        }
        for of in &flows {
            if let Some(fence) = self.fences.remove(&of.flow) {
                self.slots.give_back(fence.slot);
            }
        }
        // What the process had closed at the donor did not come with it.
        self.unfence_all(id);
        self.ask_about_private();
    }

    /// The process does not come.
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
        // Only our own arming is undone: the flow may have become ours, or a tombstone, in another way.
        if matches!(self.dataplane.flow(flow), Some((FlowState::TransitIn, _)))
            && let Err(error) = self.dataplane.forget(flow)
        {
            tracing::warn!(%flow, %error, "a flow that is not coming stays in the table");
        }
    }

    /// Reports what began and ended to the holder; what moves with a process waits until it has.
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
