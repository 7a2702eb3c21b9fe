//! The steps of freezes, over several moves.

use holdfast_api::control::{MigrationStepUs, MigrationStepsUs};

use holdfast_testbed::process_moves::CompletedMove;
use holdfast_testbed::stats::Quantiles;

/// Returns the median duration of each step. Repeated steps of one freeze, such as sends of much data, are added up.
pub fn step_medians(moves: &[CompletedMove]) -> MigrationStepsUs {
    let step_medians = |steps_of: fn(&MigrationStepsUs) -> &Vec<MigrationStepUs>| {
        let lists: Vec<_> = moves
            .iter()
            .map(|one| steps_of(&one.status.steps_us))
            .collect();
        let mut names: Vec<&str> = Vec::new();
        for step in lists.iter().copied().flatten() {
            if !names.contains(&step.step.as_str()) {
                names.push(&step.step);
            }
        }
        let median = |name: &str| {
            let sum = |list: &&Vec<MigrationStepUs>| {
                let same = list.iter().filter(|step| step.step == name);
                same.map(|step| f64::from(step.duration_us)).sum()
            };
            Quantiles::new(lists.iter().map(sum).collect()).median()
        };
        let step = |name: &str| MigrationStepUs {
            step: name.to_owned(),
            duration_us: median(name) as u32,
        };
        names.into_iter().map(step).collect()
    };
    MigrationStepsUs {
        donor: step_medians(|steps| &steps.donor),
        acceptor: step_medians(|steps| &steps.acceptor),
    }
}

/// Returns the steps as one line of text.
pub fn steps_text(steps: &[MigrationStepUs]) -> String {
    let words = steps
        .iter()
        .map(|of| format!("{} {}", of.step, of.duration_us));
    words.collect::<Vec<_>>().join(", ") + " us"
}
