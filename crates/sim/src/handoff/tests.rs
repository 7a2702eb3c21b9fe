//! Tests without faults: every flow moves, from node to node and on, and quickly.

use super::node::Entry;
use super::world::World;
use super::{DEFAULT, schedule};
use crate::group::{Faults, Setting, Span, World as _};
use crate::time::Time;
use holdfast_proto::handoff::Drain;
use holdfast_wire::Flow;

/// Returns a world without faults and requests.
fn calm(seed: u64) -> World {
    let setting = Setting {
        requests: Span::new(0, 0),
        faults: Faults::NONE,
        ..DEFAULT
    };
    World::new(&schedule(&setting, seed, None), seed)
}

/// Runs until no state machine has work left; returns the duration.
fn rest(world: &mut World) -> Time {
    let begun = world.core.now;
    while !world.is_at_rest() && world.next(Time(u64::MAX)) {}
    world.core.now - begun
}

#[test]
fn in_a_calm_world_all_flows_go_round() {
    for seed in 0..300 {
        let mut world = calm(seed);
        rest(&mut world);
        let nodes = world.nodes.len();
        for node in 0..nodes - 1 {
            world.serve();
            let owned = |flow: &&Flow| {
                world.nodes[node]
                    .kernel
                    .get(flow)
                    .is_some_and(Entry::speaks)
            };
            let flows: Vec<Flow> = world.flows.iter().filter(owned).copied().collect();
            world.hand(node, node + 1, flows, Drain::No);
            let took = rest(&mut world);
            assert!(
                took < Time::from_secs_f64(0.1),
                "seed {seed}: it took {took:?}"
            );
        }
        assert_eq!(world.core.violation, None, "seed {seed}");
        assert_eq!(world.check_rest(), Ok(()), "seed {seed}");
        let last = world.nodes[nodes - 1].kernel.values();
        let owned = last.filter(|entry| entry.speaks()).count();
        assert_eq!(owned, world.flows.len(), "seed {seed}");
        let kept = (world.core.counts.keys()).find(|what| what.starts_with("kept"));
        assert_eq!(kept, None, "seed {seed}");
    }
}
