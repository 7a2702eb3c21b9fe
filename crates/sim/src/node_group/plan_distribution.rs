//! The possible actions and faults of a group.

use crate::random::Random;
use crate::time::Time;
use serde::Deserialize;

/// The possible actions and faults of a group; each seed draws from it.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanDistribution {
    /// Number of nodes, of which one holds the records.
    pub nodes: CountRange,
    /// Number of flows: for handoffs the total, for migrations the initial number.
    pub flows: CountRange,
    /// Number of requests for a handoff or a migration.
    pub requests: CountRange,
    /// Duration of the requests and faults.
    pub runtime: Time,
    /// Time, from the start, by which all activity must have ended.
    pub idle_deadline: Time,
    /// Maximum delay between a request and the actions that accompany it.
    pub action_delay_max: Time,
    /// Probability, per request, that a daemon dies soon after; it restarts within 0.7 s.
    pub crash: f64,
    /// Probability, per request, that a channel is cut soon after; it is mended within 1.5 s.
    pub cut: f64,
    /// Probability, per request, that a flow is closed soon after.
    pub close: f64,
    /// Probability of each of five attempts per request that a client connects soon after.
    pub open: f64,
    /// Frequencies of unplanned faults.
    pub faults: FaultFrequencies,
}

/// Frequencies of unplanned faults.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultFrequencies {
    /// Share of seeds with channels that lose, repeat and reorder single frames, which real channels never do.
    pub hostile: f64,
    /// Share of frames that such channels lose.
    pub lost: f64,
    /// Share of frames that such channels repeat.
    pub repeated: f64,
    /// Share of frames that such channels let overtake others.
    pub reordered: f64,
    /// Share of seeds in which daemons fail to execute commands.
    pub failing: f64,
    /// Share of commands that fail in such seeds.
    pub failed: f64,
    /// Share of frames that take up to 200 ms instead of 0.6 ms.
    pub slow_frames: f64,
    /// Share of commands that take up to 400 ms.
    pub slow_commands: f64,
}

impl Default for FaultFrequencies {
    fn default() -> FaultFrequencies {
        FaultFrequencies::DEFAULT
    }
}

impl FaultFrequencies {
    /// Many faults.
    pub const DEFAULT: FaultFrequencies = FaultFrequencies {
        hostile: 0.3,
        lost: 0.03,
        repeated: 0.03,
        reordered: 0.05,
        failing: 0.5,
        failed: 0.04,
        slow_frames: 0.03,
        slow_commands: 0.02,
    };

    /// No faults.
    pub const NONE: FaultFrequencies = FaultFrequencies {
        hostile: 0.0,
        lost: 0.0,
        repeated: 0.0,
        reordered: 0.0,
        failing: 0.0,
        failed: 0.0,
        slow_frames: 0.0,
        slow_commands: 0.0,
    };

    /// Returns the shares of all faults, in the order of the fields.
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

/// A range of numbers, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(from = "SpanText")]
pub struct CountRange {
    /// The smallest number.
    pub least: u32,
    /// The largest number.
    pub most: u32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SpanText {
    One(u32),
    Two([u32; 2]),
}

impl From<SpanText> for CountRange {
    fn from(text: SpanText) -> CountRange {
        match text {
            SpanText::One(number) => CountRange::new(number, number),
            SpanText::Two([least, most]) => CountRange::new(least, most),
        }
    }
}

impl CountRange {
    /// Creates a range, both ends included.
    #[must_use]
    pub const fn new(least: u32, most: u32) -> CountRange {
        CountRange { least, most }
    }

    /// Draws a number of the range.
    pub(crate) fn draw(self, random: &mut Random) -> usize {
        random.between(u64::from(self.least), u64::from(self.most) + 1) as usize
    }

    /// Returns true if the range is valid and within these limits.
    pub(crate) fn is_within(self, least: u32, most: u32) -> bool {
        least <= self.least && self.least <= self.most && self.most <= most
    }
}
