//! Resolutions that repeat the previous one: the answers are the same as without the cache.

use crate::setup::*;
use holdfast_proto::registrar::{Allow, Config};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolHandle};

const RR: Policy = Policy::RoundRobin;

fn ask(handle: PoolHandle, items: Option<u32>) -> Asap {
    Asap::HandleResolution {
        updates: false,
        handle,
        items,
    }
}

/// Returns a registrar with a pool of five elements.
fn five(config: Config, policy: Policy) -> Bench {
    let mut bench = Bench::new(config);
    for host in 1..6 {
        let from = bench.up(host);
        bench.register(from, element(host.into(), host, policy));
    }
    bench
}

/// Returns the answers to a user that often asks for the pool, with another request in between or without.
fn answers(policy: Policy, items: Option<u32>, same: bool) -> Vec<Out> {
    let mut bench = five(config(), policy);
    let (from, user) = (bench.up(9), bench.up(70));
    let other = PoolHandle::from("another");
    let registration = Asap::Registration {
        handle: other.clone(),
        element: element(9, 9, RR),
    };
    bench.asap(from, &registration);
    let mut all = Vec::new();
    for turn in 0..12 {
        if !same {
            bench.asap(user, &ask(other.clone(), items));
        }
        if turn == 6 {
            // One element deregisters.
            let (handle, id) = (handle(), ElementId(3));
            bench.asap(3, &Asap::Deregistration { handle, id });
        }
        all.extend(bench.asap(user, &ask(handle(), items)));
    }
    let answered = if same { 12 } else { 24 };
    assert_eq!(bench.machine.counters().resolutions, answered);
    all
}

#[test]
fn the_same_again_is_answered_in_the_same_way() {
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
fn a_pool_that_is_gone_is_not_resolved() {
    let mut bench = Bench::new(config());
    let (from, user) = (bench.up(9), bench.up(70));
    bench.register(from, element(1, 9, RR));
    for _ in 0..3 {
        bench.asap(user, &ask(handle(), None));
    }
    let (gone, id) = (handle(), ElementId(1));
    bench.asap(from, &Asap::Deregistration { handle: gone, id });
    let unknown = [CauseCode::UNKNOWN_POOL_HANDLE];
    for _ in 0..2 {
        let outputs = bench.asap(user, &ask(handle(), None));
        assert_eq!(crate::security::causes(&outputs), unknown);
    }
    // The pool is created again, with another policy.
    bench.register(from, element(1, 9, Policy::Random));
    for _ in 0..2 {
        let outputs = bench.asap(user, &ask(handle(), None));
        let Some(Out::Asap(_, Asap::HandleResolutionResponse { policy, .. })) = outputs.first()
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(*policy, Some(Policy::Random));
    }
}

#[test]
fn who_may_no_longer_resolve_is_refused() {
    let mut config = config();
    let mut bench = five(config.clone(), RR);
    let user = bench.up(70);
    for _ in 0..3 {
        bench.asap(user, &ask(handle(), None));
    }
    config.settings.access.resolve = Allow::Only(Vec::new());
    bench.machine.handle_settings(bench.now, config.settings);
    bench.outputs();
    let outputs = bench.asap(user, &ask(handle(), None));
    let refusal = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(crate::security::causes(&outputs), refusal);
}

#[test]
fn a_smaller_limit_holds_at_once() {
    let mut config = config();
    let mut bench = five(config.clone(), RR);
    let user = bench.up(70);
    for items in [5, 2] {
        config.settings.resolution_items_max = items;
        let settings = config.settings.clone();
        bench.machine.handle_settings(bench.now, settings);
        bench.outputs();
        for _ in 0..3 {
            let outputs = bench.asap(user, &ask(handle(), Some(5)));
            let Some(Out::Asap(_, Asap::HandleResolutionResponse { elements, .. })) =
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
fn a_wish_to_hear_of_changes_is_heard() {
    let mut bench = five(config(), RR);
    let user = bench.up(70);
    let wish = |updates| Asap::HandleResolution {
        updates,
        handle: handle(),
        items: None,
    };
    for updates in [false, false, true, false, false] {
        let outputs = bench.asap(user, &wish(updates));
        let Some(Out::Asap(_, Asap::HandleResolutionResponse { updates: noted, .. })) =
            outputs.first()
        else {
            panic!("{outputs:?}");
        };
        assert_eq!(*noted, updates);
    }
}
