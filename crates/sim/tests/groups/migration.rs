//! Tests of migrations.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::migration::{DEFAULT, MigrationBug, draw_run_config, shrink, try_run};
use holdfast_sim::node_group::GroupRunOutcome;

common_simulation_tests!(MigrationBug, seeds_per_bug: 4_000);

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 33] = [
    "moved",
    "cloned",
    "post-copy started",
    "late flows",
    "holder silent",
    "kept: Blocked",
    "kept: Cancelled",
    "kept: FreezeTooLong",
    "kept: PeerMoving",
    "kept: PeerRefused",
    "kept: Refused",
    "kept: Rehearsed",
    "kept: Restarted",
    "kept: failed in copy",
    "kept: failed in freeze",
    "kept: lost in arm",
    "kept: lost in copy",
    "kept: lost in divert",
    "kept: lost in transfer",
    "kept: timed out in divert",
    "kept: timed out in transfer",
    "commit of process refused",
    "commit of flow with its process",
    "commit with all flows of process refused",
    "rollback of process refused",
    "recovered donor, frozen",
    "recovered donor, flows saved",
    "recovered acceptor, restored",
    "recovered acceptor, resumed",
    "recovered peer",
    "contact changed",
    "request deferred",
    "table complete",
];

#[test]
fn every_process_runs_at_most_once_and_finally_somewhere() {
    assert_all(
        3_000,
        |seed| run(seed, None),
        |seed| shrink(&DEFAULT, seed, None),
        &EXPECTED_COUNTS,
    );
}
