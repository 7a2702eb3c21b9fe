//! The channels between daemons: ordered while they live; when one breaks, what is under way is lost and both sides
//! learn of it, each in its own time. A hostile net also reorders, repeats and loses single frames, which a real
//! channel never does.

use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug, Clone, Default)]
pub struct Channel {
    pub up: bool,
    pub cut: bool,
    /// Counts the channel's lives.
    pub life: u64,
    /// Sides that have not learned yet that it broke.
    pub unaware: Vec<usize>,
    /// When the last frame arrives, per direction.
    pub last: [Duration; 2],
}

#[derive(Debug, Default)]
pub struct Net {
    channels: BTreeMap<(usize, usize), Channel>,
}

impl Net {
    pub fn channel(&mut self, a: usize, b: usize) -> &mut Channel {
        self.channels.entry((a.min(b), a.max(b))).or_default()
    }

    pub fn pairs(nodes: usize) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for a in 0..nodes {
            for b in a + 1..nodes {
                pairs.push((a, b));
            }
        }
        pairs
    }
}
