//! Figure 7: "The Scalability of the Timer Handling and Handle Resolution Operations" (section 5.1.3, 5.1.4), and
//! synchronisation, for which the paper has no plot (5.1.5).

use anyhow::Result;

use super::handlespaces::PolicyClass;
use super::operations::{Curve, Divisor, Operation, PanelSpec, figure};
use crate::repro::{Experiment, Outcome, Settings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig7",
    about: "timer operations, handle resolutions and synchronizations, by structure",
    run,
};

const PANELS: &[PanelSpec] = &[
    (
        "timers",
        Divisor::Element,
        &[
            Curve {
                name: "0 % owned",
                operation: Operation::RestartLifetimeTimer,
                paper_value: None,
            },
            Curve {
                name: "100 % owned",
                operation: Operation::KeepAlive,
                paper_value: None,
            },
        ],
    ),
    (
        "handle resolution",
        Divisor::Element,
        &[
            Curve {
                name: "deterministic, h=1",
                operation: Operation::Resolve(PolicyClass::RoundRobin, 1),
                paper_value: Some((10_000, 13.0)),
            },
            Curve {
                name: "deterministic, h=3",
                operation: Operation::Resolve(PolicyClass::RoundRobin, 3),
                paper_value: Some((10_000, 7.5)),
            },
            Curve {
                name: "random, h=1",
                operation: Operation::Resolve(PolicyClass::Random, 1),
                paper_value: Some((10_000, 7.0)),
            },
            Curve {
                name: "random, h=3",
                operation: Operation::Resolve(PolicyClass::Random, 3),
                paper_value: Some((10_000, 4.0)),
            },
        ],
    ),
    (
        "synchronization",
        Divisor::Second,
        &[Curve {
            name: "all elements",
            operation: Operation::Synchronize,
            paper_value: Some((30_000, 100.0)),
        }],
    ),
];

fn run(settings: &Settings) -> Result<Outcome> {
    figure(settings, "Paper 001, figure 7", PANELS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_has_a_point_per_size() {
        super::super::operations::tests::check_experiment(EXPERIMENT, 21, 5);
    }
}
