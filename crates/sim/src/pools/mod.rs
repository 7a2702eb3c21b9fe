//! Reliable Server Pooling: the registrars, pool elements and pool users of `holdfast-proto`, unchanged, over associations of a
//! simulated network, with the requests of paper 004 section 4.
//!
//! [`run`] carries a [`Config`] out with a seed and gives an [`Outcome`].

mod associations;
mod bug;
mod choosers;
mod config;
mod elements;
mod measure;
mod node;
mod oracle;
mod plan;
mod registrars;
mod timers;
mod users;
mod world;

pub use bug::Bug;
pub use config::{Action, Choice, Config, Requests, Sharing, Workload, Zone};
pub use measure::{Outcome, Window};
pub use oracle::Demands;

use crate::Violation;

/// Simulates with a seed: the same two give the same outcome, always.
#[must_use]
pub fn run(config: &Config, seed: u64) -> Outcome {
    world::World::new(config, seed).run().0
}

/// The same with [`Config::demands`], up to the first that is not met.
///
/// # Errors
/// What was not as it must be.
pub fn try_run(config: &Config, seed: u64) -> Result<Outcome, Violation> {
    match world::World::new(config, seed).run() {
        (_, Some(violation)) => Err(violation),
        (outcome, None) => Ok(outcome),
    }
}
