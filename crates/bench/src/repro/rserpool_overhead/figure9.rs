//! Figure 9: registrar CPU utilisation for handle resolution (section 5.2.3).
//!
//! A pool of 1,000 elements that re-register every second at the first of two registrars; users resolve at the first
//! (left) or at the second (right).

use std::time::Duration;

use anyhow::Result;
use holdfast_wire::rserpool::PolicyKind;

use super::registrar_cpu_load::{
    ELEMENTS, RegistrarBench, figure_outcome, paper_value, utilisation_panel,
};
use crate::registrar::MemberKind;
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings, Series};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig9",
    about: "how busy a registrar is with handle resolutions, at the first or the second registrar",
    run,
};

/// Resolution intervals, milliseconds: "inter-handle-resolution times between 100ms and 500ms".
const INTERVALS_MS: [u64; 3] = [100, 250, 500];
const REREGISTRATION_INTERVAL: Duration = Duration::from_millis(1000);
const SIZES: [u32; 4] = [500, 1000, 1500, 2000];
/// Policies: "deterministic policies (solid lines) and randomized policies (dotted lines)".
const POLICIES: [PolicyKind; 2] = [PolicyKind::RoundRobin, PolicyKind::Random];

/// Values in the text: registrar of the users, measured registrar, users, interval in milliseconds; per cent. Values
/// without a policy in the text are taken for the deterministic one.
const STATED_VALUES: [((usize, usize, u32, u64), f64); 4] = [
    ((1, 1, 2000, 500), 25.0),
    ((1, 1, 1000, 100), 80.0),
    ((2, 2, 1500, 100), 80.0),
    ((2, 1, 1500, 100), 10.0),
];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let mut panels = Vec::new();
    for (at, title) in [
        (1, "resolutions at registrar #1"),
        (2, "resolutions at registrar #2"),
    ] {
        let mut series = Vec::new();
        for policy in POLICIES {
            for users in settings.sizes_or(&SIZES) {
                measure_intervals(settings, policy, users, at, &mut series)?;
            }
        }
        panels.push(utilisation_panel(title, "users", series));
    }
    let title = "Registrar CPU utilisation for handle resolution";
    Ok(figure_outcome(settings, title, panels))
}

/// Measures all intervals with `users` users at registrar `at`, counted from 1.
fn measure_intervals(
    settings: &ExperimentSettings,
    policy: PolicyKind,
    users: u32,
    at: usize,
    series: &mut Vec<Series>,
) -> Result<()> {
    eprintln!("{users} users at registrar #{at}, {policy}");
    let elements = settings.elements.unwrap_or(ELEMENTS);
    let mut world = RegistrarBench::start(settings, 2)?;
    world.add_group(MemberKind::Elements, elements, 0, policy)?;
    world.add_group(MemberKind::Users, users, at - 1, policy)?;
    let is_paper_setup = policy == PolicyKind::RoundRobin && elements == ELEMENTS;
    let paper = |place, interval| {
        paper_value(&STATED_VALUES, &(at, place, users, interval)).filter(|_| is_paper_setup)
    };
    let asks = |interval| (REREGISTRATION_INTERVAL, interval);
    let of = format!(", {policy}");
    world.add_points(&INTERVALS_MS, asks, (users, &of), paper, series)
}
