//! Tests without faults: every flow moves, from node to node and on, and quickly.

use super::node::KernelFlowEntry;
use super::world::HandoffWorld;
use super::{DEFAULT, draw_run_config};
use crate::node_group::{CountRange, FaultFrequencies, GroupWorld as _, PlanDistribution};
use crate::time::Time;
use holdfast_proto::handoff::DrainPolicy;
use holdfast_wire::Flow;

/// Returns a world without faults and requests.
fn faultless_world(seed: u64) -> HandoffWorld {
    let setting = PlanDistribution {
        requests: CountRange::new(0, 0),
        faults: FaultFrequencies::NONE,
        ..DEFAULT
    };
    HandoffWorld::new(&draw_run_config(&setting, seed, None), seed)
}

/// Runs until no state machine has work left; returns the duration.
fn run_until_idle(world: &mut HandoffWorld) -> Time {
    let started_at = world.core.now;
    while !world.is_idle() && world.handle_next(Time(u64::MAX)) {}
    world.core.now - started_at
}

#[test]
fn all_flows_move_round_without_faults() {
    for seed in 0..300 {
        let mut world = faultless_world(seed);
        run_until_idle(&mut world);
        let nodes = world.nodes.len();
        for node in 0..nodes - 1 {
            world.serve();
            let owned = |flow: &&Flow| {
                world.nodes[node]
                    .kernel
                    .get(flow)
                    .is_some_and(KernelFlowEntry::may_send)
            };
            let flows: Vec<Flow> = world.flows.iter().filter(owned).copied().collect();
            world.start_handoff(node, node + 1, flows, DrainPolicy::No);
            let duration = run_until_idle(&mut world);
            assert!(
                duration < Time::from_secs_f64(0.1),
                "seed {seed}: it took {duration:?}"
            );
        }
        assert_eq!(world.core.violation, None, "seed {seed}");
        assert_eq!(world.check_idle_state(), Ok(()), "seed {seed}");
        let last = world.nodes[nodes - 1].kernel.values();
        let owned = last.filter(|entry| entry.may_send()).count();
        assert_eq!(owned, world.flows.len(), "seed {seed}");
        let kept_count = (world.core.counts.keys()).find(|what| what.starts_with("kept"));
        assert_eq!(kept_count, None, "seed {seed}");
    }
}
