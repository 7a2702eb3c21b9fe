//! Tests of handoffs.

use crate::{assert_all, assert_found, assert_same_again};
use holdfast_sim::Violation;
use holdfast_sim::group::Outcome;
use holdfast_sim::handoff::{Bug, DEFAULT, schedule, shrink, try_run};

fn run(seed: u64, bug: Option<Bug>) -> Result<Outcome, Violation> {
    try_run(&schedule(&DEFAULT, seed, bug), seed, None)
}

/// Kinds of events that the runs must cover.
const MET: [&str; 22] = [
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
    "crash with a flow Out",
    "crash with a flow In",
    "activated after restart",
    "discarded after restart",
    "holder silent",
];

#[test]
fn every_flow_has_one_speaker_at_any_time_and_one_owner_in_the_end() {
    assert_all(
        |seed| run(seed, None),
        |seed| shrink(&DEFAULT, seed, None),
        &MET,
    );
}

#[test]
fn a_seed_gives_the_same_run_again() {
    assert_same_again(|seed| run(seed, None));
}

#[test]
fn each_deliberate_bug_is_found_and_shrinks() {
    assert_found(
        &Bug::ALL,
        400,
        |seed, bug| run(seed, Some(bug)).is_err(),
        |seed, bug| shrink(&DEFAULT, seed, Some(bug)),
    );
}

#[test]
fn what_comes_right_does_not_shrink() {
    assert!(shrink(&DEFAULT, 1, None).is_none());
}
