//! Resolutions that repeat the previous one: the answers are the same as without the cache.

use crate::test_bench::*;
use holdfast_proto::registrar::{PermittedHosts, RegistrarMachineConfig};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolHandle};

const RR: Policy = Policy::RoundRobin;

fn resolution_request(handle: PoolHandle, items: Option<u32>) -> Asap {
    Asap::HandleResolution {
        updates: false,
        handle,
        items_max: items,
    }
}

/// Returns a registrar with a pool of five elements.
fn bench_with_five_elements(config: RegistrarMachineConfig, policy: Policy) -> TestBench {
    let mut bench = TestBench::new(config);
    for host in 1..6 {
        let from = bench.open_association(host);
        bench.register(from, element(host.into(), host, policy));
    }
    bench
}

/// Returns the answers to a user that often asks for the pool, with another request in between or without.
fn answers(policy: Policy, items: Option<u32>, without_other_requests: bool) -> Vec<TestOutput> {
    let mut bench = bench_with_five_elements(config(), policy);
    let (from, user) = (bench.open_association(9), bench.open_association(70));
    let other = PoolHandle::from("another");
    let registration = Asap::Registration {
        handle: other.clone(),
        element: element(9, 9, RR),
    };
    bench.send_asap(from, &registration);
    let mut all = Vec::new();
    for turn in 0..12 {
        if !without_other_requests {
            bench.send_asap(user, &resolution_request(other.clone(), items));
        }
        if turn == 6 {
            // One element deregisters.
            let (handle, id) = (handle(), ElementId(3));
            bench.send_asap(3, &Asap::Deregistration { handle, id });
        }
        all.extend(bench.send_asap(user, &resolution_request(handle(), items)));
    }
    let answered = if without_other_requests { 12 } else { 24 };
    assert_eq!(bench.machine.counters().resolutions, answered);
    all
}

#[test]
fn repeated_resolution_gets_same_answer() {
    let policies = [
        RR,
        Policy::WeightedRoundRobin { weight: 3 },
        Policy::LeastUsed { load: 7 },
        Policy::Priority { priority: 3 },
        Policy::LeastUsedDpf {
            load: 7,
            dpf: 1 << 20,
            distance: 0,
        },
    ];
    for policy in policies {
        for items in [None, Some(0), Some(1), Some(3), Some(100)] {
            let all = answers(policy, items, true);
            assert_eq!(all, answers(policy, items, false), "{policy:?} {items:?}");
            assert_eq!(all.len(), 12);
        }
    }
}

#[test]
fn removed_pool_is_not_resolved_from_cache() {
    let mut bench = TestBench::new(config());
    let (from, user) = (bench.open_association(9), bench.open_association(70));
    bench.register(from, element(1, 9, RR));
    for _ in 0..3 {
        bench.send_asap(user, &resolution_request(handle(), None));
    }
    let (removed_pool, id) = (handle(), ElementId(1));
    bench.send_asap(
        from,
        &Asap::Deregistration {
            handle: removed_pool,
            id,
        },
    );
    let unknown = [CauseCode::UNKNOWN_POOL_HANDLE];
    for _ in 0..2 {
        let outputs = bench.send_asap(user, &resolution_request(handle(), None));
        assert_eq!(crate::security::causes(&outputs), unknown);
    }
    // The pool is created again, with another policy.
    bench.register(from, element(1, 9, Policy::Random));
    for _ in 0..2 {
        let outputs = bench.send_asap(user, &resolution_request(handle(), None));
        let Some(TestOutput::Asap(_, Asap::HandleResolutionResponse { policy, .. })) =
            outputs.first()
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(*policy, Some(Policy::Random));
    }
}

#[test]
fn user_without_permission_is_refused_despite_cache() {
    let mut config = config();
    let mut bench = bench_with_five_elements(config.clone(), RR);
    let user = bench.open_association(70);
    for _ in 0..3 {
        bench.send_asap(user, &resolution_request(handle(), None));
    }
    config.settings.access.resolve = PermittedHosts::Only(Vec::new());
    bench.machine.handle_settings(bench.now, config.settings);
    bench.outputs();
    let outputs = bench.send_asap(user, &resolution_request(handle(), None));
    let refusal = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(crate::security::causes(&outputs), refusal);
}

#[test]
fn reduced_item_limit_applies_at_once() {
    let mut config = config();
    let mut bench = bench_with_five_elements(config.clone(), RR);
    let user = bench.open_association(70);
    for items in [5, 2] {
        config.settings.resolution_items_max = items;
        let settings = config.settings.clone();
        bench.machine.handle_settings(bench.now, settings);
        bench.outputs();
        for _ in 0..3 {
            let outputs = bench.send_asap(user, &resolution_request(handle(), Some(5)));
            let Some(TestOutput::Asap(_, Asap::HandleResolutionResponse { elements, .. })) =
                outputs.first()
            else {
                panic!("{outputs:?}");
            };
            assert_eq!(elements.len(), items);
        }
    }
}

/// A user that subscribes to the pool gets updates, and one that ends its subscription gets none.
#[test]
fn subscription_is_honoured_despite_cache() {
    let mut bench = bench_with_five_elements(config(), RR);
    let user = bench.open_association(70);
    let resolution_with_updates = |updates| Asap::HandleResolution {
        updates,
        handle: handle(),
        items_max: None,
    };
    for updates in [false, false, true, false, false] {
        let outputs = bench.send_asap(user, &resolution_with_updates(updates));
        let Some(TestOutput::Asap(_, Asap::HandleResolutionResponse { updates: noted, .. })) =
            outputs.first()
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(*noted, updates);
    }
}
