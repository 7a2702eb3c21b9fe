//! Tests of handoffs.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::handoff::{
    DEFAULT, HandoffBug, draw_run_config, draw_run_config_with_liar, shrink, shrink_with_liar,
    try_run,
};
use holdfast_sim::node_group::GroupRunOutcome;

common_simulation_tests!(HandoffBug, seeds_per_bug: 400);

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 25] = [
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
    "contact changed",
    "request deferred",
    "table complete",
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
fn node_that_claims_flows_of_others_takes_none() {
    assert_all(
        3_000,
        |seed| try_run(&draw_run_config_with_liar(&DEFAULT, seed), seed, None),
        |seed| shrink_with_liar(&DEFAULT, seed),
        &["moved", "table complete", "lies sent", "claims disputed"],
    );
}
