//! Figure 8: registrar CPU utilisation for pool maintenance.
//!
//! Left (section 5.2.1): elements in a pool with round robin, all at the first of two registrars. Right (5.2.2): 1,000
//! elements, and up to six registrars.

use std::time::Duration;

use anyhow::Result;
use holdfast_wire::rserpool::PolicyKind;

use super::registrar_cpu_load::{
    ELEMENTS, RegistrarBench, figure_outcome, paper_value, utilisation_panel,
};
use crate::registrar::MemberKind;
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings, Series};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig8",
    about: "how busy a registrar is with re-registrations, by elements and by registrars",
    run,
};

/// Re-registration intervals, milliseconds: "an inter-re-registration time between 250ms and 1000ms".
const INTERVALS_MS: [u64; 3] = [250, 500, 1000];
const SIZES: [u32; 5] = [500, 1000, 1500, 2000, 3000];
const REGISTRARS: [u32; 6] = [1, 2, 3, 4, 5, 6];

/// Values in the text: number of the registrar, elements, registrars, interval in milliseconds; per cent.
const STATED_VALUES: [((usize, u32, u32, u64), f64); 6] = [
    ((1, 2000, 2, 250), 90.0),
    ((1, 3000, 2, 1000), 25.0),
    ((2, 2000, 2, 250), 15.0),
    ((2, 3000, 2, 1000), 25.0),
    ((1, 1000, 1, 250), 20.0),
    ((1, 1000, 6, 250), 60.0),
];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let mut by_elements = Vec::new();
    for elements in settings.sizes_or(&SIZES) {
        measure_intervals(settings, elements, 2, elements, &mut by_elements)?;
    }
    let mut by_registrars = Vec::new();
    let elements = settings.elements.unwrap_or(ELEMENTS);
    for registrars in REGISTRARS {
        measure_intervals(
            settings,
            elements,
            registrars,
            registrars,
            &mut by_registrars,
        )?;
    }
    let panels = vec![
        utilisation_panel("2 registrars", "elements", by_elements),
        utilisation_panel(format!("{elements} elements"), "registrars", by_registrars),
    ];
    let title = "Registrar CPU utilisation for pool maintenance";
    Ok(figure_outcome(settings, title, panels))
}

/// Measures all intervals with these numbers of elements and registrars.
fn measure_intervals(
    settings: &ExperimentSettings,
    elements: u32,
    registrars: u32,
    x: u32,
    series: &mut Vec<Series>,
) -> Result<()> {
    eprintln!("{elements} elements, {registrars} registrars");
    let mut world = RegistrarBench::start(settings, registrars as usize)?;
    world.add_group(MemberKind::Elements, elements, 0, PolicyKind::RoundRobin)?;
    let paper =
        |place, interval| paper_value(&STATED_VALUES, &(place, elements, registrars, interval));
    let asks = |interval| (interval, Duration::ZERO);
    world.add_points(&INTERVALS_MS, asks, (x, ""), paper, series)
}
