//! Flows that change hands: the handoff machines of `holdfast-proto`, unchanged, of all nodes of a group, with what their daemons do for
//! them, step by step: they may die between two.
//!
//! A socket's state is how many bytes it has seen. The oracle looks after every event: one node speaks for a flow, the one that
//! the record names, with every byte that the flow has seen; epochs only grow. In the end every flow that lives has one owner.

mod bug;
mod daemon;
mod frames;
mod node;
mod oracle;
mod people;
#[cfg(test)]
mod tests;
mod world;

pub use bug::Bug;

use crate::Violation;
use crate::group::{self, Faults, Outcome, Setting, Span};
use crate::time::Time;
use world::World;

/// What is peculiar to handoffs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// What the machines are told: the most flows that move together.
    pub batch_flows_max: usize,
    /// What is broken on purpose.
    pub bug: Option<Bug>,
}

/// What happens.
pub type Config = group::Config<Own>;

/// Three to five nodes, with a few flows that go round for two seconds.
pub const DEFAULT: Setting = Setting {
    nodes: Span::new(3, 5),
    flows: Span::new(2, 8),
    requests: Span::new(3, 13),
    runtime: Time::from_micros(2_000_000),
    rest: Time::from_micros(200_000_000),
    soon: Time::from_micros(2_500),
    crash: 0.4,
    cut: 0.25,
    close: 0.3,
    open: 0.1,
    faults: Faults::DEFAULT,
};

/// What a seed makes of a setting.
#[must_use]
pub fn schedule(setting: &Setting, seed: u64, bug: Option<Bug>) -> Config {
    group::schedule(setting, seed, &[], |random, _| Own {
        batch_flows_max: random.between(1, 5) as usize,
        bug,
    })
}

/// Simulates with a seed: the same two give the same outcome, always. With `trace`, every event and what each machine says
/// becomes a line of it.
///
/// # Errors
/// What was not as it must be.
pub fn try_run(
    config: &Config,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<Outcome, Violation> {
    group::try_run::<World>(config, seed, trace)
}

/// The least of what a failing seed has with which it still fails. None: it comes right.
#[must_use]
pub fn shrink(setting: &Setting, seed: u64, bug: Option<Bug>) -> Option<group::Failure<Own>> {
    group::shrink::<World>(schedule(setting, seed, bug), seed)
}
