//! Tests of replication.

use crate::{assert_bugs_detected, assert_deterministic, assert_seeds};
use holdfast_sim::node_group::GroupRunOutcome;
use holdfast_sim::replication::{DEFAULT, ReplicationBug, draw_run_config, shrink, try_run};
use holdfast_sim::{Violation, seeds};

common_simulation_tests!(ReplicationBug, seeds_per_bug: 500);

/// Most seeds of the test: each runs clients and servers segment by segment, and takes about 40 ms without optimization.
const SEEDS_MAX: usize = 500;

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 17] = [
    "Promoted",
    "LeftConnection",
    "Diverged",
    "dropped: Silent",
    "dropped: ServerEnded",
    "dropped: Stalled",
    "dropped: Diverged",
    "dropped: MissedInput",
    "succession",
    "client Done",
    "client Reset",
    "Kill",
    "KillWorker",
    "Stop",
    "LoseHost",
    "Slow",
    "Differ",
];

#[test]
fn clients_read_right_bytes_and_live_legs_have_all_acknowledged_input() {
    let mut seeds = seeds::from_environment(0, SEEDS_MAX as u64);
    seeds.truncate(SEEDS_MAX);
    assert_seeds(
        &seeds,
        SEEDS_MAX,
        |seed| run(seed, None),
        |seed| shrink(&DEFAULT, seed, None),
        &EXPECTED_COUNTS,
    );
}
