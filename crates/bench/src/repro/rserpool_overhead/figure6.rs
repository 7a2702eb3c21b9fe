//! Figure 6: "The Scalability of the Registration/Deregistration and Re-Registration Operations" (section 5.1.1,
//! 5.1.2).

use anyhow::Result;

use super::handlespaces::PolicyClass;
use super::operations::{Curve, Divisor, Operation, PanelSpec, figure};
use crate::repro::{Experiment, Outcome, Settings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig6",
    about: "registrations and re-registrations per element and second, by structure and policy",
    run,
};

const PANELS: &[PanelSpec] = &[
    (
        "registration, deregistration",
        Divisor::Element,
        &[
            Curve {
                name: "deterministic",
                operation: Operation::Replace(PolicyClass::RoundRobin),
                paper_value: Some((20_000, 2.0)),
            },
            Curve {
                name: "random",
                operation: Operation::Replace(PolicyClass::Random),
                paper_value: Some((20_000, 2.0)),
            },
        ],
    ),
    (
        "re-registration",
        Divisor::Element,
        &[
            Curve {
                name: "non-adaptive",
                operation: Operation::Reregister(PolicyClass::RoundRobin),
                paper_value: Some((20_000, 5.0)),
            },
            Curve {
                name: "adaptive",
                operation: Operation::Reregister(PolicyClass::LeastUsed),
                paper_value: Some((20_000, 3.0)),
            },
        ],
    ),
];

fn run(settings: &Settings) -> Result<Outcome> {
    figure(settings, "Paper 001, figure 6", PANELS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_has_a_point_per_size() {
        super::super::operations::tests::check_experiment(EXPERIMENT, 12, 4);
    }
}
