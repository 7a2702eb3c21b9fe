//! Paper 004, "On Improving the Performance of Reliable Server Pooling Systems for Distance-Sensitive Distributed
//! Applications": its figures and its table, simulated with the machines of the daemons.
//!
//! The paper does not state the load that one request adds. The default is [`LOAD_PER_REQUEST`], and each statement is also tried
//! over [`LOADS_PER_REQUEST`].

pub(super) mod figure4_left;
pub(super) mod figure4_right;
pub(super) mod figure5;
mod live;
mod load_sweep;
pub(super) mod policy_comparison;
pub(super) mod table1;

use super::{Estimate, ExperimentSettings, Point, Series, StatementCheck};
use holdfast_sim::pools::{
    ElementChoice, MeasurementWindow, PoolRunConfig, PoolRunOutcome, Workload, ZoneConfig, run,
};
use holdfast_sim::{Time, seeds};

/// Seeds of each simulation: "each simulation has been repeated 24 times with different seeds" (section 6.1).
const SEEDS: u32 = 24;
/// Capacity of an element: "The capacity of a PE is 10^6 calculations/s" (section 6.1).
const CAPACITY: f64 = 1e6;
/// Utilisation: "a target system utilization of 60%" (section 6.2).
const UTILISATION: f64 = 0.6;
/// Delay within a LAN, milliseconds: "a fixed inter-component LAN delay of 10ms" (section 6.2).
const LAN_MS: f64 = 10.0;
/// DPF: "set it to a value slightly above 0 - e.g. 1 * 10^-5" (section 6.3).
const DPF: f64 = 1e-5;
/// Load that one request adds to an element, as a share of the whole: an element takes at most 200 requests. With 0.01,
/// DPF 15e-5 does not quite fall below plain LU if a quarter of the elements is left (Figure 5).
const LOAD_PER_REQUEST: f64 = 0.005;
/// Values tried for [`LOAD_PER_REQUEST`], up to the value of elements that take ten requests (rsplib's default).
const LOADS_PER_REQUEST: [f64; 8] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1];

/// Returns the policy with a DPF; with DPF 0, plain least used (section 6.2).
fn least_used_policy(dpf: f64) -> ElementChoice {
    match dpf {
        0.0 => ElementChoice::LeastUsed,
        _ => ElementChoice::LeastUsedDpf(dpf),
    }
}

/// Returns three LANs with `elements` elements each and `ratio` users per element; `size` is the request size as a
/// share of an element's capacity per second.
fn three_lans(elements: u32, ratio: u32, wan_ms: f64, dpf: f64, size: f64) -> PoolRunConfig {
    let users = elements * ratio;
    let zones = vec![ZoneConfig { elements, users }; 3];
    let size = CAPACITY * size;
    let workload = Workload::for_utilisation(CAPACITY, size, f64::from(ratio), UTILISATION);
    let mut config = PoolRunConfig::new(zones, LAN_MS, wan_ms, least_used_policy(dpf), workload);
    config.load_per_request = LOAD_PER_REQUEST;
    config
}

/// Simulates every configuration with every seed; the first index of the result is the configuration's.
fn simulate(settings: &ExperimentSettings, configs: &[PoolRunConfig]) -> Vec<Vec<PoolRunOutcome>> {
    simulate_seeds(settings, settings.repeats_or(SEEDS), configs)
}

fn simulate_seeds(
    settings: &ExperimentSettings,
    repeats: u32,
    configs: &[PoolRunConfig],
) -> Vec<Vec<PoolRunOutcome>> {
    let mut configs = configs.to_vec();
    if let Some(milliseconds) = settings.milliseconds {
        for config in &mut configs {
            config.runtime = Time::from_ms_f64(milliseconds as f64);
        }
    }
    let jobs: Vec<(usize, u64)> = (0..configs.len())
        .flat_map(|config| (1..=u64::from(repeats)).map(move |seed| (config, seed)))
        .collect();
    let all = jobs.len();
    let progress = |done: usize| {
        if done.is_multiple_of(100) || done == all {
            eprintln!("{done} of {all} simulations");
        }
    };
    let outcomes = seeds::run_all(
        &jobs,
        |(config, seed)| run(&configs[*config], *seed),
        progress,
    );
    let each = outcomes.chunks(repeats as usize);
    each.map(<[PoolRunOutcome]>::to_vec).collect()
}

/// Returns the estimate over the seeds for the first window.
fn estimate(outcomes: &[PoolRunOutcome], value_of: impl Fn(&MeasurementWindow) -> f64) -> Estimate {
    estimate_of(outcomes, 0, value_of)
}

fn estimate_of(
    outcomes: &[PoolRunOutcome],
    window: usize,
    value_of: impl Fn(&MeasurementWindow) -> f64,
) -> Estimate {
    let values: Vec<f64> = outcomes
        .iter()
        .map(|outcome| value_of(&outcome.windows[window]))
        .collect();
    Estimate::from_repeats(&values)
}

/// Returns the handling speed in per cent of an element's capacity: equation 1 with the means of size and delay. The
/// mean of the requests' own speeds says little about a LAN with users that wait for ever: such a mean weighs short and
/// long waits alike.
fn handling_speed(outcomes: &[PoolRunOutcome]) -> Estimate {
    estimate(outcomes, |window| 100.0 * window.speed() / CAPACITY)
}

fn utilisation(outcomes: &[PoolRunOutcome]) -> Estimate {
    estimate(outcomes, |window| 100.0 * window.utilisation())
}

/// Adds a point to the series of that name.
fn add_point(series: &mut Vec<Series>, name: String, x: f64, ours: Estimate, paper: Option<f64>) {
    let point = Point { x, ours, paper };
    match series.iter_mut().find(|one| one.name == name) {
        Some(one) => one.points.push(point),
        None => series.push(Series {
            name,
            points: vec![point],
        }),
    }
}

/// Returns a check of a statement; `seen` is the value that decides, the worst one.
fn check_statement(
    statement: impl Into<String>,
    holds: bool,
    seen: impl Into<String>,
) -> StatementCheck {
    StatementCheck {
        statement: statement.into(),
        holds,
        seen: seen.into(),
    }
}

/// Returns true if one value is above the other, with disjoint intervals.
fn clearly_above(high: Estimate, low: Estimate) -> bool {
    high.mean - high.ci95.unwrap_or(0.0) > low.mean + low.ci95.unwrap_or(0.0)
}

/// Returns the notes shared by all experiments.
fn notes(settings: &ExperimentSettings) -> Vec<String> {
    let minutes = settings.milliseconds.map_or(15.0, |ms| ms as f64 / 6e4);
    vec![
        format!(
            "{} seeds, {minutes} virtual minutes each; a request adds {LOAD_PER_REQUEST} of the maximum to an \
             element's load;",
            settings.repeats_or(SEEDS)
        ),
        format!(
            "{LAN_MS} ms within a LAN, plus the WAN delay between two; the speed is the mean size divided by the mean \
             delay (equation 1)"
        ),
    ]
}
