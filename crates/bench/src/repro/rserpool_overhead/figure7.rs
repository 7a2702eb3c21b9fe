//! Figure 7: "The Scalability of the Timer Handling and Handle Resolution Operations" (section 5.1.3, 5.1.4), and
//! synchronisation, for which the paper has no plot (5.1.5).

use anyhow::Result;

use super::handlespaces::PolicyClass;
use super::operations::{OperationCurve, PanelSpec, PaperOperation, RateDivisor, measure_figure};
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig7",
    about: "timer operations, handle resolutions and synchronizations, by structure",
    run,
};

const PANELS: &[PanelSpec] = &[
    (
        "timers",
        RateDivisor::Element,
        &[
            OperationCurve {
                name: "0 % owned",
                operation: PaperOperation::RestartLifetimeTimer,
                paper_value: None,
            },
            OperationCurve {
                name: "100 % owned",
                operation: PaperOperation::KeepAlive,
                paper_value: None,
            },
        ],
    ),
    (
        "handle resolution",
        RateDivisor::Element,
        &[
            OperationCurve {
                name: "deterministic, h=1",
                operation: PaperOperation::Resolve(PolicyClass::RoundRobin, 1),
                paper_value: Some((10_000, 13.0)),
            },
            OperationCurve {
                name: "deterministic, h=3",
                operation: PaperOperation::Resolve(PolicyClass::RoundRobin, 3),
                paper_value: Some((10_000, 7.5)),
            },
            OperationCurve {
                name: "random, h=1",
                operation: PaperOperation::Resolve(PolicyClass::Random, 1),
                paper_value: Some((10_000, 7.0)),
            },
            OperationCurve {
                name: "random, h=3",
                operation: PaperOperation::Resolve(PolicyClass::Random, 3),
                paper_value: Some((10_000, 4.0)),
            },
        ],
    ),
    (
        "synchronization",
        RateDivisor::Second,
        &[OperationCurve {
            name: "all elements",
            operation: PaperOperation::Synchronize,
            paper_value: Some((30_000, 100.0)),
        }],
    ),
];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    measure_figure(settings, "Paper 001, figure 7", PANELS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_has_a_point_per_size() {
        super::super::operations::tests::check_experiment(EXPERIMENT, 21, 5);
    }
}
