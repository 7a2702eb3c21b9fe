//! The paper's policies beside the methods of current load balancers, in situations like the paper's.

use anyhow::Result;

use super::{CAPACITY, DPF, LAN_MS, LOAD_PER_REQUEST, estimate, simulate_seeds, three_lans};
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings, ResultRow};
use holdfast_sim::pools::{ElementChoice, ObservationSharing, PoolRunConfig};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "lu-dpf/rivals",
    about: "handling time with LU, LU-DPF, round robin, two choices by latency, and probes (simulated)",
    run,
};

const SEEDS: u32 = 12;
const ELEMENTS: u32 = 10;
const RATIO: u32 = 3;
const WAN_MS: f64 = 100.0;

const CHOICES: [(&str, ElementChoice); 9] = [
    ("LU", ElementChoice::LeastUsed),
    ("LU-DPF", ElementChoice::LeastUsedDpf(DPF)),
    ("round robin", ElementChoice::RoundRobin),
    (
        "two by latency, zone",
        ElementChoice::Latency(ObservationSharing::Zone),
    ),
    (
        "two by latency, user",
        ElementChoice::Latency(ObservationSharing::User),
    ),
    (
        "probes, zone",
        probing_policy(ObservationSharing::Zone, false, HOT_THRESHOLD),
    ),
    (
        "probes and way, zone",
        probing_policy(ObservationSharing::Zone, true, HOT_THRESHOLD),
    ),
    (
        "probes and way, user",
        probing_policy(ObservationSharing::User, true, HOT_THRESHOLD),
    ),
    (
        "probes, fewest in flight, zone",
        probing_policy(ObservationSharing::Zone, true, 0.0),
    ),
];

/// Threshold for hot elements, as chosen by Prequal's authors.
const HOT_THRESHOLD: f64 = 0.84;

const fn probing_policy(sharing: ObservationSharing, with_way: bool, hot: f64) -> ElementChoice {
    ElementChoice::Probes {
        sharing,
        with_round_trip: with_way,
        hot_quantile: hot,
    }
}

/// A name, the request size in seconds, the WAN delay, and other changes of the configuration.
type PolicyScenario = (&'static str, f64, f64, fn(&mut PoolRunConfig));

const SCENARIOS: [PolicyScenario; 5] = [
    ("one LAN's delays", 1.0, 0.0, |_| ()),
    ("three LANs", 1.0, WAN_MS, |_| ()),
    ("short requests", 0.1, WAN_MS, |_| ()),
    ("half of the last LAN", 1.0, WAN_MS, |config| {
        let moved = ELEMENTS / 2;
        config.zones[0].elements += moved / 2;
        config.zones[1].elements += moved - moved / 2;
        config.zones[2].elements -= moved;
    }),
    ("slow elements", 1.0, WAN_MS, |config| {
        config.slow = Some((5, 0.25));
    }),
];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    let seeds = settings.repeats_or(SEEDS);
    let elements = settings.elements.unwrap_or(ELEMENTS);
    let mut configs = Vec::new();
    for (_, size, wan_ms, adjust_config) in SCENARIOS {
        for (_, choice) in CHOICES {
            let mut config = three_lans(elements, RATIO, wan_ms, 0.0, size);
            config.choice = choice;
            adjust_config(&mut config);
            configs.push(config);
        }
    }
    let outcomes = simulate_seeds(settings, seeds, &configs);
    let mut outcomes = outcomes.iter();
    let mut outcome = ExperimentOutcome {
        notes: notes(seeds),
        ..ExperimentOutcome::default()
    };
    for (situation, size, _, _) in SCENARIOS {
        for (choice, _) in CHOICES {
            let Some(outcomes) = outcomes.next() else {
                continue;
            };
            // A request of the mean size takes `size` seconds on an idle element.
            let times = estimate(outcomes, |window| window.handling_mean_s() / size);
            let point = format!("{situation}: {choice}");
            outcome.rows.push(ResultRow::new(
                point,
                None,
                times,
                "of the processing time alone",
            ));
        }
    }
    Ok(outcome)
}

fn notes(seeds: u32) -> Vec<String> {
    vec![
        format!("{seeds} seeds; 3 LANs of {ELEMENTS} elements of {CAPACITY:e} calculations per second, {RATIO} users \
                 per element, 60 % utilisation, {LAN_MS} ms within a LAN and {WAN_MS} ms more between two;"),
        format!("LU and LU-DPF ({DPF:e}): a request adds {LOAD_PER_REQUEST} to the load; \"zone\": all users of a LAN \
                 share observations, \"user\": each user has its own;"),
        "\"and way\": the probe's round trip is added to the latency in its answer; \"slow elements\": every fifth \
         element has a quarter of the capacity".to_owned(),
    ]
}
