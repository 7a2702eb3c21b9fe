//! Tests of membership.

use crate::{assert_all, assert_bugs_detected, assert_deterministic};
use holdfast_sim::Violation;
use holdfast_sim::membership::{
    DEFAULT, FrameRates, MembershipBug, draw_run_config, measure_frame_rates, shrink, try_run,
};
use holdfast_sim::node_group::GroupRunOutcome;

common_simulation_tests!(MembershipBug, seeds_per_bug: 4_000);

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 19] = [
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
    "guest's frame",
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
fn frames_per_second_do_not_grow_with_server_nodes_but_at_the_contact_node() {
    let rates = |server_nodes| -> FrameRates {
        let rates = measure_frame_rates(3, server_nodes, 1);
        rates.unwrap_or_else(|violation| panic!("{violation:?}"))
    };
    let (few, many) = (rates(10), rates(1_000));
    eprintln!("10 server nodes: {few:?}\n1,000 server nodes: {many:?}");
    assert!(
        many.server_node <= few.server_node + 0.2,
        "{few:?} {many:?}"
    );
    assert!(many.backup <= few.backup + 0.2, "{few:?} {many:?}");
    let per_server_node = (many.contact_node - few.contact_node) / 990.0;
    assert!(per_server_node <= 2.0, "{few:?} {many:?}");
}
