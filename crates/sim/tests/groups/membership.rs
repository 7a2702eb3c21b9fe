//! Tests of membership.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::membership::{DEFAULT, MembershipBug, draw_run_config, shrink, try_run};
use holdfast_sim::node_group::GroupRunOutcome;

common_simulation_tests!(MembershipBug, seeds_per_bug: 4_000);

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 18] = [
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
    "settings changed",
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
