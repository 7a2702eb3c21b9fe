//! History of this node's flows: arrivals by handoff, departures, ends that the holder has not confirmed, and reports that the
//! holder has refused.

use std::collections::HashMap;

use holdfast_wire::{Epoch, Flow, OwnershipChange};

use super::tombstones::{Tombstone, Tombstones};
use super::unrecorded_flows::UnrecordedFlows;
use crate::dataplane::{Dataplane, monotonic_ns, monotonic_s};

/// Time without an answer after which the end of a flow is reported again, in seconds. The machine repeats a report until
/// the holder has answered, except if this node leaves the group.
const REMOVAL_REPEAT_S: u32 = 600;

/// Facts about flows that neither the handoff machine nor the filters keep.
#[derive(Default)]
pub struct FlowHistory {
    /// Monotonic time at which a flow received by handoff became active; kept until the flow ends here.
    taken_at_ns: HashMap<Flow, u64>,
    /// Flows that have moved away, whose stragglers are still forwarded.
    tombstones: Tombstones,
    /// Flows of this node that the holder has refused to record.
    unrecorded: UnrecordedFlows,
    /// Closed flows whose records the holder is asked to remove, each with its epoch and the time of the report in seconds.
    removals: HashMap<Flow, (Epoch, u32)>,
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

    /// Records that the end of a flow is reported at `now_s` in seconds. Returns false if that report is under way already.
    pub fn begin_removal(&mut self, flow: Flow, epoch: Epoch, now_s: u32) -> bool {
        let is_new = self.removals.get(&flow).is_none_or(|(reported, at_s)| {
            *reported != epoch || now_s.saturating_sub(*at_s) >= REMOVAL_REPEAT_S
        });
        if is_new {
            self.removals.insert(flow, (epoch, now_s));
        }
        is_new
    }

    /// Records that the holder has answered the report of a flow's end.
    pub fn end_removal(&mut self, flow: &Flow) {
        self.removals.remove(flow);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_flow_is_reported_once_until_it_is_answered() {
        let flow: Flow = "tcp:10.0.0.1:80-10.0.0.2:5000".parse().expect("a flow");
        let mut history = FlowHistory::default();
        assert!(history.begin_removal(flow, 3, 100));
        assert!(!history.begin_removal(flow, 3, 110));
        assert!(history.begin_removal(flow, 4, 110), "a later connection");
        assert!(!history.begin_removal(flow, 4, 120));
        assert!(history.begin_removal(flow, 4, 110 + REMOVAL_REPEAT_S));
        history.end_removal(&flow);
        assert!(history.begin_removal(flow, 4, 800));
    }
}
