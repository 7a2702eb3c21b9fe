//! Reliable Server Pooling: the registrars, pool elements and pool users of `holdfast-proto`, unchanged, over associations of a
//! simulated network, with the requests of paper 004 section 4.
//!
//! [`run`] carries a [`Config`] out with a seed and gives an [`Outcome`].

mod associations;
mod config;
mod elements;
mod measure;
mod node;
mod plan;
mod registrars;
mod users;
mod world;

pub use config::{Action, Choice, Config, Workload, Zone};
pub use measure::{Outcome, Window};

/// Simulates with a seed: the same two give the same outcome, always.
#[must_use]
pub fn run(config: &Config, seed: u64) -> Outcome {
    world::World::new(config, seed).run()
}
