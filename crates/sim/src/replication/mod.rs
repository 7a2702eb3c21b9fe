//! Replication: the unmodified state machine of `holdfast-proto`, a model of the replicator's data plane, clients and servers with
//! TCP endpoints, and a backup, over links that lose and reorder packets.
//!
//! Servers are killed, stopped and slowed, hosts and links are lost, outputs get wrong bytes, and the contact node is replaced by
//! its backup. Oracles check after every event that all live legs have what a client is told is acknowledged, that a client
//! reads the right bytes once, and that it is reset, or its output ends early, only when no leg is sound; that no leg is dropped
//! without a fault, a dead one is dropped in time, and no leg that lacks input goes on; that a wrong byte is reported in time,
//! and a leg with a wrong byte is not promoted while a sound one lives. At the end each client has its whole answer.

mod bug;
mod client;
mod data_plane;
mod endpoint;
mod flow;
mod host;
mod oracle;
mod plan;
mod program;
mod world;

pub use bug::ReplicationBug;
pub use plan::{
    ReplicationAction, ReplicationPlanDistribution, ReplicationRunConfig, draw_run_config,
};

use crate::Violation;
use crate::node_group::{CountRange, GroupRunOutcome, ShrunkSeedFailure};
use crate::shrink::shrink_plan;
use crate::time::Time;
use world::ReplicationWorld;

/// Two to four legs, some clients, and a few faults.
pub const DEFAULT: ReplicationPlanDistribution = ReplicationPlanDistribution {
    legs: CountRange::new(2, 4),
    clients: CountRange::new(1, 3),
    incidents: CountRange::new(0, 3),
    runtime: Time::from_micros(1_500_000),
    deadline: Time::from_micros(30_000_000),
    lossy: 0.4,
    loss: 0.01,
    reorder: 0.02,
    all_may_fail: 0.25,
    contact_lost: 0.2,
    second_fault: 0.3,
    kill: 4,
    kill_worker: 2,
    stop: 2,
    lose_host: 3,
    cut: 2,
    slow: 2,
    differ: 3,
};

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of the state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &ReplicationRunConfig,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    let mut world = ReplicationWorld::new(config, seed, trace.is_some());
    let result = world.run();
    if let Some(trace) = trace {
        *trace = world.take_trace();
    }
    result
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &ReplicationPlanDistribution,
    seed: u64,
    bug: Option<ReplicationBug>,
) -> Option<ShrunkSeedFailure<ReplicationRunConfig>> {
    let mut config = draw_run_config(setting, seed, bug);
    let fails = |config: &ReplicationRunConfig| try_run(config, seed, None).err();
    let mut violation = fails(&config)?;
    let with_fewer_faults: [fn(&mut ReplicationRunConfig); 3] = [
        |config| config.loss = 0.0,
        |config| config.reorder = 0.0,
        |config| config.clients = 1,
    ];
    for calm in with_fewer_faults {
        let mut with = config.clone();
        calm(&mut with);
        if let Some(again) = fails(&with) {
            (config, violation) = (with, again);
        }
    }
    let with = |plan: &[(Time, ReplicationAction)]| ReplicationRunConfig {
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
