//! Reliable Server Pooling: the unmodified registrars, pool elements and pool users of `holdfast-proto`, over
//! associations of a simulated network, with the requests of paper 004 section 4.
//!
//! [`run`] simulates a [`PoolRunConfig`] with a seed and returns an [`PoolRunOutcome`].

mod associations;
mod bug;
mod choosers;
mod config;
mod elements;
mod measurements;
pub mod node_numbers;
mod oracle;
mod plan;
mod registrars;
mod timers;
mod users;
mod world;

pub use bug::PoolBug;
pub use config::{
    ElementChoice, ObservationSharing, PoolAction, PoolRunConfig, RequestGenerator, Workload,
    ZoneConfig,
};
pub use measurements::{MeasurementWindow, PoolRunOutcome};
pub use oracle::Invariants;

use crate::Violation;

/// Simulates a config with a seed: the same two always give the same outcome.
#[must_use]
pub fn run(config: &PoolRunConfig, seed: u64) -> PoolRunOutcome {
    world::PoolWorld::new(config, seed).run().0
}

/// Simulates a config and checks [`PoolRunConfig::invariants`], up to the first violation.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(config: &PoolRunConfig, seed: u64) -> Result<PoolRunOutcome, Violation> {
    match world::PoolWorld::new(config, seed).run() {
        (_, Some(violation)) => Err(violation),
        (outcome, None) => Ok(outcome),
    }
}
