//! Distances of elements: measured at any time, often after their registration.

use crate::setup::*;
use holdfast_proto::registrar::{AssociationId, Event, Protocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{Body, Message as Enrp, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{ElementId, Policy, RegistrarId};
use std::time::Duration;

fn far(distance: u32) -> Policy {
    Policy::LeastUsedDpf {
        load: 1,
        dpf: 2,
        distance,
    }
}

impl Bench {
    /// Reports a round trip measured by the transport, in milliseconds.
    fn measured(&mut self, association: u64, ms: u64) -> Vec<Out> {
        let (id, round_trip) = (AssociationId(association), Duration::from_millis(ms));
        self.machine.handle_round_trip(self.now, id, round_trip);
        self.outputs()
    }

    /// Returns the known policy of an element, with its distance not rounded.
    fn policy(&self, id: u32) -> Option<Policy> {
        let element = self.machine.element(&handle(), ElementId(id));
        element.map(|element| element.policy)
    }

    /// Returns a user's answer: elements in the order of the policy.
    fn told(&mut self, user: u64) -> Vec<(u32, Policy)> {
        let ask = Asap::HandleResolution {
            updates: false,
            handle: handle(),
            items: Some(u32::MAX),
        };
        let answer = self.asap(user, &ask).into_iter().find_map(|out| match out {
            Out::Asap(_, Asap::HandleResolutionResponse { elements, .. }) => Some(elements),
            _ => None,
        });
        let elements = answer.into_iter().flatten();
        elements.map(|one| (one.id.0, one.policy)).collect()
    }

    fn peer_says(&mut self, peer: RegistrarId, id: u32, policy: Policy) {
        let mut element = element(id, 9, policy);
        element.home = peer;
        let add = Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element,
        };
        self.enrp(peer, add);
    }
}

/// Returns the elements announced to peers.
fn announced(outputs: &[Out]) -> Vec<(u32, Policy)> {
    let updates = outputs.iter().filter_map(|out| match out {
        Out::Enrp(_, message) => match &message.body {
            Body::HandleUpdate { element, .. } => Some((element.id.0, element.policy)),
            _ => None,
        },
        _ => None,
    });
    updates.collect()
}

/// The home takes half a round trip, its peers add their own delay, and equation 3 of paper 004 rounds the sum,
/// in whatever order the delays become known.
#[test]
fn distances_add_up_when_they_are_measured() {
    let mut bench = Bench::new(config());
    let (from, peer) = (bench.up(9), bench.peer(2));
    let registered = bench.register(from, element(1, 9, far(777)));
    assert_eq!(announced(&registered), [(1, far(0))]);
    bench.peer_says(peer, 2, far(50));
    assert_eq!(bench.told(from), [(1, far(0)), (2, far(50))]);

    let own = bench.measured(from, 160);
    assert_eq!(announced(&own), [(1, far(80))]);
    let theirs = bench.measured(1002, 290);
    assert_eq!(announced(&theirs), [], "that is for its home to say");
    assert_eq!(
        (bench.policy(1), bench.policy(2)),
        (Some(far(80)), Some(far(195)))
    );
    assert_eq!(bench.told(from), [(1, far(100)), (2, far(200))]);
    // The far element has come near, and is selected first.
    bench.measured(1002, 20);
    assert_eq!(bench.policy(2), Some(far(60)));
    assert_eq!(bench.told(from), [(2, far(50)), (1, far(100))]);
    bench.peer_says(peer, 2, far(70));
    assert_eq!(bench.policy(2), Some(far(80)));
}

/// Two delays, each less than half a step, are one step together.
#[test]
fn delays_are_added_before_they_are_rounded() {
    let mut bench = Bench::new(config());
    let (from, peer) = (bench.up(9), bench.peer(2));
    bench.measured(from, 40);
    bench.measured(1002, 40);
    let registered = bench.register(from, element(1, 9, far(0)));
    assert_eq!(announced(&registered), [(1, far(20))]);
    bench.peer_says(peer, 2, far(20));
    assert_eq!(bench.told(from), [(1, far(0)), (2, far(50))]);
}

/// A delay that stays at its step causes no messages; an association without distances is not even measured.
#[test]
fn only_what_matters_is_measured_and_told() {
    let mut bench = Bench::new(config());
    let (from, other) = (bench.up(9), bench.up(8));
    bench.peer(2);
    assert!(!bench.machine.measures(AssociationId(from)));
    assert!(bench.machine.measures(AssociationId(1002)));
    bench.register(from, element(1, 9, far(0)));
    let mut near = element(2, 8, Policy::RoundRobin);
    near.registration_life = 1_000_000;
    let registration = Asap::Registration {
        handle: "other".into(),
        element: near,
    };
    bench.asap(other, &registration);
    assert!(bench.machine.measures(AssociationId(from)));
    assert!(!bench.machine.measures(AssociationId(other)));
    assert_eq!(bench.measured(from, 62).len(), 1);
    for ms in [60, 80, 62, 96] {
        assert_eq!(bench.measured(from, ms), [], "{ms}");
    }
    assert_eq!(bench.measured(from, 20).len(), 1);
    bench.asap(
        from,
        &Asap::Deregistration {
            handle: handle(),
            id: ElementId(1),
        },
    );
    assert!(!bench.machine.measures(AssociationId(from)));
}

/// Many elements at the end of one path are moved in several turns.
#[test]
fn others_are_served_while_elements_are_moved() {
    let mut config = config();
    config.settings.turn_elements_max = 2;
    let mut bench = Bench::new(config);
    let (from, peer) = (bench.up(9), bench.peer(2));
    for id in 1..=5 {
        bench.register(from, element(id, 9, far(0)));
        bench.peer_says(peer, id + 10, far(0));
    }
    assert_eq!(announced(&bench.measured(from, 200)).len(), 2);
    bench.measured(1002, 100);
    let moved = |bench: &Bench| {
        let near = |id: &u32| bench.policy(*id) != Some(far(0));
        [(1..=5).filter(near).count(), (11..=15).filter(near).count()]
    };
    assert_eq!(moved(&bench), [2, 2]);
    // An element that has not been moved deregisters.
    let left = (1..=5).find(|id| bench.policy(*id) == Some(far(0)));
    let leave = Asap::Deregistration {
        handle: handle(),
        id: ElementId(left.expect("three are left")),
    };
    bench.asap(from, &leave);
    let rest = bench.wait(Duration::from_millis(1));
    assert_eq!(moved(&bench)[1], 5);
    let stale = (1..=5).filter(|id| bench.policy(*id) == Some(far(0)));
    assert_eq!(stale.count(), 0);
    assert!(
        announced(&rest)
            .iter()
            .all(|(_, policy)| *policy == far(100))
    );
    assert!((2..=3).contains(&announced(&rest).len()));
}

/// An element known only from a third registrar has that registrar's delay in its distance. Its home is asked for its
/// table, once, although the checksums are equal.
#[test]
fn a_home_tells_of_its_elements_itself() {
    let mut bench = Bench::new(config());
    let (mentor, home) = (bench.peer(2), RegistrarId(3));
    bench.measured(1002, 100);
    let mut heard = element(1, 9, far(200));
    heard.home = home;
    let add = Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: heard.clone(),
    };
    bench.enrp(mentor, add);
    assert_eq!(bench.policy(1), Some(far(250)));
    let at = ["10.0.0.3:9901".parse().unwrap()];
    let (now, id) = (bench.now, AssociationId(1003));
    bench.machine.handle_up(now, id, Protocol::Enrp, &at, None);
    bench.measured(1003, 20);
    let same = bench.machine.checksum(home);
    let outputs = bench.enrp(home, presence(false, same));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 1);
    let differs = |out: &Out| matches!(out, Out::Event(Event::OutOfStep { .. }));
    assert!(!outputs.iter().any(differs));
    heard.policy = far(30);
    let table = Body::HandleTableResponse {
        rejected: false,
        more: false,
        entries: vec![PoolEntry {
            handle: handle(),
            elements: vec![heard],
        }],
    };
    bench.enrp(home, table);
    assert_eq!(bench.policy(1), Some(far(40)));
    let outputs = bench.enrp(home, presence(false, same));
    assert_eq!(said(&outputs, "HANDLE_TABLE_REQUEST"), 0);
}

/// An adopted element has the distance of its own association, and peers are informed.
#[test]
fn an_adopted_element_is_as_far_as_it_answers() {
    let mut bench = Bench::new(config());
    let (from, peer) = (bench.up(9), bench.peer(2));
    bench.measured(from, 300);
    bench.measured(1002, 100);
    let mut element = element(1, 9, far(10));
    element.asap_transport = Some(transport([10, 1, 0, 9], 5000));
    let add = Body::HandleUpdate {
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
    let answered = bench.asap(from, &Asap::EndpointKeepAliveAck { handle, id });
    assert_eq!(announced(&answered), [(1, far(150))]);
    assert_eq!(bench.policy(1), Some(far(150)));
}
