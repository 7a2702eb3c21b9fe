//! Conductors: the unmodified conductor state machines of `holdfast-proto` on all nodes of a group, with processes whose
//! loads are steady, noisy, bursty or daily, clocks that are apart, and a network that loses, repeats and delays frames.
//!
//! A daemon may die at each point of a negotiation; moves under way go on without it. Oracles check after every event that
//! no process is lost or doubled, that each node takes part in one move at a time, within the limit of moves a minute, and
//! calms down, that no process moves again within its rest, that a move helps, and that pins and labels are obeyed. After
//! the end of all faults, loads that do not change by themselves are even within twice the time of a central planner
//! under the same limits, and then no process moves any more.
//!
//! In some seeds a node lies about its load, a host outside the group sends forged frames, load messages come up to a minute
//! late, nodes have little memory, or all nodes are overloaded at once.

mod balance_check;
mod bug;
mod central_balancing;
mod central_planner;
mod demand;
mod frame_delivery;
mod measurements;
mod moves;
mod node;
mod oracle;
mod plan;
mod world;

pub use bug::ConductorBug;
pub use demand::{Demand, DemandPattern};
pub use measurements::{
    BalanceTimes, ChangingLoad, ConductorFrameRates, PolicyEffect, PolicyRun,
    measure_balance_times, measure_conductor_frame_rates, measure_policy_effect,
};
pub use plan::{
    BalancePolicies, ConductorAction, ConductorPlanDistribution, ConductorRunConfig, CrashPoint,
    SimulatedProcess, draw_run_config,
};

use crate::Violation;
use crate::node_group::{CountRange, FaultFrequencies, GroupRunOutcome, ShrunkSeedFailure};
use crate::shrink::shrink_plan;
use crate::time::Time;
use world::ConductorWorld;

/// Three to eight nodes with some processes, and faults for three minutes.
pub const DEFAULT: ConductorPlanDistribution = ConductorPlanDistribution {
    nodes: CountRange::new(3, 8),
    processes_per_node: CountRange::new(8, 14),
    incidents: CountRange::new(2, 8),
    incidents_begin: Time::from_micros(60_000_000),
    faults_end: Time::from_micros(240_000_000),
    calm: 0.6,
    liar: 0.15,
    guest: 0.3,
    stale: 0.3,
    full: 0.15,
    pinned: 0.05,
    labelled: 0.1,
    crash: 0.6,
    isolate: 0.2,
    remove: 0.15,
    drain: 0.2,
    surge: 0.2,
    overload: 0.1,
    faults: FaultFrequencies::DEFAULT,
};

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &ConductorRunConfig,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    let mut world = ConductorWorld::new(config, seed, trace.is_some());
    let result = world.run();
    if let Some(trace) = trace {
        *trace = world.take_trace();
    }
    result
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &ConductorPlanDistribution,
    seed: u64,
    bug: Option<ConductorBug>,
) -> Option<ShrunkSeedFailure<ConductorRunConfig>> {
    let mut config = draw_run_config(setting, seed, bug);
    let fails = |config: &ConductorRunConfig| try_run(config, seed, None).err();
    let mut violation = fails(&config)?;
    let with_fewer_faults: [fn(&mut ConductorRunConfig); 7] = [
        |config| config.liar = None,
        |config| config.guest = false,
        |config| config.stale = false,
        |config| config.room = None,
        |config| config.hostile = false,
        |config| config.failing = false,
        |config| config.faults = FaultFrequencies::NONE,
    ];
    for calm in with_fewer_faults {
        let mut with = config.clone();
        calm(&mut with);
        if let Some(again) = fails(&with) {
            (config, violation) = (with, again);
        }
    }
    let with = |plan: &[(Time, ConductorAction)]| ConductorRunConfig {
        plan: plan.to_vec(),
        ..config.clone()
    };
    let (plan, violation) = shrink_plan(config.plan.clone(), violation, |plan| fails(&with(plan)));
    let config = with(&plan);
    let mut trace = Vec::new();
    let _ = try_run(&config, seed, Some(&mut trace));
    Some(ShrunkSeedFailure {
        config,
        violation,
        trace,
    })
}
