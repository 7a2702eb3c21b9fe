//! Registrations that repeat the previous one: the effects are the same as without the cache.

use crate::setup::*;
use holdfast_proto::registrar::{Allow, AssociationId, Event, Protocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{Body, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolElement, RegistrarId};
use std::net::SocketAddr;
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

/// Returns a registrar that announces each registration at once; see `refresh.rs` for delayed announcements.
fn announcing_each() -> Bench {
    let mut config = config();
    config.settings.refresh_delay = Duration::ZERO;
    Bench::new(config)
}

/// Returns the selected elements, one at a time.
fn chosen(bench: &mut Bench, user: u64) -> Vec<u32> {
    let ask = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items: Some(1),
    };
    let answers: Vec<_> = (0..5).flat_map(|_| bench.asap(user, &ask)).collect();
    let elements = answers.into_iter().flat_map(|out| match out {
        Out::Asap(_, Asap::HandleResolutionResponse { elements, .. }) => elements,
        other => panic!("{other:?}"),
    });
    elements.map(|element| element.id.0).collect()
}

fn is_granted(outputs: &[Out]) -> bool {
    outputs.iter().any(|output| {
        let Out::Asap(_, Asap::RegistrationResponse { rejected, .. }) = output else {
            return false;
        };
        !rejected
    })
}

/// Opens an association at the address of `bench.up(host)`, with another number.
fn up_again(bench: &mut Bench, host: u8, id: u64) -> u64 {
    let at = SocketAddr::from(([10, 1, 0, host], 5001));
    let (protocol, id) = (Protocol::Asap, AssociationId(id));
    bench
        .machine
        .handle_up(bench.now, id, protocol, &[at], None);
    id.0
}

/// Registers several times; returns selections, presence and announcements. Without `same`, each registration has
/// another life than the one before, and never hits the cache.
fn registered_often(policy: Policy, same: bool) -> (Vec<Vec<u32>>, Vec<bool>, Vec<usize>) {
    let mut bench = Bench::new(config());
    bench.peer(2);
    bench.peer(3);
    let (from, other, user) = (bench.up(9), bench.up(8), bench.up(70));
    bench.register(other, element(2, 8, policy));
    let (mut all, mut lived, mut updates) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..6 {
        let life = if same { 0 } else { turn };
        let element = PoolElement {
            registration_life: 5_000 + life,
            ..element(1, 9, policy)
        };
        let outputs = bench.register(from, element);
        assert!(is_granted(&outputs));
        updates.push(said(&outputs, "HANDLE_UPDATE"));
        all.push(chosen(&mut bench, user));
        bench.wait(SECOND * 3);
        lived.push(bench.has(1));
    }
    let counted = bench.machine.counters();
    assert_eq!((counted.registrations, counted.reregistrations), (2, 5));
    bench.wait(SECOND * 3);
    lived.push(bench.has(1));
    (all, lived, updates)
}

#[test]
fn the_same_again_has_the_same_effects() {
    let policies = [
        RR,
        Policy::WeightedRoundRobin { weight: 3 },
        Policy::WeightedRandom { weight: 3 },
        Policy::LeastUsed { load: 7 },
        Policy::LeastUsedDegradation {
            load: 7,
            degradation: 100,
        },
        Policy::LeastUsedDpf {
            load: 7,
            dpf: 1 << 20,
            distance: 0,
        },
    ];
    for policy in policies {
        let (same, others) = (
            registered_often(policy, true),
            registered_often(policy, false),
        );
        assert_eq!(same, others, "{policy:?}");
        // The life begins again each time, and ends.
        assert_eq!(same.1, [&[true; 6][..], &[false]].concat());
        assert_eq!(same.2, [1; 6]);
    }
}

#[test]
fn the_answer_and_the_update_are_the_same_too() {
    let mut bench = announcing_each();
    bench.peer(2);
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    let second = bench.register(from, element(1, 9, RR));
    assert!(is_granted(&second) && said(&second, "HANDLE_UPDATE") == 1);
    for _ in 0..3 {
        assert_eq!(bench.register(from, element(1, 9, RR)), second);
    }
    // A peer that has joined meanwhile gets the update too.
    bench.peer(3);
    let outputs = bench.register(from, element(1, 9, RR));
    let told = outputs.iter().find_map(|output| match output {
        Out::Enrp(to, message) => Some((to.clone(), message.body.name())),
        _ => None,
    });
    assert_eq!(told, Some((vec![1002, 1003], "HANDLE_UPDATE")));
}

#[test]
fn the_first_peer_is_told() {
    let mut bench = announcing_each();
    let from = bench.up(9);
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    bench.peer(2);
    for _ in 0..2 {
        let outputs = bench.register(from, element(1, 9, RR));
        assert_eq!(said(&outputs, "HANDLE_UPDATE"), 1);
    }
}

#[test]
fn who_may_no_longer_register_is_refused() {
    let mut config = config();
    let mut bench = Bench::new(config.clone());
    let from = bench.up(9);
    for _ in 0..3 {
        assert!(is_granted(&bench.register(from, element(1, 9, RR))));
    }
    config.settings.access.register = Allow::Only(Vec::new());
    bench.machine.handle_settings(bench.now, config.settings);
    bench.outputs();
    let outputs = bench.register(from, element(1, 9, RR));
    let refusal = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(crate::security::causes(&outputs), refusal);
    assert!(!bench.has(1));
}

#[test]
fn peers_are_told_of_addresses_that_are_new() {
    let mut bench = announcing_each();
    bench.peer(2);
    let from = bench.up(9);
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    let addresses = [[10, 1, 0, 9], [10, 2, 0, 9]].map(|ip| SocketAddr::from((ip, 5000)));
    let id = AssociationId(from);
    bench
        .machine
        .handle_addresses(bench.now, id, &addresses, &[]);
    for _ in 0..2 {
        let outputs = bench.register(from, element(1, 9, RR));
        let told = outputs.iter().find_map(|output| match output {
            Out::Enrp(_, message) => match &message.body {
                Body::HandleUpdate { element, .. } => element.asap_transport.clone(),
                _ => None,
            },
            _ => None,
        });
        assert_eq!(told.unwrap().addresses[..], addresses.map(|at| at.ip()));
    }
}

#[test]
fn an_element_that_left_is_a_new_one() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    let (handle, id) = (handle(), ElementId(1));
    bench.asap(from, &Asap::Deregistration { handle, id });
    assert!(!bench.has(1));
    let outputs = bench.register(from, element(1, 9, RR));
    let is_new = |output: &Out| matches!(output, Out::Event(Event::Registered { .. }));
    assert!(outputs.iter().any(is_new) && bench.has(1));
}

/// A cached registration of one association is out of date once the element has registered over another.
#[test]
fn an_element_comes_back_from_another_association() {
    let mut bench = Bench::new(config());
    let (from, user) = (bench.up(9), bench.up(70));
    let other = up_again(&mut bench, 9, 500);
    let used = |load| element(1, 9, Policy::LeastUsed { load });
    for _ in 0..3 {
        bench.register(from, used(1));
    }
    assert!(is_granted(&bench.register(other, used(9))));
    assert!(is_granted(&bench.register(from, used(1))));
    let ask = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items: None,
    };
    let outputs = bench.asap(user, &ask);
    let Some(Out::Asap(_, Asap::HandleResolutionResponse { elements, .. })) = outputs.first()
    else {
        panic!("{outputs:?}");
    };
    assert_eq!(elements[0].policy, Policy::LeastUsed { load: 1 });
    // The keep-alive goes to the association of the last registration.
    let outputs = bench.wait(SECOND * 90);
    let asked = outputs.iter().find_map(|output| match output {
        Out::Asap(to, Asap::EndpointKeepAlive { .. }) => Some(*to),
        _ => None,
    });
    assert_eq!(asked, Some(from));
}

#[test]
fn an_element_comes_back_from_another_registrar() {
    let mut bench = Bench::new(config());
    let (from, peer) = (bench.up(9), bench.peer(2));
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    // The wait is longer than the window in which both messages could have crossed.
    bench.wait(Duration::from_secs(10));
    let theirs = PoolElement {
        home: RegistrarId(2),
        ..element(1, 9, RR)
    };
    let add = Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: theirs,
    };
    bench.enrp(peer, add);
    let home = |bench: &Bench| {
        let element = bench.machine.element(&handle(), ElementId(1));
        element.map(|element| element.home)
    };
    assert_eq!(home(&bench), Some(RegistrarId(2)));
    let outputs = bench.register(from, element(1, 9, RR));
    assert_eq!(said(&outputs, "HANDLE_UPDATE"), 1);
    assert_eq!(home(&bench), Some(OWN));
}
