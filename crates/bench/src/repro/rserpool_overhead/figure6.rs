//! Figure 6: "The Scalability of the Registration/Deregistration and Re-Registration Operations" (section 5.1.1,
//! 5.1.2).

use anyhow::Result;

use super::handlespaces::PolicyClass;
use super::operations::{OperationCurve, PanelSpec, PaperOperation, RateDivisor, measure_figure};
use crate::repro::{Experiment, ExperimentOutcome, ExperimentSettings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig6",
    about: "registrations and re-registrations per element and second, by structure and policy",
    run,
};

const PANELS: &[PanelSpec] = &[
    (
        "registration, deregistration",
        RateDivisor::Element,
        &[
            OperationCurve {
                name: "deterministic",
                operation: PaperOperation::Replace(PolicyClass::RoundRobin),
                paper_value: Some((20_000, 2.0)),
            },
            OperationCurve {
                name: "random",
                operation: PaperOperation::Replace(PolicyClass::Random),
                paper_value: Some((20_000, 2.0)),
            },
        ],
    ),
    (
        "re-registration",
        RateDivisor::Element,
        &[
            OperationCurve {
                name: "non-adaptive",
                operation: PaperOperation::Reregister(PolicyClass::RoundRobin),
                paper_value: Some((20_000, 5.0)),
            },
            OperationCurve {
                name: "adaptive",
                operation: PaperOperation::Reregister(PolicyClass::LeastUsed),
                paper_value: Some((20_000, 3.0)),
            },
        ],
    ),
];

fn run(settings: &ExperimentSettings) -> Result<ExperimentOutcome> {
    measure_figure(settings, "Paper 001, figure 6", PANELS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_has_a_point_per_size() {
        super::super::operations::tests::check_experiment(EXPERIMENT, 12, 4);
    }
}
