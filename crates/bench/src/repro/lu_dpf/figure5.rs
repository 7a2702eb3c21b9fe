//! Figure 5: the handling speed by DPF, with some elements of one LAN moved to the others.

use anyhow::Result;

use super::load_sweep::sweep_load_per_request;
use super::{
    DPF, add_point, check_statement, clearly_above, handling_speed, notes, simulate, three_lans,
};
use crate::repro::{
    Estimate, Experiment, ExperimentOutcome, ExperimentSettings, Figure, Panel, StatementCheck,
};
use holdfast_sim::pools::{PoolRunConfig, PoolRunOutcome as Simulated};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "lu-dpf/figure5",
    about: "handling speed by DPF and elements left in the last of three LANs (simulated)",
    run,
};

/// DPFs up to the largest in the text, and a little beyond.
const DPFS: [f64; 9] = [0.0, 1e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 10e-5, 15e-5, 20e-5];
/// Percentages of elements left in the last LAN: "between 100% (i.e. all 12 PEs) and 25% (only 3 PEs)".
const REMAINING_PCT: [u32; 4] = [100, 75, 50, 25];
/// Elements per LAN: "3 LANs with 12 PEs in each LAN".
const ELEMENTS: u32 = 12;
const RATIO: u32 = 3;
const WAN_MS: f64 = 150.0;
/// A DPF that is too large: "for a sufficiently large setting (e.g. 15e-5 for <= 50% PEs in the last LAN)".
const DPF_TOO_LARGE: f64 = 15e-5;

/// Moves elements as in the paper: "To compensate the capacity loss in the last LAN, additional PEs have been equally
/// distributed to the other 2 LANs." Users stay in their LANs.
fn config(elements: u32, remaining_pct: u32, dpf: f64) -> PoolRunConfig {
    let mut config = three_lans(elements, RATIO, WAN_MS, dpf, 1.0);
    let moved = elements - elements * remaining_pct / 100;
    config.zones[0].elements += moved / 2;
    config.zones[1].elements += moved - moved / 2;
    config.zones[2].elements -= moved;
    config
}

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let elements = settings.elements.unwrap_or(ELEMENTS);
    let points: Vec<(u32, f64)> = REMAINING_PCT
        .into_iter()
        .flat_map(|left| DPFS.map(|dpf| (left, dpf)))
        .collect();
    let configs: Vec<_> = points
        .iter()
        .map(|(left, dpf)| config(elements, *left, *dpf))
        .collect();
    let outcomes = simulate(settings, &configs);
    let (mut series, mut measured) = (Vec::new(), Vec::new());
    for ((left, dpf), outcomes) in points.into_iter().zip(&outcomes) {
        let ours = handling_speed(outcomes);
        add_point(
            &mut series,
            format!("{left} % left"),
            (dpf * 1e6).round() / 10.0,
            ours,
            None,
        );
        measured.push((left, dpf, ours));
    }
    let panel = Panel {
        title: format!("3 LANs, WAN delay {WAN_MS} ms"),
        x: "DPF in 1e-5 a millisecond".to_owned(),
        y: "handling speed".to_owned(),
        unit: "% of an element's capacity".to_owned(),
        y_log: false,
        series,
    };
    let figure = Figure {
        title: "Handling speed by DPF".to_owned(),
        panels: vec![panel],
    };
    let mut outcome = ExperimentOutcome::from_figure(figure, notes(settings));
    outcome.checks = checks(&measured);
    outcome.checks.push(check_over_loads(settings, elements));
    Ok(outcome)
}

fn checks(measured: &[(u32, f64, Estimate)]) -> Vec<StatementCheck> {
    let no_estimate = Estimate {
        mean: f64::NAN,
        ci95: None,
    };
    let at = |left: u32, dpf: f64| {
        let one = measured.iter().find(|one| (one.0, one.1) == (left, dpf));
        one.map_or(no_estimate, |one| one.2)
    };
    let mut checks = Vec::new();
    for left in REMAINING_PCT {
        let (plain, small) = (at(left, 0.0), at(left, DPF));
        checks.push(check_statement(
            format!("with {left} % left even a small DPF (1e-5) makes it faster"),
            clearly_above(small, plain),
            format!("{:.1} %, and {:.1} % with plain LU", small.mean, plain.mean),
        ));
    }
    let (small, large) = (at(100, DPF).mean, at(100, DPF_TOO_LARGE).mean);
    checks.push(check_statement(
        "with all elements there, a higher DPF has no impact (15e-5: within 5 % of 1e-5)",
        (large / small - 1.0).abs() < 0.05,
        format!("{small:.1} % and {large:.1} %"),
    ));
    for left in [50, 25] {
        let (plain, large) = (at(left, 0.0), at(left, DPF_TOO_LARGE));
        checks.push(check_statement(
            format!("with {left} % left, DPF 15e-5 falls below plain LU"),
            clearly_above(plain, large),
            format!("{:.1} %, and {:.1} % with plain LU", large.mean, plain.mean),
        ));
    }
    checks
}

/// Checks the last statement over the loads, because it depends on them.
fn check_over_loads(settings: &ExperimentSettings, elements: u32) -> StatementCheck {
    let configs = [50, 25].map(|left| [0.0, DPF_TOO_LARGE].map(|dpf| config(elements, left, dpf)));
    let below = |outcomes: &[Vec<Simulated>]| {
        let pair =
            |pair: &[Vec<Simulated>]| handling_speed(&pair[1]).mean < handling_speed(&pair[0]).mean;
        outcomes.chunks(2).all(pair)
    };
    let statement = "with 50 % or fewer left, DPF 15e-5 falls below plain LU";
    sweep_load_per_request(settings, statement, &configs.concat(), below)
}
