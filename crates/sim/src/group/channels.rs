//! The channels between daemons: ordered while they live; when one breaks, what is under way is lost and both sides
//! learn of it, each in its own time.

use crate::time::Time;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
pub(super) struct Channel {
    pub(super) up: bool,
    pub(super) cut: bool,
    /// Counts the channel's lives.
    pub(super) life: u64,
    /// Sides that have not learned yet that it broke.
    pub(super) unaware: Vec<usize>,
    /// When the last frame arrives, per direction.
    last: [Time; 2],
}

#[derive(Debug, Default)]
pub(super) struct Channels(BTreeMap<(usize, usize), Channel>);

impl Channels {
    pub(super) fn between(&mut self, a: usize, b: usize) -> &mut Channel {
        self.0.entry((a.min(b), a.max(b))).or_default()
    }
}

impl Channel {
    /// It is up, and nothing is under way.
    pub(super) fn begin(&mut self, now: Time) {
        self.up = true;
        self.last = [now; 2];
    }

    /// When a frame arrives that would arrive then, behind those before it.
    pub(super) fn behind(&mut self, (from, to): (usize, usize), arrival: Time) -> Time {
        let last = &mut self.last[usize::from(from > to)];
        *last = arrival.max(*last);
        *last
    }
}

/// Every two of so many nodes.
pub(crate) fn pairs(nodes: usize) -> Vec<(usize, usize)> {
    let of = |a| (a + 1..nodes).map(move |b| (a, b));
    (0..nodes).flat_map(of).collect()
}
