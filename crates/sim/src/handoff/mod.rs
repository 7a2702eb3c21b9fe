//! Handoff of flows: the unmodified handoff state machines of `holdfast-proto` on all nodes of a group, and the actions
//! of their daemons in steps, between which a daemon may die.
//!
//! A socket's state is the number of bytes it has processed. After every event the oracle checks that exactly the node
//! in the record may send for a flow, that this node has every byte of the flow, and that epochs only grow. At the end
//! every live flow has one owner.

mod actors;
mod bug;
mod daemon;
mod frames;
mod node;
mod oracle;
#[cfg(test)]
mod tests;
mod world;

pub use bug::Bug;

use crate::Violation;
use crate::group::{self, Faults, Outcome, Setting, Span};
use crate::time::Time;
use world::World;

/// The part of a config specific to handoffs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandoffConfig {
    /// Maximum number of flows per batch, a setting of the state machines.
    pub batch_flows_max: usize,
    /// The deliberate bug, if any.
    pub bug: Option<Bug>,
}

/// Configuration of a run.
pub type Config = group::Config<HandoffConfig>;

/// Three to five nodes, with a few flows that are handed around for two seconds.
pub const DEFAULT: Setting = Setting {
    nodes: Span::new(3, 5),
    flows: Span::new(2, 8),
    requests: Span::new(3, 13),
    runtime: Time::from_micros(2_000_000),
    idle_deadline: Time::from_micros(200_000_000),
    action_delay_max: Time::from_micros(2_500),
    crash: 0.4,
    cut: 0.25,
    close: 0.3,
    open: 0.1,
    faults: Faults::DEFAULT,
};

/// Derives a config from a setting and a seed.
#[must_use]
pub fn schedule(setting: &Setting, seed: u64, bug: Option<Bug>) -> Config {
    group::schedule(setting, seed, &[], |random, _| HandoffConfig {
        batch_flows_max: random.between(1, 5) as usize,
        bug,
    })
}

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &Config,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<Outcome, Violation> {
    group::try_run::<World>(config, seed, trace)
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &Setting,
    seed: u64,
    bug: Option<Bug>,
) -> Option<group::Failure<HandoffConfig>> {
    group::shrink::<World>(schedule(setting, seed, bug), seed)
}
