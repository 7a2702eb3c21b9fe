//! Registrations that repeat the previous one: the effects are the same as without the cache.

use crate::test_bench::*;
use holdfast_proto::registrar::{AssociationId, Event, PermittedHosts, PoolProtocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolElement, RegistrarId};
use std::net::SocketAddr;
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

/// Returns a registrar that announces each registration at once; see `refresh.rs` for delayed announcements.
fn bench_without_delay() -> TestBench {
    let mut config = config();
    config.settings.refresh_delay = Duration::ZERO;
    TestBench::new(config)
}

/// Returns the selected elements, one at a time.
fn selected_ids(bench: &mut TestBench, user: u64) -> Vec<u32> {
    let resolution = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items_max: Some(1),
    };
    let answers: Vec<_> = (0..5)
        .flat_map(|_| bench.send_asap(user, &resolution))
        .collect();
    let elements = answers.into_iter().flat_map(|out| match out {
        TestOutput::Asap(_, Asap::HandleResolutionResponse { elements, .. }) => elements,
        other => panic!("{other:?}"),
    });
    elements.map(|element| element.id.0).collect()
}

fn is_registration_accepted(outputs: &[TestOutput]) -> bool {
    outputs.iter().any(|output| {
        let TestOutput::Asap(_, Asap::RegistrationResponse { rejected, .. }) = output else {
            return false;
        };
        !rejected
    })
}

/// Opens an association at the address of `bench.open_association(host)`, with another number.
fn open_second_association(bench: &mut TestBench, host: u8, id: u64) -> u64 {
    let at = SocketAddr::from(([10, 1, 0, host], 5001));
    let (protocol, id) = (PoolProtocol::Asap, AssociationId(id));
    bench
        .machine
        .handle_association_up(bench.now, id, protocol, &[at], None);
    id.0
}

/// Registers several times; returns selections, presence and announcements. Without `unchanged`, each registration has
/// another life than the one before, and never hits the cache.
fn register_repeatedly(policy: Policy, unchanged: bool) -> (Vec<Vec<u32>>, Vec<bool>, Vec<usize>) {
    let mut bench = TestBench::new(config());
    bench.add_peer(2);
    bench.add_peer(3);
    let (from, other, user) = (
        bench.open_association(9),
        bench.open_association(8),
        bench.open_association(70),
    );
    bench.register(other, element(2, 8, policy));
    let (mut all, mut is_listed_after_wait, mut updates) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..6 {
        let life = if unchanged { 0 } else { turn };
        let element = PoolElement {
            registration_life: 5_000 + life,
            ..element(1, 9, policy)
        };
        let outputs = bench.register(from, element);
        assert!(is_registration_accepted(&outputs));
        updates.push(count_enrp_messages(&outputs, "HANDLE_UPDATE"));
        all.push(selected_ids(&mut bench, user));
        bench.wait(SECOND * 3);
        is_listed_after_wait.push(bench.has_element(1));
    }
    let counters = bench.machine.counters();
    assert_eq!((counters.registrations, counters.reregistrations), (2, 5));
    bench.wait(SECOND * 3);
    is_listed_after_wait.push(bench.has_element(1));
    (all, is_listed_after_wait, updates)
}

#[test]
fn repeated_registration_has_same_effects() {
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
        let (unchanged, changed) = (
            register_repeatedly(policy, true),
            register_repeatedly(policy, false),
        );
        assert_eq!(unchanged, changed, "{policy:?}");
        // The life begins again each time, and ends.
        assert_eq!(unchanged.1, [&[true; 6][..], &[false]].concat());
        assert_eq!(unchanged.2, [1; 6]);
    }
}

#[test]
fn repeated_registration_sends_same_response_and_update() {
    let mut bench = bench_without_delay();
    bench.add_peer(2);
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    let second = bench.register(from, element(1, 9, RR));
    assert!(
        is_registration_accepted(&second) && count_enrp_messages(&second, "HANDLE_UPDATE") == 1
    );
    for _ in 0..3 {
        assert_eq!(bench.register(from, element(1, 9, RR)), second);
    }
    // A peer that has joined meanwhile gets the update too.
    bench.add_peer(3);
    let outputs = bench.register(from, element(1, 9, RR));
    let update = outputs.iter().find_map(|output| match output {
        TestOutput::Enrp(to, message) => Some((to.clone(), message.body.name())),
        _ => None,
    });
    assert_eq!(update, Some((vec![1002, 1003], "HANDLE_UPDATE")));
}

#[test]
fn first_peer_gets_update_despite_cache() {
    let mut bench = bench_without_delay();
    let from = bench.open_association(9);
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    bench.add_peer(2);
    for _ in 0..2 {
        let outputs = bench.register(from, element(1, 9, RR));
        assert_eq!(count_enrp_messages(&outputs, "HANDLE_UPDATE"), 1);
    }
}

#[test]
fn element_without_permission_is_refused_despite_cache() {
    let mut config = config();
    let mut bench = TestBench::new(config.clone());
    let from = bench.open_association(9);
    for _ in 0..3 {
        assert!(is_registration_accepted(
            &bench.register(from, element(1, 9, RR))
        ));
    }
    config.settings.access.register = PermittedHosts::Only(Vec::new());
    bench.machine.handle_settings(bench.now, config.settings);
    bench.outputs();
    let outputs = bench.register(from, element(1, 9, RR));
    let refusal = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(crate::security::causes(&outputs), refusal);
    assert!(!bench.has_element(1));
}

#[test]
fn new_addresses_are_announced_to_peers() {
    let mut bench = bench_without_delay();
    bench.add_peer(2);
    let from = bench.open_association(9);
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
        let announced = outputs.iter().find_map(|output| match output {
            TestOutput::Enrp(_, message) => match &message.body {
                EnrpBody::HandleUpdate { element, .. } => element.asap_transport.clone(),
                _ => None,
            },
            _ => None,
        });
        assert_eq!(
            announced.unwrap().addresses[..],
            addresses.map(|at| at.ip())
        );
    }
}

#[test]
fn deregistered_element_registers_as_new() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    let (handle, id) = (handle(), ElementId(1));
    bench.send_asap(from, &Asap::Deregistration { handle, id });
    assert!(!bench.has_element(1));
    let outputs = bench.register(from, element(1, 9, RR));
    let is_new =
        |output: &TestOutput| matches!(output, TestOutput::Event(Event::Registered { .. }));
    assert!(outputs.iter().any(is_new) && bench.has_element(1));
}

/// A cached registration of one association is out of date once the element has registered over another.
#[test]
fn element_returns_from_another_association() {
    let mut bench = TestBench::new(config());
    let (from, user) = (bench.open_association(9), bench.open_association(70));
    let other = open_second_association(&mut bench, 9, 500);
    let used = |load| element(1, 9, Policy::LeastUsed { load });
    for _ in 0..3 {
        bench.register(from, used(1));
    }
    assert!(is_registration_accepted(&bench.register(other, used(9))));
    assert!(is_registration_accepted(&bench.register(from, used(1))));
    let resolution = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items_max: None,
    };
    let outputs = bench.send_asap(user, &resolution);
    let Some(TestOutput::Asap(_, Asap::HandleResolutionResponse { elements, .. })) =
        outputs.first()
    else {
        panic!("{outputs:?}");
    };
    assert_eq!(elements[0].policy, Policy::LeastUsed { load: 1 });
    // The keep-alive goes to the association of the last registration.
    let outputs = bench.wait(SECOND * 90);
    let probed_association = outputs.iter().find_map(|output| match output {
        TestOutput::Asap(to, Asap::EndpointKeepAlive { .. }) => Some(*to),
        _ => None,
    });
    assert_eq!(probed_association, Some(from));
}

#[test]
fn element_returns_from_another_registrar() {
    let mut bench = TestBench::new(config());
    let (from, peer) = (bench.open_association(9), bench.add_peer(2));
    for _ in 0..3 {
        bench.register(from, element(1, 9, RR));
    }
    // The wait is longer than the window in which both messages could have crossed.
    bench.wait(Duration::from_secs(10));
    let peer_element = PoolElement {
        home: RegistrarId(2),
        ..element(1, 9, RR)
    };
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: peer_element,
    };
    bench.send_enrp(peer, add);
    let home = |bench: &TestBench| {
        let element = bench.machine.element(&handle(), ElementId(1));
        element.map(|element| element.home)
    };
    assert_eq!(home(&bench), Some(RegistrarId(2)));
    let outputs = bench.register(from, element(1, 9, RR));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_UPDATE"), 1);
    assert_eq!(home(&bench), Some(OWN));
}
