//! Tombstones: entries of moved flows, which forward stragglers for a while.

use std::collections::VecDeque;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_wire::Flow;

/// Time for which stragglers are forwarded, in seconds; longer than a segment lives in practice.
const TOMBSTONE_S: u32 = 30;

/// Tombstones in the order in which the flows moved.
#[derive(Default)]
pub struct Tombstones(VecDeque<(u32, Tombstone)>);

/// A moved flow, and the epoch of the move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    pub flow: Flow,
    pub epoch: u32,
}

impl Tombstones {
    /// Adds a moved flow.
    pub fn add(&mut self, now_s: u32, tombstone: Tombstone) {
        self.0.push_back((now_s + TOMBSTONE_S, tombstone));
    }

    /// Takes the tombstones whose time is over.
    pub fn take_expired(&mut self, now_s: u32) -> Vec<Tombstone> {
        let expired = self.0.partition_point(|(until_s, _)| *until_s <= now_s);
        self.0
            .drain(..expired)
            .map(|(_, tombstone)| tombstone)
            .collect()
    }
}

impl Tombstone {
    /// Returns true if a flow's entry is this tombstone's. The flow may have moved back meanwhile, and away
    /// again, which makes another tombstone with its own time.
    pub fn matches_entry(&self, state: FlowState, epoch: u32) -> bool {
        state == FlowState::Moved && epoch == self.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tombstone(epoch: u32) -> Tombstone {
        let flow = "tcp:10.0.0.1:80-10.0.0.2:5000".parse().expect("a flow");
        Tombstone { flow, epoch }
    }

    #[test]
    fn flow_that_moves_twice_is_forwarded_for_full_time() {
        let mut tombstones = Tombstones::default();
        tombstones.add(100, tombstone(1));
        tombstones.add(120, tombstone(3));
        assert_eq!(tombstones.take_expired(129), []);
        let [first] = tombstones.take_expired(130)[..] else {
            panic!("one is due");
        };
        assert!(
            !first.matches_entry(FlowState::Moved, 3),
            "the later one stays"
        );
        let [second] = tombstones.take_expired(150)[..] else {
            panic!("one is due");
        };
        assert!(second.matches_entry(FlowState::Moved, 3));
    }

    #[test]
    fn returned_flow_is_not_removed() {
        assert!(!tombstone(1).matches_entry(FlowState::Owned, 2));
        assert!(!tombstone(1).matches_entry(FlowState::Owned, 1));
    }
}
