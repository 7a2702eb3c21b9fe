//! Tests of membership.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::membership::{DEFAULT, MembershipBug, draw_run_config, shrink, try_run};
use holdfast_sim::node_group::GroupRunOutcome;

fn run(seed: u64, bug: Option<MembershipBug>) -> Result<GroupRunOutcome, Violation> {
    try_run(&draw_run_config(&DEFAULT, seed, bug), seed, None)
}

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 17] = [
    "view committed",
    "contact node changed",
    "takeover started",
    "backup silent",
    "contact silent",
    "lease given up",
    "joined",
    "removed: Suspected",
    "removed: Operator",
    "removed: Left",
    "save failed",
    "Promote",
    "Remove",
    "GroupData",
    "ServerNodeFailed",
    "crash of ContactNode, saving",
    "crash of Backup, saving",
];

#[test]
fn one_node_has_the_lease_and_finally_all_are_members() {
    assert_all(
        1_000,
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
        &MembershipBug::ALL,
        4_000,
        |seed, bug| run(seed, Some(bug)).is_err(),
        |seed, bug| shrink(&DEFAULT, seed, Some(bug)),
        |config| config.plan,
    );
}

#[test]
fn successful_run_does_not_shrink() {
    assert!(shrink(&DEFAULT, 1, None).is_none());
}
