//! Tests of handoffs.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::handoff::{DEFAULT, HandoffBug, draw_run_config, shrink, try_run};
use holdfast_sim::node_group::GroupRunOutcome;

fn run(seed: u64, bug: Option<HandoffBug>) -> Result<GroupRunOutcome, Violation> {
    try_run(&draw_run_config(&DEFAULT, seed, bug), seed, None)
}

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 22] = [
    "moved",
    "kept: UnknownFlow",
    "kept: AlreadyMoving",
    "kept: refused",
    "kept: not extracted",
    "kept: timed out in prepare",
    "kept: timed out in divert",
    "kept: timed out in transfer",
    "kept: lost in prepare",
    "kept: lost in drain",
    "kept: lost in divert",
    "kept: lost in extract",
    "kept: lost in transfer",
    "kept: Restarted",
    "commit refused",
    "rollback refused",
    "crash with a flow Prepared",
    "crash with a flow Outgoing",
    "crash with a flow Incoming",
    "activated after restart",
    "discarded after restart",
    "holder silent",
];

#[test]
fn every_flow_has_at_most_one_sender_and_finally_one_owner() {
    assert_all(
        3_000,
        |seed| run(seed, None),
        |seed| shrink(&DEFAULT, seed, None),
        &EXPECTED_COUNTS,
    );
}

#[test]
fn equal_seeds_give_equal_runs() {
    assert_deterministic(|seed| run(seed, None));
}

#[test]
fn deliberate_bugs_are_detected_and_shrink() {
    assert_bugs_detected(
        &HandoffBug::ALL,
        400,
        |seed, bug| run(seed, Some(bug)).is_err(),
        |seed, bug| shrink(&DEFAULT, seed, Some(bug)),
        |config| config.plan,
    );
}

#[test]
fn successful_run_does_not_shrink() {
    assert!(shrink(&DEFAULT, 1, None).is_none());
}
