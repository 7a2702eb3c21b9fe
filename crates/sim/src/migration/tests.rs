//! Tests without faults: each process moves from node to node and on, with its clients and its connections.

use super::host::ProcessIdentity;
use super::world::MigrationWorld;
use super::{DEFAULT, MigrationPlanDistribution, draw_run_config};
use crate::node_group::{self, CountRange, FaultFrequencies, GroupWorld as _};
use crate::time::Time;
use holdfast_proto::migration::{MoveRequestOptions, ProcessId};

/// Returns a world without faults and requests.
fn faultless_world(seed: u64) -> MigrationWorld {
    let group = node_group::PlanDistribution {
        requests: CountRange::new(0, 0),
        faults: FaultFrequencies::NONE,
        ..DEFAULT.group
    };
    let setting = MigrationPlanDistribution { group, ..DEFAULT };
    MigrationWorld::new(&draw_run_config(&setting, seed, None), seed)
}

const END_OF_TIME: Time = Time(u64::MAX);

/// Runs until no state machine has work left and all reports have arrived.
fn run_until_idle(world: &mut MigrationWorld) {
    while world.handle_next(END_OF_TIME) {}
    assert!(world.is_idle());
}

fn is_kept(world: &MigrationWorld) -> Option<&String> {
    let mut counts = world.core.counts.keys();
    counts.find(|what| what.starts_with("kept"))
}

#[test]
fn all_processes_move_round_without_faults() {
    for seed in 0..200 {
        let mut world = faultless_world(seed);
        run_until_idle(&mut world);
        for _ in 0..3 {
            let nodes = world.hosts.len();
            let all_processes = world.hosts.iter().enumerate().flat_map(|(node, host)| {
                let processes = host.processes.keys();
                processes.map(move |process| (node, *process))
            });
            for (node, process) in all_processes.collect::<Vec<_>>() {
                world.serve();
                world.move_process(
                    node,
                    process,
                    (node + 1) % nodes,
                    MoveRequestOptions::default(),
                );
                run_until_idle(&mut world);
            }
        }
        assert_eq!(world.core.violation, None, "seed {seed}");
        assert_eq!(world.check_idle_state(), Ok(()), "seed {seed}");
        assert_eq!(is_kept(&world), None, "seed {seed}");
        assert!(world.core.counts["moved"] >= 6, "seed {seed}");
    }
}

/// A peer without a running daemon does not prevent a process from moving: this node forwards the connections that are
/// not translated.
#[test]
fn connections_to_a_peer_without_a_daemon_are_forwarded() {
    let mut moved = 0;
    for seed in 0..100 {
        let mut world = faultless_world(seed);
        run_until_idle(&mut world);
        let home = |number| world.nodes_of(ProcessIdentity::Original(number))[0];
        let (from, peer) = (home(0), home(1));
        let to = (0..world.hosts.len()).find(|node| ![from, peer].contains(node));
        if from == peer || peer == world.core.holder {
            continue;
        }
        world.crash(peer);
        let process = first_process(&world, from);
        world.move_process(
            from,
            process,
            to.expect("a third"),
            MoveRequestOptions::default(),
        );
        let end = world.core.now + Time::from_secs_f64(5.0);
        while world.handle_next(end) {}
        let count = |what| world.core.counts.get(what).copied();
        assert_eq!(count("forwarded"), Some(1), "seed {seed}");
        assert_eq!(count("moved"), Some(1), "seed {seed}");
        world.restart(peer);
        run_until_idle(&mut world);
        assert_eq!(world.core.violation, None, "seed {seed}");
        assert_eq!(world.check_idle_state(), Ok(()), "seed {seed}");
        moved += 1;
    }
    assert!(moved > 10, "{moved}");
}

/// Returns the first process, which is at that node.
fn first_process(world: &MigrationWorld, node: usize) -> ProcessId {
    let mut processes = world.hosts[node].processes.iter();
    let first =
        processes.find(|(_, process)| process.image.identity == ProcessIdentity::Original(0));
    *first.expect("it is there").0
}
