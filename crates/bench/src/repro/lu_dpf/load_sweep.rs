//! The range of loads per request for which a statement holds.

use super::{LOADS_PER_REQUEST, check_statement, simulate_seeds};
use crate::repro::{ExperimentSettings, StatementCheck};
use holdfast_sim::pools::{PoolRunConfig, PoolRunOutcome};

/// Seeds of each point; a range does not need the precision of more.
const SEEDS: u32 = 6;

/// Simulates the configurations of a statement with every load, and lists the loads for which the statement holds. The
/// check holds if the statement does for any load, because the paper does not state its load.
pub(super) fn sweep_load_per_request(
    settings: &ExperimentSettings,
    statement: &str,
    configs: &[PoolRunConfig],
    holds: impl Fn(&[Vec<PoolRunOutcome>]) -> bool,
) -> StatementCheck {
    let configs_with_load = |load: &f64| {
        let load = *load;
        configs.iter().cloned().map(move |mut config| {
            config.load_per_request = load;
            config
        })
    };
    let all: Vec<PoolRunConfig> = LOADS_PER_REQUEST
        .iter()
        .flat_map(configs_with_load)
        .collect();
    let outcomes = simulate_seeds(settings, settings.repeats.unwrap_or(SEEDS).min(SEEDS), &all);
    let each = LOADS_PER_REQUEST.iter().zip(outcomes.chunks(configs.len()));
    let holding_loads: Vec<String> = each
        .filter(|(_, outcomes)| holds(outcomes))
        .map(|(load, _)| load.to_string())
        .collect();
    let loads_tried = LOADS_PER_REQUEST.map(|load| load.to_string()).join(", ");
    let seen = match holding_loads.as_slice() {
        [] => format!("with none of {loads_tried}"),
        some => format!("with {}, of {loads_tried}", some.join(", ")),
    };
    let range = format!("for some load per request: {statement}");
    check_statement(range, !holding_loads.is_empty(), seen)
}
