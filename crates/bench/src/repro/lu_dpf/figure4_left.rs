//! Figure 4, left: the handling speed by the number of users per element.

use anyhow::Result;

use super::load_sweep::sweep_load_per_request;
use super::{
    DPF, add_point, check_statement, handling_speed, notes, simulate, three_lans, utilisation,
};
use crate::repro::{
    Estimate, Experiment, ExperimentOutcome, ExperimentSettings, Figure, Panel, StatementCheck,
};
use holdfast_sim::pools::PoolRunOutcome as Simulated;

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "lu-dpf/figure4-left",
    about: "handling speed by users for each element, WAN delay and DPF (simulated)",
    run,
};

/// Users per element: "The PU:PE amount ratio r varies from 1 to 10".
const RATIOS: [u32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
/// WAN delays, milliseconds: "have varied the WAN delay from 0ms to 500ms".
const WAN_MS: [f64; 6] = [0.0, 100.0, 200.0, 300.0, 400.0, 500.0];
/// Elements per LAN: "3 LANs, each containing 10 PEs".
const ELEMENTS: u32 = 10;

/// Result at one point.
struct MeasuredPoint {
    ratio: u32,
    wan_ms: f64,
    dpf: f64,
    speed: Estimate,
    utilisation: Estimate,
}

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let elements = settings.elements.unwrap_or(ELEMENTS);
    let ratios = settings.sizes_or(&RATIOS);
    let mut points = Vec::new();
    for dpf in [0.0, DPF] {
        for wan_ms in WAN_MS {
            points.extend(ratios.iter().map(|ratio| (*ratio, wan_ms, dpf)));
        }
    }
    let config =
        |&(ratio, wan_ms, dpf): &(u32, f64, f64)| three_lans(elements, ratio, wan_ms, dpf, 1.0);
    let configs: Vec<_> = points.iter().map(config).collect();
    let outcomes = simulate(settings, &configs);
    let (mut series, mut measured) = (Vec::new(), Vec::new());
    for ((ratio, wan_ms, dpf), outcomes) in points.into_iter().zip(&outcomes) {
        let name = format!("DPF {dpf:e}, WAN {wan_ms} ms");
        add_point(
            &mut series,
            name,
            ratio.into(),
            handling_speed(outcomes),
            None,
        );
        measured.push(MeasuredPoint {
            ratio,
            wan_ms,
            dpf,
            speed: handling_speed(outcomes),
            utilisation: utilisation(outcomes),
        });
    }
    let panel = Panel {
        title: "3 LANs".to_owned(),
        x: "users for each element".to_owned(),
        y: "handling speed".to_owned(),
        unit: "% of an element's capacity".to_owned(),
        y_log: false,
        series,
    };
    let figure = Figure {
        title: "Handling speed by users for each element".to_owned(),
        panels: vec![panel],
    };
    let mut outcome = ExperimentOutcome::from_figure(figure, notes(settings));
    outcome.checks = checks(&measured, &ratios);
    outcome
        .checks
        .push(check_over_loads(settings, elements, &ratios));
    Ok(outcome)
}

fn checks(measured: &[MeasuredPoint], ratios: &[u32]) -> Vec<StatementCheck> {
    let at = |ratio: u32, wan_ms: f64, dpf: f64| {
        let wanted =
            |one: &&MeasuredPoint| (one.ratio, one.wan_ms, one.dpf) == (ratio, wan_ms, dpf);
        measured
            .iter()
            .find(wanted)
            .map_or(f64::NAN, |one| one.speed.mean)
    };
    let mut checks = Vec::new();
    let kept = ratios
        .iter()
        .map(|&ratio| at(ratio, 500.0, DPF) / at(ratio, 0.0, DPF));
    let kept = 100.0 * kept.fold(f64::INFINITY, f64::min);
    checks.push(check_statement(
        "at DPF 1e-5 the speed at 500 ms of WAN delay is at least 90 % of that at 0 ms, for every ratio",
        kept >= 90.0,
        format!("at the worst {kept:.1} %"),
    ));
    let falls = ratios.iter().flat_map(|&ratio| {
        WAN_MS
            .windows(2)
            .map(move |pair| at(ratio, pair[1], 0.0) - at(ratio, pair[0], 0.0))
    });
    let least = falls.fold(f64::NEG_INFINITY, f64::max);
    checks.push(check_statement(
        "with plain LU the speed falls with each step of the WAN delay, for every ratio",
        least < 0.0,
        format!("the least fall is {:.2} points", -least),
    ));
    if let [first, .., last] = *ratios {
        let [few, many] = [first, last].map(|ratio| at(ratio, 0.0, 0.0));
        checks.push(check_statement(
            "with few users for each element the speed is lower, even without WAN delay",
            few < many,
            format!("{few:.1} % with {first}, {many:.1} % with {last}"),
        ));
    }
    let utilisation_error = |one: &&MeasuredPoint| one.dpf == DPF;
    let off = measured
        .iter()
        .filter(utilisation_error)
        .map(|one| (one.utilisation.mean - 60.0).abs());
    let off = off.fold(0.0, f64::max);
    checks.push(check_statement(
        "the WAN delay's impact on the utilisation is negligible with LU-DPF (within 2 points of 60 %)",
        off < 2.0,
        format!("at the most {off:.2} points"),
    ));
    checks
}

/// Checks the first statement over the loads.
fn check_over_loads(
    settings: &ExperimentSettings,
    elements: u32,
    ratios: &[u32],
) -> StatementCheck {
    let ratios: Vec<u32> = ratios
        .iter()
        .copied()
        .filter(|ratio| [1, 3, 10].contains(ratio))
        .collect();
    let ratios = if ratios.is_empty() { vec![3] } else { ratios };
    let configs: Vec<_> = ratios
        .iter()
        .flat_map(|&ratio| [0.0, 500.0].map(|wan_ms| three_lans(elements, ratio, wan_ms, DPF, 1.0)))
        .collect();
    let kept = |outcomes: &[Vec<Simulated>]| {
        let pair = |pair: &[Vec<Simulated>]| {
            handling_speed(&pair[1]).mean >= 0.9 * handling_speed(&pair[0]).mean
        };
        outcomes.chunks(2).all(pair)
    };
    let statement = "at DPF 1e-5 the speed at 500 ms is at least 90 % of that at 0 ms";
    sweep_load_per_request(settings, statement, &configs, kept)
}
