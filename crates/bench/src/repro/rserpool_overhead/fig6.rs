//! Figure 6: "The Scalability of the Registration/Deregistration and Re-Registration Operations" (section 5.1.1,
//! 5.1.2).

use anyhow::Result;

use super::operations::{Curve, Curves, Operation, Per, figure};
use super::subject::Kind;
use crate::repro::{Experiment, Outcome, Settings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig6",
    about: "registrations and re-registrations an element and second, by structure and policy",
    run,
};

const PANELS: &[Curves] = &[
    (
        "registration, deregistration",
        Per::Element,
        &[
            Curve {
                name: "deterministic",
                operation: Operation::Exchange(Kind::RoundRobin),
                stated: Some((20_000, 2.0)),
            },
            Curve {
                name: "random",
                operation: Operation::Exchange(Kind::Random),
                stated: Some((20_000, 2.0)),
            },
        ],
    ),
    (
        "re-registration",
        Per::Element,
        &[
            Curve {
                name: "non-adaptive",
                operation: Operation::Renew(Kind::RoundRobin),
                stated: Some((20_000, 5.0)),
            },
            Curve {
                name: "adaptive",
                operation: Operation::Renew(Kind::LeastUsed),
                stated: Some((20_000, 3.0)),
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
    fn every_curve_has_its_points() {
        super::super::operations::tests::smoke(EXPERIMENT, 12, 4);
    }
}
