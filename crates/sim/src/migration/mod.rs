//! Migration of processes: the unmodified migration state machines of `holdfast-proto` on all nodes of a group, and the
//! actions of their daemons in steps, between which a daemon may die. Two processes are connected to each other, all
//! may have clients.
//!
//! A process's state is the number of its work steps. After every event the oracle checks that no process runs
//! twice, that each has all its work steps, that exactly the node in the record may send for a flow, and that epochs do
//! not decrease. At the end every live process runs at one node, with its flows and connections, and no traces of moves
//! are left.

mod acceptor_commands;
mod actors;
mod bug;
mod commands;
mod contact_change;
mod donor_commands;
mod frame_delivery;
mod holder;
mod host;
mod oracle;
#[cfg(test)]
mod tests;
mod world;

pub use bug::MigrationBug;

use crate::Violation;
use crate::node_group::{
    self, AccompanyingAction, CountRange, FaultFrequencies, GroupAction, GroupRunOutcome,
    PlanDistribution as Shared,
};
use crate::time::Time;
use world::MigrationWorld;

/// The possible actions and faults.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationPlanDistribution {
    /// The settings common to all groups.
    pub group: Shared,
    /// Number of processes: at least two.
    pub processes: CountRange,
    /// Probability, per request, that an operator cancels it soon after.
    pub cancel: f64,
    /// Probability, per request, that a process is killed soon after.
    pub kill: f64,
    /// Share of requests for a clone.
    pub clone_share: f64,
}

/// The part of a config specific to migrations.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationSpecificConfig {
    /// Initial node of each process.
    pub initial_nodes: Vec<usize>,
    /// Share of requests for a clone.
    pub clone_share: f64,
    /// The deliberate bug, if any.
    pub bug: Option<MigrationBug>,
}

/// Configuration of a run.
pub type MigrationRunConfig = node_group::GroupRunConfig<MigrationSpecificConfig>;

/// Three to five nodes, with two or three processes that are moved around for two seconds.
pub const DEFAULT: MigrationPlanDistribution = MigrationPlanDistribution {
    group: Shared {
        nodes: CountRange::new(3, 5),
        flows: CountRange::new(0, 6),
        requests: CountRange::new(3, 13),
        runtime: Time::from_micros(2_000_000),
        idle_deadline: Time::from_micros(2_000_000_000),
        action_delay_max: Time::from_micros(15_000),
        crash: 0.4,
        cut: 0.25,
        close: 0.4,
        open: 0.4,
        faults: FaultFrequencies::DEFAULT,
    },
    processes: CountRange::new(2, 3),
    cancel: 0.08,
    kill: 0.03,
    clone_share: 0.12,
};

/// Probability, per request, that the contact node changes soon after.
const CONTACT_CHANGE: f64 = 0.2;

/// Derives a config from a setting and a seed.
#[must_use]
pub fn draw_run_config(
    setting: &MigrationPlanDistribution,
    seed: u64,
    bug: Option<MigrationBug>,
) -> MigrationRunConfig {
    let with_requests: [AccompanyingAction; 3] = [
        (setting.kill, |draw| GroupAction::Kill { draw }),
        (setting.cancel, |_| GroupAction::Cancel),
        (CONTACT_CHANGE, |draw| GroupAction::ChangeContact { draw }),
    ];
    node_group::draw_run_config(&setting.group, seed, &with_requests, |random, nodes| {
        let count = setting.processes.draw(random);
        MigrationSpecificConfig {
            initial_nodes: (0..count).map(|_| random.below(nodes)).collect(),
            clone_share: setting.clone_share,
            bug,
        }
    })
}

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &MigrationRunConfig,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    node_group::try_run::<MigrationWorld>(config, seed, trace)
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &MigrationPlanDistribution,
    seed: u64,
    bug: Option<MigrationBug>,
) -> Option<node_group::ShrunkSeedFailure<MigrationRunConfig>> {
    node_group::shrink::<MigrationWorld>(draw_run_config(setting, seed, bug), seed)
}
