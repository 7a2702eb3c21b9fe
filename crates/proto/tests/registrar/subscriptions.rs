//! Users that subscribe to changes of a pool (RFC 5352 section 2.2.5).

use crate::test_bench::*;
use holdfast_proto::registrar::AssociationId;
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolElement, PoolHandle, RegistrarId};
use std::time::Duration;

fn least_used(load: u32) -> Policy {
    Policy::LeastUsed { load }
}

fn subscribe_or_resolve(bench: &mut TestBench, from: u64, updates: bool) -> Vec<TestOutput> {
    let resolution = Asap::HandleResolution {
        updates,
        handle: handle(),
        items_max: Some(9),
    };
    bench.send_asap(from, &resolution)
}

/// Returns a user's updates of the pool: the A flag, and the elements or the cause.
fn updates_for(outputs: &[TestOutput], user: u64) -> Vec<(bool, Result<Vec<u32>, CauseCode>)> {
    let each = outputs.iter().filter_map(|out| match out {
        TestOutput::Asap(
            to,
            Asap::HandleResolutionResponse {
                updates,
                elements,
                causes,
                ..
            },
        ) if *to == user => {
            let ids = elements.iter().map(|element| element.id.0).collect();
            let cause = causes.first().map(|cause| cause.code);
            Some((*updates, cause.map_or(Ok(ids), Err)))
        }
        _ => None,
    });
    each.collect()
}

#[test]
fn subscriber_gets_every_change_and_pool_end() {
    let mut bench = TestBench::new(config());
    let (from, user, other) = (
        bench.open_association(9),
        bench.open_association(70),
        bench.open_association(71),
    );
    // Updates are sent "only [...] when the Pool exists".
    let unknown = Err(CauseCode::UNKNOWN_POOL_HANDLE);
    assert_eq!(
        updates_for(&subscribe_or_resolve(&mut bench, user, true), user),
        [(false, unknown.clone())]
    );
    bench.register(from, element(1, 9, least_used(5)));
    assert_eq!(updates_for(&bench.wait(SECOND), user), []);
    assert_eq!(
        updates_for(&subscribe_or_resolve(&mut bench, user, true), user),
        [(true, Ok(vec![1]))]
    );
    assert_eq!(
        updates_for(&subscribe_or_resolve(&mut bench, other, false), other),
        [(false, Ok(vec![1]))]
    );

    let registered = bench.register(from, element(2, 9, least_used(3)));
    let outputs = [registered, bench.wait(SECOND)].concat();
    assert_eq!(updates_for(&outputs, user), [(true, Ok(vec![2, 1]))]);
    assert_eq!(updates_for(&outputs, other), []);
    // A new load is a change; an identical registration is none.
    bench.register(from, element(2, 9, least_used(9)));
    assert_eq!(
        updates_for(&bench.wait(SECOND), user),
        [(true, Ok(vec![1, 2]))]
    );
    bench.register(from, element(2, 9, least_used(9)));
    assert_eq!(updates_for(&bench.wait(SECOND), user), []);
    // A peer's update is a change as well.
    let peer = bench.add_peer(2);
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: PoolElement {
            home: RegistrarId(2),
            ..element(3, 8, least_used(1))
        },
    };
    bench.send_enrp(peer, add);
    assert_eq!(
        updates_for(&bench.wait(SECOND), user),
        [(true, Ok(vec![3, 1, 2]))]
    );

    for id in [1, 2] {
        let (handle, id) = (handle(), ElementId(id));
        bench.send_asap(from, &Asap::Deregistration { handle, id });
    }
    assert_eq!(
        updates_for(&bench.wait(SECOND), user),
        [(true, Ok(vec![3]))]
    );
    let delete = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Delete,
        handle: handle(),
        element: element(3, 8, least_used(1)),
    };
    bench.send_enrp(peer, delete);
    assert_eq!(updates_for(&bench.wait(SECOND), user), [(false, unknown)]);
    bench.register(from, element(1, 9, least_used(5)));
    assert_eq!(updates_for(&bench.wait(SECOND), user), []);
}

#[test]
fn changes_are_batched_for_all_subscribers() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, least_used(0)));
    let users: Vec<u64> = (1_000..2_000).collect();
    for user in &users {
        let at = format!("10.2.{}.{}:5000", user / 200, user % 200);
        let (id, at) = (AssociationId(*user), [at.parse().unwrap()]);
        let protocol = holdfast_proto::registrar::PoolProtocol::Asap;
        bench
            .machine
            .handle_association_up(bench.now, id, protocol, &at, None);
        subscribe_or_resolve(&mut bench, *user, true);
    }
    for load in 1..=100 {
        bench.register(from, element(1, 9, least_used(load)));
        bench.outputs();
    }
    // The updates take several turns.
    let at = bench.machine.poll_timeout().unwrap();
    bench.now = at.max(bench.now);
    bench.machine.handle_timeout(bench.now);
    let mut outputs = bench.outputs();
    assert!(outputs.len() < 300, "{} messages", outputs.len());
    outputs.extend(bench.wait(SECOND));
    for user in &users {
        assert_eq!(
            updates_for(&outputs, *user),
            [(true, Ok(vec![1]))],
            "{user}"
        );
    }
    // A user that disconnects, or asks without the update flag, gets no further updates.
    bench
        .machine
        .handle_association_down(bench.now, AssociationId(users[0]));
    subscribe_or_resolve(&mut bench, users[1], false);
    bench.register(from, element(1, 9, least_used(7)));
    let outputs = bench.wait(SECOND);
    let got_update = |user: &&u64| !updates_for(&outputs, **user).is_empty();
    assert_eq!(users.iter().filter(got_update).count(), users.len() - 2);
}

/// A message may be lost if a buffer is full.
#[test]
fn subscribers_get_periodic_updates() {
    let mut bench = TestBench::new(config());
    let (from, user) = (bench.open_association(9), bench.open_association(70));
    let mut long_lived = element(1, 9, least_used(0));
    long_lived.registration_life = i32::MAX;
    bench.register(from, long_lived);
    bench
        .machine
        .handle_round_trip(bench.now, AssociationId(from), Duration::ZERO);
    subscribe_or_resolve(&mut bench, user, true);
    let outputs = bench.wait(SECOND * 31);
    assert_eq!(updates_for(&outputs, user).len(), 1);
    // The number of subscriptions is limited.
    let mut accepted = 0;
    for pool in 0..100 {
        let name = format!("pool {pool}");
        let handle = PoolHandle::from(name.as_str());
        let element = element(1, 9, least_used(0));
        let registration = Asap::Registration {
            handle: handle.clone(),
            element,
        };
        bench.send_asap(from, &registration);
        let resolution = Asap::HandleResolution {
            updates: true,
            handle,
            items_max: None,
        };
        let outputs = bench.send_asap(user, &resolution);
        accepted += updates_for(&outputs, user)
            .iter()
            .filter(|(yes, _)| *yes)
            .count();
    }
    assert_eq!(accepted, 63);
}

/// A restarted user has lost its subscriptions.
#[test]
fn restarted_user_gets_no_updates() {
    let mut bench = TestBench::new(config());
    let (from, user) = (bench.open_association(9), bench.open_association(70));
    bench.register(from, element(1, 9, least_used(0)));
    subscribe_or_resolve(&mut bench, user, true);
    bench
        .machine
        .handle_restarted(bench.now, AssociationId(user));
    bench.register(from, element(1, 9, least_used(1)));
    assert_eq!(updates_for(&bench.wait(SECOND), user), []);
}
