//! History of this node's flows: arrivals by handoff, departures, and reports that the holder has refused.

use std::collections::HashMap;

use holdfast_wire::{Epoch, Flow, OwnershipChange};

use super::tombstones::{Tombstone, Tombstones};
use super::unrecorded_flows::UnrecordedFlows;
use crate::dataplane::{Dataplane, monotonic_ns, monotonic_s};

/// Facts about flows that neither the handoff machine nor the filters keep.
#[derive(Default)]
pub struct FlowHistory {
    /// Monotonic time at which a flow received by handoff became active; kept until the flow ends here.
    taken_at_ns: HashMap<Flow, u64>,
    /// Flows that have moved away, whose stragglers are still forwarded.
    tombstones: Tombstones,
    /// Flows of this node that the holder has refused to record.
    unrecorded: UnrecordedFlows,
}

impl FlowHistory {
    /// Records that a flow received by handoff became active.
    pub fn on_taken(&mut self, flow: Flow) {
        self.taken_at_ns.insert(flow, monotonic_ns());
    }

    /// Returns the monotonic time at which a flow was received by handoff, in nanoseconds.
    pub fn taken_at_ns(&self, flow: &Flow) -> Option<u64> {
        self.taken_at_ns.get(flow).copied()
    }

    /// Forgets when a flow was received, because the flow has ended here or has moved away.
    pub fn on_end(&mut self, flow: &Flow) {
        self.taken_at_ns.remove(flow);
    }

    /// Remembers a flow that has moved away at this epoch, so that stragglers are forwarded for a while.
    pub fn add_tombstone(&mut self, flow: Flow, epoch: Epoch) {
        self.tombstones
            .add(monotonic_s(), Tombstone { flow, epoch });
    }

    /// Takes the tombstones whose time is over at `now_s` in seconds.
    pub fn take_expired_tombstones(&mut self, now_s: u32) -> Vec<Tombstone> {
        self.tombstones.take_expired(now_s)
    }

    /// Remembers a flow that the holder has refused to record.
    pub fn add_unrecorded(&mut self, change: OwnershipChange) {
        self.unrecorded.add(change);
    }

    /// Returns true if the holder has refused to record a flow.
    pub fn is_unrecorded(&self, flow: &Flow) -> bool {
        self.unrecorded.has(flow)
    }

    /// Takes the refused reports of flows that this node still owns, to be sent again.
    pub fn take_unrecorded(&mut self, dataplane: &Dataplane) -> Vec<OwnershipChange> {
        self.unrecorded.take_owned(dataplane)
    }
}
