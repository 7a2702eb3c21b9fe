//! Figure 7: "The Scalability of the Timer Handling and Handle Resolution Operations" (section 5.1.3, 5.1.4), and
//! synchronisation, for which the paper has no plot (5.1.5).

use anyhow::Result;

use super::operations::{Curve, Curves, Operation, Per, figure};
use super::subject::Kind;
use crate::repro::{Experiment, Outcome, Settings};

pub(crate) const EXPERIMENT: Experiment = Experiment {
    name: "rserpool-overhead/fig7",
    about: "timer operations, handle resolutions and synchronizations, by structure",
    run,
};

const PANELS: &[Curves] = &[
    (
        "timers",
        Per::Element,
        &[
            Curve {
                name: "0 % owned",
                operation: Operation::Lifetime,
                stated: None,
            },
            Curve {
                name: "100 % owned",
                operation: Operation::KeepAlive,
                stated: None,
            },
        ],
    ),
    (
        "handle resolution",
        Per::Element,
        &[
            Curve {
                name: "deterministic, h=1",
                operation: Operation::Resolve(Kind::RoundRobin, 1),
                stated: Some((10_000, 13.0)),
            },
            Curve {
                name: "deterministic, h=3",
                operation: Operation::Resolve(Kind::RoundRobin, 3),
                stated: Some((10_000, 7.5)),
            },
            Curve {
                name: "random, h=1",
                operation: Operation::Resolve(Kind::Random, 1),
                stated: Some((10_000, 7.0)),
            },
            Curve {
                name: "random, h=3",
                operation: Operation::Resolve(Kind::Random, 3),
                stated: Some((10_000, 4.0)),
            },
        ],
    ),
    (
        "synchronization",
        Per::Second,
        &[Curve {
            name: "all elements",
            operation: Operation::Synchronize,
            stated: Some((30_000, 100.0)),
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
    fn every_curve_has_its_points() {
        super::super::operations::tests::smoke(EXPERIMENT, 21, 5);
    }
}
