//! Rules of RFC 5352, one by one.

use crate::setup::*;
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, Event, Gone, Protocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{Body, UpdateAction};
use holdfast_wire::rserpool::{
    Cause, CauseCode, ElementId, Policy, PolicyKind, PoolHandle, RegistrarId, Transport,
};
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

fn refused(outputs: &[Out]) -> Option<Vec<CauseCode>> {
    outputs.iter().find_map(|output| match output {
        Out::Asap(
            _,
            Asap::RegistrationResponse {
                rejected, causes, ..
            },
        ) => rejected.then(|| causes.iter().map(|cause| cause.code).collect()),
        _ => None,
    })
}

fn removed(outputs: &[Out]) -> Option<Gone> {
    outputs.iter().find_map(|output| match output {
        Out::Event(Event::Removed { why, .. }) => Some(*why),
        _ => None,
    })
}

/// RFC 5352 section 3.1.
#[test]
fn a_registration_is_answered_owned_and_told_to_all_peers_in_one() {
    let mut bench = Bench::new(config());
    bench.peer(2);
    bench.peer(3);
    bench.outputs();
    let element = element(1, 9, RR);
    let from = bench.up(9);
    let outputs = bench.register(from, element.clone());
    assert_eq!(refused(&outputs), None);
    let update = outputs.iter().find_map(|output| match output {
        Out::Enrp(to, message) => Some((to.clone(), message.clone())),
        _ => None,
    });
    let (to, message) = update.unwrap();
    assert_eq!(to, [1002, 1003]);
    assert_eq!((message.sender, message.receiver), (OWN, RegistrarId(0)));
    let mut expected = element;
    expected.home = OWN;
    // "MUST also record the SCTP transport address".
    expected.asap_transport = Some(transport([10, 1, 0, 9], 5000));
    assert_eq!(
        message.body,
        Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element: expected,
        }
    );
}

#[test]
fn what_differs_from_the_pool_is_refused_with_its_cause() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    let policy = bench.register(from, element(2, 9, Policy::Random));
    assert_eq!(refused(&policy), Some(vec![CauseCode::INCONSISTENT_POLICY]));
    let mut udp = element(2, 9, RR);
    udp.user_transport = Transport::Udp {
        port: 80,
        address: [10, 1, 0, 9].into(),
    };
    let udp = bench.register(from, udp);
    assert_eq!(refused(&udp), Some(vec![CauseCode::INCONSISTENT_TRANSPORT]));
    let mut control = element(1, 9, RR);
    if let Transport::Tcp { usage, .. } = &mut control.user_transport {
        *usage = holdfast_wire::rserpool::TransportUse::DataAndControl;
    }
    let control = bench.register(from, control);
    assert_eq!(
        refused(&control),
        Some(vec![CauseCode::INCONSISTENT_CONTROL])
    );
    assert_eq!(bench.machine.elements(), 1);
    assert_eq!(bench.machine.counters().refusals, 3);
}

/// RFC 5352 section 3.2.
#[test]
fn deregistration_is_granted_even_of_what_is_not_there() {
    let mut bench = Bench::new(config());
    bench.peer(2);
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    let leave = Asap::Deregistration {
        handle: handle(),
        id: ElementId(1),
    };
    let granted = Asap::DeregistrationResponse {
        handle: handle(),
        id: ElementId(1),
        causes: Vec::new(),
    };
    let first = bench.asap(from, &leave);
    assert!(first.contains(&Out::Asap(from, granted.clone())));
    assert_eq!(said(&first, "HANDLE_UPDATE"), 1);
    // "Otherwise, the ENRP server MUST NOT inform its peers."
    assert_eq!(bench.asap(from, &leave), [Out::Asap(from, granted)]);
    assert_eq!(bench.machine.pools(), 0);
}

/// RFC 5352 section 3.3.
#[test]
fn resolution_has_the_policy_and_as_many_elements_as_asked_for_and_allowed() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    for id in 1..=100 {
        bench.register(from, element(id, 9, Policy::LeastUsed { load: id }));
    }
    for (items, expected) in [
        (None, 3),
        (Some(1), 1),
        (Some(10), 10),
        (Some(u32::MAX), 64),
    ] {
        let asked = Asap::HandleResolution {
            updates: false,
            handle: handle(),
            items,
        };
        let outputs = bench.asap(from, &asked);
        let [
            Out::Asap(
                _,
                Asap::HandleResolutionResponse {
                    policy,
                    elements,
                    updates,
                    ..
                },
            ),
        ] = &outputs[..]
        else {
            panic!("{outputs:?}");
        };
        assert!(!updates);
        assert_eq!(
            policy.map(|policy| policy.kind()),
            Some(PolicyKind::LeastUsed)
        );
        assert_eq!(elements.len(), expected);
        assert_eq!(elements[0].id, ElementId(1));
    }
    let unknown = Asap::HandleResolution {
        updates: false,
        handle: PoolHandle::from("none"),
        items: None,
    };
    let outputs = bench.asap(from, &unknown);
    let [Out::Asap(_, answer)] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(answer.causes()[0].code, CauseCode::UNKNOWN_POOL_HANDLE);
}

/// RFC 5352 section 3.4: keep-alives, varied by half of the interval; a silent element is dead.
#[test]
fn an_own_element_is_asked_and_removed_when_it_is_silent() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    assert_eq!(keep_alives(&bench.wait(SECOND * 30)), [false]);
    let ack = Asap::EndpointKeepAliveAck {
        handle: handle(),
        id: ElementId(1),
    };
    bench.asap(from, &ack);
    assert_eq!(keep_alives(&bench.wait(SECOND * 14)).len(), 0);
    let outputs = bench.wait(SECOND * 31);
    assert_eq!(keep_alives(&outputs).len(), 1);
    let outputs = [outputs, bench.wait(SECOND * 6)].concat();
    assert_eq!(removed(&outputs), Some(Gone::Silent));
    assert!(!bench.has(1));
}

#[test]
fn a_registration_ends_and_its_element_is_told() {
    for (unit, end) in [
        (
            holdfast_proto::registrar::LifeUnit::Milliseconds,
            Duration::from_millis(2_000),
        ),
        (holdfast_proto::registrar::LifeUnit::Seconds, SECOND * 2_000),
    ] {
        let mut config = config();
        config.settings.life_unit = unit;
        config.settings.keep_alive_interval = SECOND * 9_000;
        let mut bench = Bench::new(config);
        let from = bench.up(9);
        let mut element = element(1, 9, RR);
        element.registration_life = 2_000;
        bench.register(from, element);
        bench.wait(end - Duration::from_millis(1));
        assert!(bench.has(1));
        let outputs = bench.wait(Duration::from_millis(2));
        assert_eq!(removed(&outputs), Some(Gone::Expired));
        let told =
            |output: &Out| matches!(output, Out::Asap(9, Asap::DeregistrationResponse { .. }));
        assert!(outputs.iter().any(told));
    }
}

/// An element with a lost association is called at its own address; one that is not reached is removed at once.
#[test]
fn a_lost_association_asks_at_once() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    bench.register(from, element(2, 9, RR));
    bench.machine.handle_down(bench.now, AssociationId(from));
    let outputs = bench.outputs();
    let [Out::Connect(dial, Protocol::Asap, at)] = outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(at, "10.1.0.9:5000".parse().unwrap());
    bench.machine.handle_dial_failed(bench.now, dial);
    assert_eq!(removed(&bench.outputs()), Some(Gone::Unreachable));
    assert_eq!(bench.machine.elements(), 0);
}

/// "Never answer an error with an error", RFC 5354 section 3.
#[test]
fn unknown_parameters_are_reported_unless_they_are_in_an_error() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    // A parameter of type 0xc123: skip and report.
    let parameter = [0xc1, 0x23, 0, 4];
    let mut registration = bytes(|buffer| {
        let (handle, element) = (handle(), element(1, 9, RR));
        Asap::Registration { handle, element }
            .encode(buffer)
            .unwrap();
    })
    .to_vec();
    registration.extend(parameter);
    registration[3] += 4;
    let id = AssociationId(from);
    let registration = Bytes::from(registration);
    bench.machine.handle_asap(bench.now, id, &registration);
    let outputs = bench.outputs();
    assert_eq!(refused(&outputs), None);
    let report = Asap::Error(vec![Cause {
        code: CauseCode::UNRECOGNIZED_PARAMETER,
        data: Bytes::copy_from_slice(&parameter),
    }]);
    assert!(outputs.contains(&Out::Asap(from, report)));
    // The same parameter in an error message is not reported.
    let mut error = vec![0x0e, 0, 0, 12, 0, 0x0c, 0, 4];
    error.extend(parameter);
    let error = Bytes::from(error);
    bench.machine.handle_asap(bench.now, id, &error);
    let answers = bench.outputs();
    assert!(
        !answers.iter().any(|output| matches!(output, Out::Asap(..))),
        "{answers:?}"
    );
}

/// RFC 5352 section 3.5: an undeliverable keep-alive means that the element is gone, also a keep-alive that does not
/// name it, as in the RFC.
#[test]
fn who_cannot_be_sent_a_keep_alive_is_gone() {
    for named in [true, false] {
        let mut config = config();
        config.settings.keep_alive_names_element = named;
        let mut bench = Bench::new(config);
        let (from, other) = (bench.up(9), bench.up(8));
        bench.register(from, element(1, 9, RR));
        bench.register(other, element(2, 8, RR));
        let mut asked = Vec::new();
        while asked.len() < 2 {
            let outputs = bench.wait(SECOND);
            asked.extend(outputs.into_iter().filter_map(|out| match out {
                Out::Asap(to, message @ Asap::EndpointKeepAlive { .. }) => Some((to, message)),
                _ => None,
            }));
        }
        let id = ElementId(2);
        let handle = handle();
        bench.asap(other, &Asap::EndpointKeepAliveAck { handle, id });
        for (to, message) in asked {
            let bytes = bytes(|buffer| message.encode(buffer).unwrap());
            let to = AssociationId(to);
            bench.machine.handle_send_failed(to, Protocol::Asap, &bytes);
        }
        assert_eq!(
            removed(&bench.outputs()),
            Some(Gone::Unreachable),
            "{named}"
        );
        // The other element has answered.
        assert_eq!((bench.has(1), bench.has(2)), (false, true), "{named}");
    }
}

/// RFC 5352 section 3.3: "MUST respond", also if the element does not fit into any answer.
#[test]
fn a_resolution_is_answered_whatever_peers_say() {
    let mut bench = Bench::new(config());
    let (user, peer) = (bench.up(9), bench.peer(2));
    // The longest transport that fits between registrars; answers to users contain the pool's policy too.
    let zero = PolicyKind::LeastUsedDegradationDpf.zeroed();
    let fits = (0..65_536).rev().step_by(4).find_map(|length| {
        let mut element = element(1, 9, zero);
        element.user_transport = Transport::Opaque(vec![0; length].into());
        let body = Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element,
        };
        let message = holdfast_wire::rserpool::enrp::Message {
            sender: peer,
            receiver: RegistrarId(0),
            body,
        };
        let mut buffer = bytes::BytesMut::new();
        message.encode(&mut buffer).is_ok().then_some(message.body)
    });
    bench.enrp(peer, fits.unwrap());
    assert!(bench.has(1));
    let ask = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items: None,
    };
    let answered = bench
        .asap(user, &ask)
        .into_iter()
        .find_map(|out| match out {
            Out::Asap(_, Asap::HandleResolutionResponse { causes, .. }) => Some(causes),
            _ => None,
        });
    let causes = answered.expect("an answer");
    let codes: Vec<_> = causes.iter().map(|cause| cause.code).collect();
    assert_eq!(codes, [CauseCode::LACK_OF_RESOURCES]);
    assert_eq!(bench.machine.counters().resolutions, 0);
}
