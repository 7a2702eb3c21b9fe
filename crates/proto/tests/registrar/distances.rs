//! Distances of elements: measured at any time, often after their registration.

use crate::test_bench::*;
use holdfast_proto::registrar::{AssociationId, Event, PoolProtocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message as Enrp, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId};
use std::time::Duration;

fn policy_at_distance(distance: u32) -> Policy {
    Policy::LeastUsedDpf {
        load: 1,
        dpf: 2,
        distance,
    }
}

impl TestBench {
    /// Reports a round trip measured by the transport, in milliseconds.
    fn report_round_trip(&mut self, association: u64, ms: u64) -> Vec<TestOutput> {
        let (id, round_trip) = (AssociationId(association), Duration::from_millis(ms));
        self.machine.handle_round_trip(self.now, id, round_trip);
        self.outputs()
    }

    /// Returns the known policy of an element, with its distance not rounded.
    fn policy_of(&self, id: u32) -> Option<Policy> {
        let element = self.machine.element(&handle(), ElementId(id));
        element.map(|element| element.policy)
    }

    /// Returns a user's answer: elements in the order of the policy.
    fn resolve_all(&mut self, user: u64) -> Vec<(u32, Policy)> {
        let resolution = Asap::HandleResolution {
            updates: false,
            handle: handle(),
            items_max: Some(u32::MAX),
        };
        let answer = self
            .send_asap(user, &resolution)
            .into_iter()
            .find_map(|out| match out {
                TestOutput::Asap(_, Asap::HandleResolutionResponse { elements, .. }) => {
                    Some(elements)
                }
                _ => None,
            });
        let elements = answer.into_iter().flatten();
        elements.map(|one| (one.id.0, one.policy)).collect()
    }

    fn announce_from_peer(&mut self, peer: RegistrarId, id: u32, policy: Policy) {
        let mut element = element(id, 9, policy);
        element.home = peer;
        let add = EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element,
        };
        self.send_enrp(peer, add);
    }
}

/// Returns the elements announced to peers.
fn announced_policies(outputs: &[TestOutput]) -> Vec<(u32, Policy)> {
    let updates = outputs.iter().filter_map(|out| match out {
        TestOutput::Enrp(_, message) => match &message.body {
            EnrpBody::HandleUpdate { element, .. } => Some((element.id.0, element.policy)),
            _ => None,
        },
        _ => None,
    });
    updates.collect()
}

/// The home takes half a round trip, its peers add their own delay, and equation 3 of paper 004 rounds the sum,
/// in whatever order the delays become known.
#[test]
fn distances_add_up_as_they_are_measured() {
    let mut bench = TestBench::new(config());
    let (from, peer) = (bench.open_association(9), bench.add_peer(2));
    let registered = bench.register(from, element(1, 9, policy_at_distance(777)));
    assert_eq!(
        announced_policies(&registered),
        [(1, policy_at_distance(0))]
    );
    bench.announce_from_peer(peer, 2, policy_at_distance(50));
    assert_eq!(
        bench.resolve_all(from),
        [(1, policy_at_distance(0)), (2, policy_at_distance(50))]
    );

    let after_home_delay = bench.report_round_trip(from, 160);
    assert_eq!(
        announced_policies(&after_home_delay),
        [(1, policy_at_distance(80))]
    );
    let after_peer_delay = bench.report_round_trip(1002, 290);
    assert_eq!(
        announced_policies(&after_peer_delay),
        [],
        "only the home registrar announces the delay"
    );
    assert_eq!(
        (bench.policy_of(1), bench.policy_of(2)),
        (Some(policy_at_distance(80)), Some(policy_at_distance(195)))
    );
    assert_eq!(
        bench.resolve_all(from),
        [(1, policy_at_distance(100)), (2, policy_at_distance(200))]
    );
    // The far element has come near, and is selected first.
    bench.report_round_trip(1002, 20);
    assert_eq!(bench.policy_of(2), Some(policy_at_distance(60)));
    assert_eq!(
        bench.resolve_all(from),
        [(2, policy_at_distance(50)), (1, policy_at_distance(100))]
    );
    bench.announce_from_peer(peer, 2, policy_at_distance(70));
    assert_eq!(bench.policy_of(2), Some(policy_at_distance(80)));
}

/// Two delays, each less than half a step, are one step together.
#[test]
fn delays_are_summed_before_rounding() {
    let mut bench = TestBench::new(config());
    let (from, peer) = (bench.open_association(9), bench.add_peer(2));
    bench.report_round_trip(from, 40);
    bench.report_round_trip(1002, 40);
    let registered = bench.register(from, element(1, 9, policy_at_distance(0)));
    assert_eq!(
        announced_policies(&registered),
        [(1, policy_at_distance(20))]
    );
    bench.announce_from_peer(peer, 2, policy_at_distance(20));
    assert_eq!(
        bench.resolve_all(from),
        [(1, policy_at_distance(0)), (2, policy_at_distance(50))]
    );
}

/// A delay that stays at its step causes no messages; an association without distances is not even measured.
#[test]
fn only_significant_delays_are_measured_and_announced() {
    let mut bench = TestBench::new(config());
    let (from, other) = (bench.open_association(9), bench.open_association(8));
    bench.add_peer(2);
    assert!(!bench.machine.needs_measurement(AssociationId(from)));
    assert!(bench.machine.needs_measurement(AssociationId(1002)));
    bench.register(from, element(1, 9, policy_at_distance(0)));
    let mut without_distance = element(2, 8, Policy::RoundRobin);
    without_distance.registration_life = 1_000_000;
    let registration = Asap::Registration {
        handle: "other".into(),
        element: without_distance,
    };
    bench.send_asap(other, &registration);
    assert!(bench.machine.needs_measurement(AssociationId(from)));
    assert!(!bench.machine.needs_measurement(AssociationId(other)));
    assert_eq!(bench.report_round_trip(from, 62).len(), 1);
    for ms in [60, 80, 62, 96] {
        assert_eq!(bench.report_round_trip(from, ms), [], "{ms}");
    }
    assert_eq!(bench.report_round_trip(from, 20).len(), 1);
    bench.send_asap(
        from,
        &Asap::Deregistration {
            handle: handle(),
            id: ElementId(1),
        },
    );
    assert!(!bench.machine.needs_measurement(AssociationId(from)));
}

/// Many elements at the end of one path are moved in several turns.
#[test]
fn other_requests_are_served_during_distance_update() {
    let mut config = config();
    config.settings.batch_elements_max = 2;
    let mut bench = TestBench::new(config);
    let (from, peer) = (bench.open_association(9), bench.add_peer(2));
    for id in 1..=5 {
        bench.register(from, element(id, 9, policy_at_distance(0)));
        bench.announce_from_peer(peer, id + 10, policy_at_distance(0));
    }
    assert_eq!(
        announced_policies(&bench.report_round_trip(from, 200)).len(),
        2
    );
    bench.report_round_trip(1002, 100);
    let updated_count = |bench: &TestBench| {
        let is_updated = |id: &u32| bench.policy_of(*id) != Some(policy_at_distance(0));
        [
            (1..=5).filter(is_updated).count(),
            (11..=15).filter(is_updated).count(),
        ]
    };
    assert_eq!(updated_count(&bench), [2, 2]);
    // An element that has not been moved deregisters.
    let not_updated = (1..=5).find(|id| bench.policy_of(*id) == Some(policy_at_distance(0)));
    let leave = Asap::Deregistration {
        handle: handle(),
        id: ElementId(not_updated.expect("three elements without an update")),
    };
    bench.send_asap(from, &leave);
    let rest = bench.wait(Duration::from_millis(1));
    assert_eq!(updated_count(&bench)[1], 5);
    let stale = (1..=5).filter(|id| bench.policy_of(*id) == Some(policy_at_distance(0)));
    assert_eq!(stale.count(), 0);
    assert!(
        announced_policies(&rest)
            .iter()
            .all(|(_, policy)| *policy == policy_at_distance(100))
    );
    assert!((2..=3).contains(&announced_policies(&rest).len()));
}

/// An element known only from a third registrar has that registrar's delay in its distance. Its home is asked for its
/// table, once, although the checksums are equal.
#[test]
fn distances_are_fetched_from_home_registrar() {
    let mut bench = TestBench::new(config());
    let (mentor, home) = (bench.add_peer(2), RegistrarId(3));
    bench.report_round_trip(1002, 100);
    let mut described = element(1, 9, policy_at_distance(200));
    described.home = home;
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: described.clone(),
    };
    bench.send_enrp(mentor, add);
    assert_eq!(bench.policy_of(1), Some(policy_at_distance(250)));
    let at = ["10.0.0.3:9901".parse().unwrap()];
    let (now, id) = (bench.now, AssociationId(1003));
    bench
        .machine
        .handle_association_up(now, id, PoolProtocol::Enrp, &at, None);
    bench.report_round_trip(1003, 20);
    let known_checksum = bench.machine.checksum(home);
    let outputs = bench.send_enrp(home, presence(false, known_checksum));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    let differs = |out: &TestOutput| matches!(out, TestOutput::Event(Event::OutOfSync { .. }));
    assert!(!outputs.iter().any(differs));
    described.policy = policy_at_distance(30);
    let table = EnrpBody::HandleTableResponse {
        rejected: false,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![described],
        }],
    };
    bench.send_enrp(home, table);
    assert_eq!(bench.policy_of(1), Some(policy_at_distance(40)));
    let outputs = bench.send_enrp(home, presence(false, known_checksum));
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_TABLE_REQUEST"), 0);
}

/// An adopted element has the distance of its own association, and peers are informed.
#[test]
fn adopted_element_gets_distance_of_its_association() {
    let mut bench = TestBench::new(config());
    let (from, peer) = (bench.open_association(9), bench.add_peer(2));
    bench.report_round_trip(from, 300);
    bench.report_round_trip(1002, 100);
    let mut element = element(1, 9, policy_at_distance(10));
    element.asap_transport = Some(transport([10, 1, 0, 9], 5000));
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: true,
        action: UpdateAction::Add,
        handle: handle(),
        element,
    };
    // The update suggests the takeover to this registrar by number.
    let message = Enrp {
        sender: peer,
        receiver: OWN,
        body: add,
    };
    let message = bytes(|buffer| message.encode(buffer).unwrap());
    let from_peer = AssociationId(1002);
    bench.machine.handle_enrp(bench.now, from_peer, &message);
    bench.wait(SECOND);
    let id = ElementId(1);
    let handle = handle();
    let answered = bench.send_asap(from, &Asap::EndpointKeepAliveAck { handle, id });
    assert_eq!(
        announced_policies(&answered),
        [(1, policy_at_distance(150))]
    );
    assert_eq!(bench.policy_of(1), Some(policy_at_distance(150)));
}
