//! The channels between daemons: ordered while they are up. When a channel breaks, the frames in transit are lost and
//! each side learns of it after its own delay.

use crate::time::Time;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
pub(super) struct Channel {
    pub(super) up: bool,
    pub(super) is_cut: bool,
    /// Number of times that the channel has broken.
    pub(super) incarnation: u64,
    /// Sides that have not yet learned that the channel broke.
    pub(super) not_notified: Vec<usize>,
    /// Arrival time of the last frame, per direction.
    last_arrivals: [Time; 2],
}

#[derive(Debug, Default)]
pub(super) struct Channels(BTreeMap<(usize, usize), Channel>);

impl Channels {
    pub(super) fn between(&mut self, a: usize, b: usize) -> &mut Channel {
        self.0.entry((a.min(b), a.max(b))).or_default()
    }
}

impl Channel {
    /// Sets the channel up, with no frames in transit.
    pub(super) fn set_up(&mut self, now: Time) {
        self.up = true;
        self.last_arrivals = [now; 2];
    }

    /// Returns the arrival time of a frame that would arrive at `arrival`, not before earlier frames.
    pub(super) fn arrival_in_order(&mut self, (from, to): (usize, usize), arrival: Time) -> Time {
        let last = &mut self.last_arrivals[usize::from(from > to)];
        *last = arrival.max(*last);
        *last
    }
}

/// Returns all pairs of nodes.
pub(crate) fn pairs(nodes: usize) -> Vec<(usize, usize)> {
    let pairs_with = |a| (a + 1..nodes).map(move |b| (a, b));
    (0..nodes).flat_map(pairs_with).collect()
}
