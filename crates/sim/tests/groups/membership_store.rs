//! Tests of membership with the views in a store.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::membership::{MembershipBug, WITH_STORE, draw_run_config, shrink, try_run};
use holdfast_sim::node_group::GroupRunOutcome;

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 20] = [
    "view committed",
    "contact node changed",
    "takeover started",
    "backup silent",
    "lease given up",
    "joined",
    "removed: Suspected",
    "removed: Operator",
    "removed: Left",
    "save failed",
    "Promote",
    "Remove",
    "settings changed",
    "store answers: true",
    "store answers: false",
    "request to the store lost",
    "request to the store without a majority",
    "stored without an answer",
    "answer of the store lost",
    "proposal refused by the store",
];

fn run(seed: u64, bug: Option<MembershipBug>) -> Result<GroupRunOutcome, Violation> {
    try_run(&draw_run_config(&WITH_STORE, seed, bug), seed, None)
}

#[test]
fn equal_seeds_give_equal_runs_with_a_store() {
    assert_deterministic(|seed| run(seed, None));
}

#[test]
fn store_decides_and_one_node_has_the_lease() {
    assert_all(
        1_000,
        |seed| run(seed, None),
        |seed| shrink(&WITH_STORE, seed, None),
        &EXPECTED_COUNTS,
    );
}

#[test]
fn deliberate_bugs_of_a_store_are_detected_and_shrink() {
    assert_bugs_detected(
        &MembershipBug::OF_STORE,
        4_000,
        |seed, bug| run(seed, Some(bug)).is_err(),
        |seed, bug| shrink(&WITH_STORE, seed, Some(bug)),
        |config| config.plan,
    );
}
