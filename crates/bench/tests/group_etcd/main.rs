//! A group that keeps its views in etcd loses its contact node, etcd's leader and etcd's majority, under a steady load and
//! with new clients. Needs root and Debian's `etcd-server`.
//!
//! By default the group has 48 connections and each fault happens once. With `HOLDFAST_WHOLE`, 500 connections see 20
//! losses of the contact node's host and 5 of each other fault.

#[path = "../common/mod.rs"]
mod common;

use std::time::Duration;

use holdfast_bench::group::{EtcdFault, Fault, FaultGroup, FaultSample};

use common::lock_lab;

/// Longest median gap of a connection whose owner goes on, when the contact node's host is lost: the silence, and the wait
/// for the end of the former lease.
const CLIENT_GAP_MAX: Duration = Duration::from_millis(1_200);
/// Longest median time until new clients are accepted after the loss of the contact node's host.
const ACCEPT_GAP_MAX: Duration = Duration::from_millis(800);
/// Longest time until new clients are accepted after the loss of etcd's leader: an election takes up to 2 s.
const ELECTION_GAP_MAX: Duration = Duration::from_secs(4);
/// Factor for the gaps of the short form, which runs beside other work of the machine.
const BUSY_MACHINE_FACTOR: u32 = 3;

fn assert_unharmed(sample: &FaultSample, what: &str) {
    eprintln!("{what}: {sample:?}");
    assert_eq!(sample.resets, 0, "{what}: {sample:?}");
    assert_eq!(sample.bytes_wrong, 0, "{what}: {sample:?}");
}

fn assert_gap(mut gaps: Vec<Duration>, longest: Duration) {
    gaps.sort();
    let median = gaps[gaps.len() / 2];
    assert!(median <= longest, "exceeded time: {median:?} of {gaps:?}");
}

#[test]
fn views_in_etcd_survive_the_contact_node_and_etcd_changes_nothing_else() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let is_whole = std::env::var_os("HOLDFAST_WHOLE").is_some();
    let (connections, losses, repeats, factor) = match is_whole {
        true => (500, 20, 5, 1),
        false => (48, 1, 1, BUSY_MACHINE_FACTOR),
    };
    let group = FaultGroup::with_etcd("etcd").unwrap();

    for fault in [EtcdFault::LeaderKilled, EtcdFault::MajorityLost] {
        for repeat in 0..repeats {
            let sample = group.run_etcd_fault(fault, connections).unwrap();
            assert_unharmed(&sample, &format!("{fault:?} {repeat}"));
            // A daemon that gets no CPU is late for its deadlines, which brings views: the test run repeats the test alone.
            assert_eq!(sample.views, 0, "exceeded time: views: {sample:?}");
            assert_eq!(sample.contacts[0], sample.contacts[1], "{sample:?}");
            if fault == EtcdFault::LeaderKilled {
                let longest = factor * ELECTION_GAP_MAX;
                let gap = sample.accept_gap;
                assert!(gap <= longest, "exceeded time: {gap:?}");
            }
        }
    }

    // With its majority, etcd takes changes again.
    let mut gaps = (Vec::new(), Vec::new());
    for repeat in 0..losses {
        let sample = group
            .run_fault(Fault::ContactHostLost, connections)
            .unwrap();
        assert_unharmed(&sample, &format!("contact node's host lost {repeat}"));
        assert_eq!(sample.views, 1, "exceeded time: more views: {sample:?}");
        gaps.0.push(sample.accept_gap);
        gaps.1.push(sample.client_gap);
    }
    assert_gap(gaps.0, factor * ACCEPT_GAP_MAX);
    assert_gap(gaps.1, factor * CLIENT_GAP_MAX);
}
