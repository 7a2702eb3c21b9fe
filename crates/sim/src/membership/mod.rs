//! Membership: the unmodified membership state machines of `holdfast-proto` on all nodes of a group, with disks, clocks of
//! their own, and a network that loses, repeats and delays frames.
//!
//! A crash leaves a node its disk, on which the open save may or may not be, and its lease in the kernel. Oracles check
//! after every event that an epoch has one committed view, that a majority of the voters had the view on their disks,
//! that no node's epoch decreases, that at most one node has a lease, and that no number is given twice. After the end
//! of all faults one node has a lease, and soon all nodes are members and agree.
//!
//! With [`WITH_STORE`], the views are in a store in place of votes: a committed view is one that was in the store.
//!
//! In some seeds a hostile guest, which has a certificate of the group, sends forged frames. No node obeys a view with the
//! guest as a voter, or leaves the group for good without an operator's word; the group's secrets stay with its members.

mod bug;
mod frame_delivery;
mod frame_rates;
mod guest;
mod node;
mod oracle;
mod plan;
mod view_store;
mod world;

pub use bug::MembershipBug;
pub use frame_rates::{FrameRates, measure_frame_rates};
pub use plan::{
    MembershipAction, MembershipPlanDistribution, MembershipRunConfig, draw_run_config,
};

use crate::Violation;
use crate::node_group::{CountRange, FaultFrequencies, GroupRunOutcome, ShrunkSeedFailure};
use crate::shrink::shrink_plan;
use crate::time::Time;
use world::MembershipWorld;

/// Three to seven voters and some server nodes, with faults for three seconds.
pub const DEFAULT: MembershipPlanDistribution = MembershipPlanDistribution {
    voters: CountRange::new(3, 7),
    server_nodes: CountRange::new(0, 3),
    incidents: CountRange::new(2, 9),
    runtime: Time::from_micros(3_000_000),
    lease_deadline: Time::from_micros(5_000_000),
    agreement_deadline: Time::from_micros(20_000_000),
    action_delay_max: Time::from_micros(300_000),
    clock_drift_ppm: 20_000,
    impatient: 0.25,
    guest: 0.3,
    store: 0.0,
    crash: 0.5,
    cut: 0.2,
    isolate: 0.2,
    partition: 0.15,
    stop: 0.25,
    leave: 0.04,
    remove: 0.04,
    promote: 0.15,
    group_data: 0.25,
    server_node_failed: 0.1,
    store_down: 0.25,
    store_cut: 0.15,
    faults: FaultFrequencies::DEFAULT,
};

/// As [`DEFAULT`], from two voters on, with the views in a store that is at times without a majority or out of reach.
pub const WITH_STORE: MembershipPlanDistribution = MembershipPlanDistribution {
    voters: CountRange::new(2, 7),
    store: 1.0,
    ..DEFAULT
};

/// Simulates a config with a seed: the same two always give the same outcome. With `trace`, every event and every
/// output of a state machine becomes a line of it.
///
/// # Errors
/// The first violated invariant.
pub fn try_run(
    config: &MembershipRunConfig,
    seed: u64,
    trace: Option<&mut Vec<String>>,
) -> Result<GroupRunOutcome, Violation> {
    let mut world = MembershipWorld::new(config, seed, trace.is_some());
    let result = world.run();
    if let Some(trace) = trace {
        *trace = world.take_trace();
    }
    result
}

/// Returns the smallest part of a failing seed's config that still fails. None if the seed does not fail.
#[must_use]
pub fn shrink(
    setting: &MembershipPlanDistribution,
    seed: u64,
    bug: Option<MembershipBug>,
) -> Option<ShrunkSeedFailure<MembershipRunConfig>> {
    let mut config = draw_run_config(setting, seed, bug);
    let fails = |config: &MembershipRunConfig| try_run(config, seed, None).err();
    let mut violation = fails(&config)?;
    let with_fewer_faults: [fn(&mut MembershipRunConfig); 6] = [
        |config| config.impatient = false,
        |config| config.guest = false,
        |config| config.hostile = false,
        |config| config.failing = false,
        |config| config.faults = FaultFrequencies::NONE,
        |config| config.server_nodes = 0,
    ];
    for calm in with_fewer_faults {
        let mut with = config.clone();
        calm(&mut with);
        if let Some(again) = fails(&with) {
            (config, violation) = (with, again);
        }
    }
    let with = |plan: &[(Time, MembershipAction)]| MembershipRunConfig {
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
