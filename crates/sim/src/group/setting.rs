//! What may happen.

use crate::random::Random;
use crate::time::Time;
use serde::Deserialize;

/// What may happen to a group; each seed draws from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Nodes, one of which keeps the records.
    pub nodes: Span,
    /// Flows: all that there are where they are handed off, those at first where processes have them.
    pub flows: Span,
    /// How often somebody asks for a handoff or a migration.
    pub requests: Span,
    /// The time in which that is, and in which things fail.
    pub runtime: Time,
    /// By then nothing may go on any more, counted from the start.
    pub rest: Time,
    /// What happens because of a request begins so soon after it, at the latest.
    pub soon: Time,
    /// With each request so often: a daemon dies soon, and comes back within 0.7 s.
    pub crash: f64,
    /// A channel is cut soon, and mended within 1.5 s.
    pub cut: f64,
    /// A flow is closed soon.
    pub close: f64,
    /// A client connects soon, or tries to: five times so often.
    pub open: f64,
    /// What fails of itself.
    pub faults: Faults,
}

/// What fails of itself, without being planned.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// The share of seeds with channels that lose, repeat and reorder single frames, which real ones never do.
    pub hostile: f64,
    /// The share of frames that these lose,
    pub lost: f64,
    /// repeat,
    pub repeated: f64,
    /// and let overtake others.
    pub reordered: f64,
    /// The share of seeds in which daemons fail to carry commands out.
    pub failing: f64,
    /// The share of commands that fail there.
    pub failed: f64,
    /// The share of frames that take up to 200 ms instead of 0.6.
    pub slow_frames: f64,
    /// The share of commands that take up to 400 ms.
    pub slow_commands: f64,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults::DEFAULT
    }
}

impl Faults {
    /// Much fails.
    pub const DEFAULT: Faults = Faults {
        hostile: 0.3,
        lost: 0.03,
        repeated: 0.03,
        reordered: 0.05,
        failing: 0.5,
        failed: 0.04,
        slow_frames: 0.03,
        slow_commands: 0.02,
    };

    /// Nothing fails.
    pub const NONE: Faults = Faults {
        hostile: 0.0,
        lost: 0.0,
        repeated: 0.0,
        reordered: 0.0,
        failing: 0.0,
        failed: 0.0,
        slow_frames: 0.0,
        slow_commands: 0.0,
    };

    /// All of them.
    pub(crate) fn shares(&self) -> [f64; 8] {
        [
            self.hostile,
            self.lost,
            self.repeated,
            self.reordered,
            self.failing,
            self.failed,
            self.slow_frames,
            self.slow_commands,
        ]
    }
}

/// From the least to the most, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(from = "SpanText")]
pub struct Span {
    /// The least.
    pub least: u32,
    /// The most.
    pub most: u32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SpanText {
    One(u32),
    Two([u32; 2]),
}

impl From<SpanText> for Span {
    fn from(text: SpanText) -> Span {
        match text {
            SpanText::One(number) => Span::new(number, number),
            SpanText::Two([least, most]) => Span::new(least, most),
        }
    }
}

impl Span {
    /// From the least to the most.
    #[must_use]
    pub const fn new(least: u32, most: u32) -> Span {
        Span { least, most }
    }

    /// One of them.
    pub(crate) fn draw(self, random: &mut Random) -> usize {
        random.between(u64::from(self.least), u64::from(self.most) + 1) as usize
    }

    /// Whether all of them are within others.
    pub(crate) fn is_within(self, least: u32, most: u32) -> bool {
        least <= self.least && self.least <= self.most && self.most <= most
    }
}
