//! Flows that an earlier daemon left in the middle of a handoff, until their server programs reclaim them.

use std::collections::HashMap;
use std::time::Duration;

use holdfast_wire::{Epoch, Flow};

/// Time for a server program to reclaim its flows after their fate is known.
const RECLAIM_MAX: Duration = Duration::from_secs(30);

/// All flows that no server program has reclaimed yet.
#[derive(Debug, Default)]
pub struct RecoveredFlows(HashMap<Flow, UnreclaimedFlow>);

/// A flow that an earlier daemon left in the middle of a handoff, until its server program reclaims it.
#[derive(Debug, Default)]
pub struct UnreclaimedFlow {
    /// Slot of the hold counters; 0 for a donated flow.
    pub slot: u32,
    /// Fate of the flow, once known.
    pub verdict: Option<RecoveryVerdict>,
    /// True if the program already uses the flow and will not reclaim it.
    in_use: bool,
    deadline: Option<Duration>,
}

/// Fate of a recovered flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecoveryVerdict {
    /// The flow was being donated, and stays at this node.
    Kept,
    /// The flow was being donated, and moved to another node.
    Moved {
        /// Name of the node that took the flow.
        to: String,
    },
    /// The flow was arriving, and this node owns it at this epoch.
    Owned(Epoch),
    /// The flow was arriving, and was given up.
    Cancelled,
}

impl RecoveredFlows {
    /// Adds a flow with its slot of the hold counters, which is 0 for a donated flow.
    pub fn add(&mut self, flow: Flow, slot: u32) {
        let unreclaimed = UnreclaimedFlow {
            slot,
            ..UnreclaimedFlow::default()
        };
        self.0.insert(flow, unreclaimed);
    }

    /// Returns true if a flow waits for its program.
    pub fn contains(&self, flow: &Flow) -> bool {
        self.0.contains_key(flow)
    }

    /// Takes a flow that its program reclaims or that needs no program. The caller frees the flow's hold slot.
    pub fn remove(&mut self, flow: &Flow) -> Option<UnreclaimedFlow> {
        self.0.remove(flow)
    }

    /// Records a flow's fate at the machine's time `now`, unless the flow does not wait for its program. Returns the
    /// hold slot to free: the flow's, if no packet will be held for the flow again, else 0.
    pub fn set_verdict(&mut self, now: Duration, flow: &Flow, verdict: RecoveryVerdict) -> u32 {
        let Some(unreclaimed) = self.0.get_mut(flow) else {
            return 0;
        };
        let freed_slot = match verdict {
            RecoveryVerdict::Cancelled => std::mem::take(&mut unreclaimed.slot),
            _ => 0,
        };
        unreclaimed.verdict = Some(verdict);
        unreclaimed.deadline = Some(now + RECLAIM_MAX);
        freed_slot
    }

    /// Returns true if the flow's program already uses the flow.
    pub fn is_in_use(&self, flow: &Flow) -> bool {
        self.0
            .get(flow)
            .is_some_and(|unreclaimed| unreclaimed.in_use)
    }

    /// Records that a program uses a flow. Returns the epoch at which this node owns the flow, if the flow only has to
    /// be marked as owned.
    pub fn on_in_use(&mut self, flow: &Flow) -> Option<Epoch> {
        let unreclaimed = self.0.get_mut(flow)?;
        unreclaimed.in_use = true;
        match unreclaimed.verdict {
            Some(RecoveryVerdict::Owned(epoch)) => Some(epoch),
            Some(_) => {
                self.0.remove(flow);
                None
            }
            None => None,
        }
    }

    /// Takes the flows whose programs did not reclaim them in time.
    pub fn take_overdue(&mut self, now: Duration) -> Vec<(Flow, UnreclaimedFlow)> {
        let overdue: Vec<Flow> = self
            .0
            .iter()
            .filter(|(_, unreclaimed)| unreclaimed.deadline.is_some_and(|until| until <= now))
            .map(|(flow, _)| *flow)
            .collect();
        overdue
            .into_iter()
            .filter_map(|flow| Some((flow, self.0.remove(&flow)?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(5);

    fn recovered(slot: u32) -> (RecoveredFlows, Flow) {
        let flow = "tcp:10.0.0.1:80-10.0.0.2:5000".parse().expect("a flow");
        let mut flows = RecoveredFlows::default();
        flows.add(flow, slot);
        (flows, flow)
    }

    #[test]
    fn cancelled_flow_frees_its_slot_once() {
        let (mut flows, flow) = recovered(7);
        assert_eq!(flows.set_verdict(NOW, &flow, RecoveryVerdict::Cancelled), 7);
        assert_eq!(flows.set_verdict(NOW, &flow, RecoveryVerdict::Cancelled), 0);
        let unreclaimed = flows.remove(&flow).expect("still waits for its program");
        assert_eq!(unreclaimed.slot, 0);
    }

    #[test]
    fn flow_in_use_is_owned_when_verdict_is_known() {
        let (mut flows, flow) = recovered(7);
        assert_eq!(flows.on_in_use(&flow), None);
        assert!(flows.is_in_use(&flow));
        flows.set_verdict(NOW, &flow, RecoveryVerdict::Owned(3));
        assert_eq!(flows.on_in_use(&flow), Some(3));
        assert!(flows.contains(&flow));
    }

    #[test]
    fn kept_flow_in_use_needs_no_reclaim() {
        let (mut flows, flow) = recovered(0);
        flows.set_verdict(NOW, &flow, RecoveryVerdict::Kept);
        assert_eq!(flows.on_in_use(&flow), None);
        assert!(!flows.contains(&flow));
    }

    #[test]
    fn flow_is_overdue_only_after_its_verdict() {
        let (mut flows, flow) = recovered(7);
        assert!(flows.take_overdue(NOW + 2 * RECLAIM_MAX).is_empty());
        flows.set_verdict(NOW, &flow, RecoveryVerdict::Owned(3));
        assert!(flows.take_overdue(NOW).is_empty());
        assert_eq!(flows.take_overdue(NOW + RECLAIM_MAX).len(), 1);
        assert!(!flows.contains(&flow));
    }
}
