//! Tests of the shares by each kind of policy, and of the machine's times.

use super::{NodeFigures, NodePool, NodePoolConfig, NodeShares, shares_by_policy};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::ServicePolicy;
use holdfast_wire::rserpool::PolicyKind;
use std::collections::BTreeMap;
use std::time::Duration;

const PERCENT: u32 = u32::MAX / 100;

fn policy(name: &str) -> ServicePolicy {
    ServicePolicy {
        kind: name.parse().expect("a policy"),
        degradation: 0,
        dpf: 0,
    }
}

/// Returns nodes 1, 2 and so on with these weights, loads in percent, and distances in milliseconds.
fn nodes(figures: &[(u32, u32, u32)]) -> BTreeMap<NodeId, NodeFigures> {
    let figures_of = |&(weight, load, distance_ms): &(u32, u32, u32)| NodeFigures {
        weight,
        load: load * PERCENT,
        distance_ms,
    };
    (1..)
        .map(NodeId)
        .zip(figures.iter().map(figures_of))
        .collect()
}

fn shares(policy: &ServicePolicy, figures: &[(u32, u32, u32)]) -> Vec<u32> {
    let shares = shares_by_policy(policy, &nodes(figures));
    let nodes = (1..).map(NodeId).take(figures.len());
    nodes
        .map(|node| shares.get(&node).copied().unwrap_or(0))
        .collect()
}

fn weights(weights: &[u32]) -> BTreeMap<NodeId, u32> {
    (1..).map(NodeId).zip(weights.iter().copied()).collect()
}

fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

#[test]
fn policies_without_loads_follow_their_figures() {
    let figures = [(1, 90, 0), (3, 10, 0), (0, 0, 0)];
    assert_eq!(shares(&policy("RR"), &figures), [1, 1, 0]);
    assert_eq!(shares(&policy("RAND"), &figures), [1, 1, 0]);
    assert_eq!(shares(&policy("WRR"), &figures), [1, 3, 0]);
    assert_eq!(shares(&policy("WRAND"), &figures), [1, 3, 0]);
    let priorities = shares(&policy("PRIO"), &[(1, 0, 0), (3, 0, 0), (3, 0, 0)]);
    assert!(priorities[0] == 0 && priorities[1] == priorities[2]);
}

#[test]
fn least_used_node_gets_all_until_degradation_fills_it() {
    let figures = [(1, 50, 0), (1, 20, 0), (1, 80, 0)];
    let all = shares(&policy("LU"), &figures);
    assert_eq!((all[0], all[2]), (0, 0));
    let mut degrading = policy("LUD");
    // Half of all selections fill the distance between 20 and 50 percent.
    degrading.degradation = 30 * PERCENT / 128;
    let some = shares(&degrading, &figures);
    assert!(some[1] > some[0] && some[0] > 0 && some[2] == 0, "{some:?}");
    assert!((180..=200).contains(&some[1]), "{some:?}");
}

#[test]
fn randomized_shares_follow_the_unused_load() {
    let shares = shares(&policy("RLU"), &[(1, 75, 0), (1, 50, 0)]);
    assert_eq!(shares[1], 1 << 16);
    assert!((32_700..=32_800).contains(&shares[0]), "{shares:?}");
}

#[test]
fn distance_counts_as_load() {
    let mut policy = policy("LU-DPF");
    policy.dpf = PERCENT;
    let near_and_busy = shares(&policy, &[(1, 40, 5), (1, 20, 40)]);
    assert!(near_and_busy[0] > 0 && near_and_busy[1] == 0);
    let far_and_idle = shares(&policy, &[(1, 40, 5), (1, 20, 10)]);
    assert!(far_and_idle[0] == 0 && far_and_idle[1] > 0);
}

#[test]
fn every_policy_gives_some_node_a_share() {
    for kind in PolicyKind::ALL {
        let policy = ServicePolicy {
            kind: *kind,
            degradation: PERCENT,
            dpf: PERCENT,
        };
        let shares = shares(&policy, &[(1, 100, 200), (2, 100, 200), (0, 0, 0)]);
        assert!(
            shares[0] + shares[1] > 0 && shares[2] == 0,
            "{kind}: {shares:?}"
        );
    }
    assert!(shares_by_policy(&policy("LU"), &BTreeMap::new()).is_empty());
}

fn least_used_pool() -> NodePool<u8> {
    let mut pool = NodePool::new(NodePoolConfig::default());
    pool.handle_service(ms(0), 1, policy("LU"), weights(&[1, 1]));
    assert!(pool.poll_output().is_some());
    pool
}

#[test]
fn reported_loads_change_the_shares_once_an_interval() {
    let mut pool = least_used_pool();
    pool.handle_load(ms(10), NodeId(1), 80 * PERCENT);
    pool.handle_load(ms(10), NodeId(2), 20 * PERCENT);
    assert_eq!(pool.poll_timeout(), Some(ms(1_000)));
    pool.handle_timeout(ms(500));
    assert_eq!(pool.poll_output(), None);
    pool.handle_timeout(ms(1_000));
    let shares = pool.poll_output().expect("new shares").shares;
    assert_eq!(shares.keys().copied().collect::<Vec<_>>(), [NodeId(2)]);
    assert_eq!(pool.placed(1), Some(&shares));
    pool.handle_timeout(ms(2_000));
    assert_eq!(pool.poll_output(), None, "nothing has changed");
}

#[test]
fn silent_node_counts_as_the_busiest() {
    let mut pool = least_used_pool();
    pool.handle_load(ms(10), NodeId(1), 30 * PERCENT);
    pool.handle_load(ms(10), NodeId(2), 20 * PERCENT);
    pool.handle_timeout(ms(1_000));
    assert!(pool.poll_output().is_some());
    pool.handle_load(ms(4_900), NodeId(1), 30 * PERCENT);
    pool.handle_timeout(ms(5_100));
    let shares = pool.poll_output().expect("new shares").shares;
    assert_eq!(shares.len(), 2, "the lost report counts as 30 percent");
    assert_eq!(pool.load(ms(5_100), NodeId(2)), None);
}

#[test]
fn weights_are_in_force_at_once() {
    let mut pool = least_used_pool();
    pool.handle_load(ms(10), NodeId(1), 80 * PERCENT);
    pool.handle_load(ms(10), NodeId(2), 20 * PERCENT);
    pool.handle_service(ms(20), 1, policy("LU"), weights(&[1, 0]));
    let NodeShares { service, shares } = pool.poll_output().expect("new shares");
    assert_eq!((service, shares.len()), (1, 1));
    assert!(shares.contains_key(&NodeId(1)));
    pool.handle_service(ms(30), 2, policy("WRAND"), weights(&[1, 2]));
    pool.handle_service_removed(2);
    assert_eq!(pool.poll_output(), None);
    pool.handle_service_removed(1);
    assert_eq!(pool.poll_timeout(), None);
}
