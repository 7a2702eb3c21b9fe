//! The range of loads per request for which a statement holds.

use super::{LOADS, check, simulate_seeds};
use crate::repro::{Check, Settings};
use holdfast_sim::pools::{Config, Outcome};

/// Seeds of each point; a range does not need the precision of more.
const SEEDS: u32 = 6;

/// Simulates the configurations of a statement with every load, and lists the loads for which the statement holds. The
/// check holds if the statement does for any load, because the paper does not state its load.
pub(super) fn sweep(
    settings: &Settings,
    statement: &str,
    configs: &[Config],
    holds: impl Fn(&[Vec<Outcome>]) -> bool,
) -> Check {
    let with = |load: &f64| {
        let load = *load;
        configs.iter().cloned().map(move |mut config| {
            config.load_per_request = load;
            config
        })
    };
    let all: Vec<Config> = LOADS.iter().flat_map(with).collect();
    let outcomes = simulate_seeds(settings, settings.repeats.unwrap_or(SEEDS).min(SEEDS), &all);
    let each = LOADS.iter().zip(outcomes.chunks(configs.len()));
    let held: Vec<String> = each
        .filter(|(_, outcomes)| holds(outcomes))
        .map(|(load, _)| load.to_string())
        .collect();
    let tried = LOADS.map(|load| load.to_string()).join(", ");
    let seen = match held.as_slice() {
        [] => format!("with none of {tried}"),
        some => format!("with {}, of {tried}", some.join(", ")),
    };
    let range = format!("loads for each request with which: {statement}");
    check(range, !held.is_empty(), seen)
}
