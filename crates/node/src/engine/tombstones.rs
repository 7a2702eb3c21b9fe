//! Tombstones: entries of moved flows, which forward stragglers for a while.

use std::collections::VecDeque;

use holdfast_bpf::shared::FlowState;
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
    pub fn due(&mut self, now_s: u32) -> Vec<Tombstone> {
        let due = self.0.partition_point(|(until_s, _)| *until_s <= now_s);
        self.0
            .drain(..due)
            .map(|(_, tombstone)| tombstone)
            .collect()
    }
}

impl Tombstone {
    /// Returns true if a flow's entry is this tombstone's. The flow may have moved back meanwhile, and away
    /// again, which makes another tombstone with its own time.
    pub fn is(&self, state: FlowState, epoch: u32) -> bool {
        state == FlowState::Moved && epoch == self.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(epoch: u32) -> Tombstone {
        let flow = "tcp:10.0.0.1:80-10.0.0.2:5000".parse().expect("a flow");
        Tombstone { flow, epoch }
    }

    #[test]
    fn a_flow_that_leaves_again_is_forwarded_as_long_as_the_first_time() {
        let mut tombstones = Tombstones::default();
        tombstones.add(100, left(1));
        tombstones.add(120, left(3));
        assert_eq!(tombstones.due(129), []);
        let [first] = tombstones.due(130)[..] else {
            panic!("one is due");
        };
        assert!(!first.is(FlowState::Moved, 3), "the later one stays");
        let [second] = tombstones.due(150)[..] else {
            panic!("one is due");
        };
        assert!(second.is(FlowState::Moved, 3));
    }

    #[test]
    fn a_flow_that_came_back_stays() {
        assert!(!left(1).is(FlowState::Owned, 2));
        assert!(!left(1).is(FlowState::Owned, 1));
    }
}
