//! In which range of the load that one request adds a statement holds.

use super::{LOADS, check, simulate_seeds};
use crate::repro::{Check, Settings};
use holdfast_sim::pools::{Config, Outcome};

/// Seeds of each point: a range is not so fine.
const SEEDS: u32 = 6;

/// Simulates the configurations that a statement is about with every load, and says with which it holds. It is told, not
/// demanded: the paper does not say what its load was. It holds if it does so anywhere.
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
