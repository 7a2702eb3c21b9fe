//! Figure 4, right: the handling speed by the size of requests.

use anyhow::Result;

use super::load_sweep::sweep_load_per_request;
use super::{DPF, add_point, check_statement, handling_speed, notes, simulate, three_lans};
use crate::repro::{
    Estimate, Experiment, ExperimentOutcome, ExperimentSettings, Figure, Panel, StatementCheck,
};
use holdfast_sim::pools::PoolRunOutcome as Simulated;

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "lu-dpf/figure4-right",
    about: "handling speed by size of requests, WAN delay and DPF (simulated)",
    run,
};

/// Request sizes divided by the capacity, in seconds.
const SIZES: [f64; 6] = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0];
const WAN_MS: [f64; 4] = [0.0, 100.0, 300.0, 500.0];
/// Users per element: "using a PU:PE ratio of 3".
const RATIO: u32 = 3;
const ELEMENTS: u32 = 10;
/// WAN delay in milliseconds, request size and handling speed of the text: "e.g. still a handling speed of 48% for a
/// DPF of 1e-5 vs. almost 0% for a DPF of 0, at a WAN delay of 300ms for a request size:PE capacity ratio of 0.1".
const STATED_POINT: (f64, f64, f64) = (300.0, 0.1, 48.0);

type MeasuredPoint = ((f64, f64, f64), Estimate);

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let elements = settings.elements.unwrap_or(ELEMENTS);
    let mut points = Vec::new();
    for dpf in [0.0, DPF] {
        for wan_ms in WAN_MS {
            points.extend(SIZES.map(|size| (size, wan_ms, dpf)));
        }
    }
    let config =
        |&(size, wan_ms, dpf): &(f64, f64, f64)| three_lans(elements, RATIO, wan_ms, dpf, size);
    let configs: Vec<_> = points.iter().map(config).collect();
    let outcomes = simulate(settings, &configs);
    let (mut series, mut measured) = (Vec::new(), Vec::new());
    for ((size, wan_ms, dpf), outcomes) in points.into_iter().zip(&outcomes) {
        let name = format!("DPF {dpf:e}, WAN {wan_ms} ms");
        let stated = (wan_ms, size) == (STATED_POINT.0, STATED_POINT.1) && dpf == DPF;
        let ours = handling_speed(outcomes);
        add_point(
            &mut series,
            name,
            size,
            ours,
            stated.then_some(STATED_POINT.2),
        );
        measured.push(((size, wan_ms, dpf), ours));
    }
    let panel = Panel {
        title: format!("3 LANs, {RATIO} users for each element"),
        x: "s (request size by capacity)".to_owned(),
        y: "handling speed".to_owned(),
        unit: "% of an element's capacity".to_owned(),
        y_log: false,
        series,
    };
    let figure = Figure {
        title: "Handling speed by size of requests".to_owned(),
        panels: vec![panel],
    };
    let mut outcome = ExperimentOutcome::from_figure(figure, notes(settings));
    outcome.checks = checks(&measured);
    outcome.checks.push(check_over_loads(settings, elements));
    Ok(outcome)
}

fn checks(measured: &[MeasuredPoint]) -> Vec<StatementCheck> {
    let at = |size: f64, wan_ms: f64, dpf: f64| {
        let one = measured
            .iter()
            .find(|(place, _)| *place == (size, wan_ms, dpf));
        one.map_or(f64::NAN, |(_, speed)| speed.mean)
    };
    let [near, plain] = [DPF, 0.0].map(|dpf| at(0.1, 300.0, dpf));
    let delay = SIZES.map(|size| 100.0 * at(size, 500.0, DPF) / at(size, 0.0, DPF));
    let worst = delay.into_iter().fold(f64::INFINITY, f64::min);
    let (small, large) = (at(0.1, 300.0, DPF), at(1.0, 300.0, DPF));
    let slower = SIZES.iter().flat_map(|size| {
        WAN_MS
            .windows(2)
            .map(|pair| at(*size, pair[0], 0.0) - at(*size, pair[1], 0.0))
    });
    let least = slower.fold(f64::INFINITY, f64::min);
    vec![
        check_statement(
            "at a ratio of 0.1 and 300 ms the speed is 48 % (± 8) with DPF 1e-5",
            (40.0..=56.0).contains(&near),
            format!("{near:.1} %"),
        ),
        check_statement(
            "and almost 0 (under 15 %) with plain LU",
            plain < 15.0,
            format!("{plain:.2} %"),
        ),
        check_statement(
            "with plain LU the speed falls with the WAN delay, for every size",
            least > 0.0,
            format!("the least fall is {least:.2} points"),
        ),
        check_statement(
            "with DPF 1e-5 the speed is almost independent of the delay (500 ms: at least 90 % of that at 0 ms)",
            worst >= 90.0,
            format!("at the worst {worst:.1} %"),
        ),
        check_statement(
            "with DPF 1e-5 too, small requests are slower: the delay within the LAN counts",
            small < large,
            format!("{small:.1} % at 0.1, {large:.1} % at 1"),
        ),
    ]
}

/// Checks the first statement over the loads.
fn check_over_loads(settings: &ExperimentSettings, elements: u32) -> StatementCheck {
    let configs = [three_lans(elements, RATIO, 300.0, DPF, 0.1)];
    let stated =
        |outcomes: &[Vec<Simulated>]| (40.0..=56.0).contains(&handling_speed(&outcomes[0]).mean);
    let statement = "at a ratio of 0.1 and 300 ms the speed is 48 % (± 8) with DPF 1e-5";
    sweep_load_per_request(settings, statement, &configs, stated)
}
