//! Tests of migrations.

use crate::{assert_all, assert_found, assert_same_again};
use holdfast_sim::Violation;
use holdfast_sim::group::Outcome;
use holdfast_sim::migration::{Bug, DEFAULT, schedule, shrink, try_run};

fn run(seed: u64, bug: Option<Bug>) -> Result<Outcome, Violation> {
    try_run(&schedule(&DEFAULT, seed, bug), seed, None)
}

/// Kinds of events that the runs must cover.
const MET: [&str; 30] = [
    "moved",
    "cloned",
    "memory follows",
    "flows came late",
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
    "recovered donor, noted",
    "recovered acceptor, restored",
    "recovered acceptor, gone",
    "recovered peer",
];

#[test]
fn every_process_runs_once_at_any_time_and_somewhere_in_the_end() {
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
        4_000,
        |seed, bug| run(seed, Some(bug)).is_err(),
        |seed, bug| shrink(&DEFAULT, seed, Some(bug)),
    );
}

#[test]
fn what_comes_right_does_not_shrink() {
    assert!(shrink(&DEFAULT, 1, None).is_none());
}
