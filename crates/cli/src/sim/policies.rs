//! Scenarios of groups whose loads change all the time: conductors beside other policies.

use anyhow::{Result, anyhow};
use holdfast_sim::conductor::{
    BalancePolicies, ChangingLoad, PolicyEffect, PolicyRun, measure_policy_effect,
};
use holdfast_sim::scenario::PolicyScenario;
use holdfast_sim::seeds;
use serde::Serialize;

use super::{FailingSeed, RunArgs, seed_range};
use crate::output::{output, output_line, print_json};
use crate::table::TextTable;

/// The policies in the order of the table.
const POLICIES: [BalancePolicies; 4] = [
    BalancePolicies::Off,
    BalancePolicies::Paper,
    BalancePolicies::Default,
    BalancePolicies::Central,
];

/// Effect of policies on one load, as a mean of all seeds.
#[derive(Serialize)]
struct PolicyRow {
    load: ChangingLoad,
    policies: &'static str,
    /// Distance of the most loaded node above the average, in percent points: the mean over time.
    excess: f64,
    /// Moves in an hour.
    moves: f64,
    /// Moves that brought a process back to its former node within 10 minutes.
    undone: f64,
}

impl PolicyRow {
    fn new(run: &PolicyRun, effects: &[PolicyEffect]) -> PolicyRow {
        let mean = |value: fn(&PolicyEffect) -> f64| {
            effects.iter().map(value).sum::<f64>() / effects.len() as f64
        };
        PolicyRow {
            load: run.load,
            policies: match run.policies {
                BalancePolicies::Off => "none",
                BalancePolicies::Paper => "paper 002",
                BalancePolicies::Default => "conductors",
                BalancePolicies::Central => "central plan",
            },
            excess: mean(|effect| effect.excess_mean),
            moves: mean(|effect| effect.moves as f64),
            undone: mean(|effect| effect.undone as f64),
        }
    }
}

/// Simulates each load with each of the policies.
pub(super) fn run(args: &RunArgs, about: &str, scenario: &PolicyScenario) -> Result<()> {
    let numbers = seed_range(args.seed, args.seeds.unwrap_or(1));
    let mut rows = Vec::new();
    let pairs = scenario
        .loads
        .iter()
        .flat_map(|load| POLICIES.map(|policies| (*load, policies)));
    for (load, policies) in pairs {
        let run = PolicyRun {
            nodes: scenario.nodes,
            processes_per_node: scenario.processes_per_node,
            load,
            policies,
        };
        let effect = |seed: &u64| {
            measure_policy_effect(&run, *seed)
                .map_err(|violation| anyhow!("{}", FailingSeed::new(*seed, &violation)))
        };
        let effects: Result<Vec<PolicyEffect>> = seeds::run_all(&numbers, effect, |_| ())
            .into_iter()
            .collect();
        rows.push(PolicyRow::new(&run, &effects?));
    }
    if args.json {
        return print_json(&rows);
    }
    output_line!("{about}");
    let mut table = TextTable::new(["LOAD", "POLICIES", "EXCESS", "MOVES", "UNDONE"]);
    for row in &rows {
        table.row([
            row.load.to_string(),
            row.policies.to_owned(),
            format!("{:.1}", row.excess),
            format!("{:.0}", row.moves),
            format!("{:.0}", row.undone),
        ]);
    }
    output!("{}", table.text());
    Ok(())
}
