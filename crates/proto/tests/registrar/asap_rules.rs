//! Rules of RFC 5352, one by one.

use crate::test_bench::*;
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, Event, PoolProtocol, RemovalReason};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, ElementId, ErrorCause, Policy, PolicyKind, PoolHandle, RegistrarId, Transport,
};
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

fn refusal_codes(outputs: &[TestOutput]) -> Option<Vec<CauseCode>> {
    outputs.iter().find_map(|output| match output {
        TestOutput::Asap(
            _,
            Asap::RegistrationResponse {
                rejected, causes, ..
            },
        ) => rejected.then(|| causes.iter().map(|cause| cause.code).collect()),
        _ => None,
    })
}

fn removal_reason(outputs: &[TestOutput]) -> Option<RemovalReason> {
    outputs.iter().find_map(|output| match output {
        TestOutput::Event(Event::Removed { reason: why, .. }) => Some(*why),
        _ => None,
    })
}

/// RFC 5352 section 3.1.
#[test]
fn registration_is_answered_and_announced_to_peers_in_one_output() {
    let mut bench = TestBench::new(config());
    bench.add_peer(2);
    bench.add_peer(3);
    bench.outputs();
    let element = element(1, 9, RR);
    let from = bench.open_association(9);
    let outputs = bench.register(from, element.clone());
    assert_eq!(refusal_codes(&outputs), None);
    let update = outputs.iter().find_map(|output| match output {
        TestOutput::Enrp(to, message) => Some((to.clone(), message.clone())),
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
        EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle(),
            element: expected,
        }
    );
}

#[test]
fn registration_inconsistent_with_pool_is_refused_with_cause() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    let policy = bench.register(from, element(2, 9, Policy::Random));
    assert_eq!(
        refusal_codes(&policy),
        Some(vec![CauseCode::INCONSISTENT_POLICY])
    );
    let mut udp = element(2, 9, RR);
    udp.user_transport = Transport::Udp {
        port: 80,
        address: [10, 1, 0, 9].into(),
    };
    let udp = bench.register(from, udp);
    assert_eq!(
        refusal_codes(&udp),
        Some(vec![CauseCode::INCONSISTENT_TRANSPORT])
    );
    let mut control = element(1, 9, RR);
    if let Transport::Tcp { usage, .. } = &mut control.user_transport {
        *usage = holdfast_wire::rserpool::TransportUse::DataAndControl;
    }
    let control = bench.register(from, control);
    assert_eq!(
        refusal_codes(&control),
        Some(vec![CauseCode::INCONSISTENT_CONTROL])
    );
    assert_eq!(bench.machine.elements(), 1);
    assert_eq!(bench.machine.counters().refusals, 3);
}

/// RFC 5352 section 3.2.
#[test]
fn deregistration_of_unknown_element_succeeds() {
    let mut bench = TestBench::new(config());
    bench.add_peer(2);
    let from = bench.open_association(9);
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
    let first = bench.send_asap(from, &leave);
    assert!(first.contains(&TestOutput::Asap(from, granted.clone())));
    assert_eq!(count_enrp_messages(&first, "HANDLE_UPDATE"), 1);
    // "Otherwise, the ENRP server MUST NOT inform its peers."
    assert_eq!(
        bench.send_asap(from, &leave),
        [TestOutput::Asap(from, granted)]
    );
    assert_eq!(bench.machine.pools(), 0);
}

/// RFC 5352 section 3.3.
#[test]
fn resolution_returns_policy_and_limited_elements() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    for id in 1..=100 {
        bench.register(from, element(id, 9, Policy::LeastUsed { load: id }));
    }
    for (items, expected) in [
        (None, 3),
        (Some(1), 1),
        (Some(10), 10),
        (Some(u32::MAX), 64),
    ] {
        let resolution = Asap::HandleResolution {
            updates: false,
            handle: handle(),
            items_max: items,
        };
        let outputs = bench.send_asap(from, &resolution);
        let [
            TestOutput::Asap(
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
        items_max: None,
    };
    let outputs = bench.send_asap(from, &unknown);
    let [TestOutput::Asap(_, answer)] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(answer.causes()[0].code, CauseCode::UNKNOWN_POOL_HANDLE);
}

/// RFC 5352 section 3.4: keep-alives, varied by half of the interval; a silent element is dead.
#[test]
fn silent_own_element_is_probed_and_removed() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    assert_eq!(keep_alives(&bench.wait(SECOND * 30)), [false]);
    let ack = Asap::EndpointKeepAliveAck {
        handle: handle(),
        id: ElementId(1),
    };
    bench.send_asap(from, &ack);
    assert_eq!(keep_alives(&bench.wait(SECOND * 14)).len(), 0);
    let outputs = bench.wait(SECOND * 31);
    assert_eq!(keep_alives(&outputs).len(), 1);
    let outputs = [outputs, bench.wait(SECOND * 6)].concat();
    assert_eq!(removal_reason(&outputs), Some(RemovalReason::Silent));
    assert!(!bench.has_element(1));
}

#[test]
fn expired_registration_is_removed_and_reported_to_element() {
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
        let mut bench = TestBench::new(config);
        let from = bench.open_association(9);
        let mut element = element(1, 9, RR);
        element.registration_life = 2_000;
        bench.register(from, element);
        bench.wait(end - Duration::from_millis(1));
        assert!(bench.has_element(1));
        let outputs = bench.wait(Duration::from_millis(2));
        assert_eq!(removal_reason(&outputs), Some(RemovalReason::Expired));
        let is_expiry_notice = |output: &TestOutput| {
            matches!(
                output,
                TestOutput::Asap(9, Asap::DeregistrationResponse { .. })
            )
        };
        assert!(outputs.iter().any(is_expiry_notice));
    }
}

/// An element with a lost association is called at its own address; one that is not reached is removed at once.
#[test]
fn lost_association_probes_elements_at_once() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    bench.register(from, element(2, 9, RR));
    bench
        .machine
        .handle_association_down(bench.now, AssociationId(from));
    let outputs = bench.outputs();
    let [TestOutput::Connect(dial, PoolProtocol::Asap, at)] = outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(at, "10.1.0.9:5000".parse().unwrap());
    bench.machine.handle_dial_failed(bench.now, dial);
    assert_eq!(
        removal_reason(&bench.outputs()),
        Some(RemovalReason::Unreachable)
    );
    assert_eq!(bench.machine.elements(), 0);
}

/// "Never answer an error with an error", RFC 5354 section 3.
#[test]
fn unknown_parameters_are_reported_except_in_errors() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
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
    assert_eq!(refusal_codes(&outputs), None);
    let report = Asap::Error(vec![ErrorCause {
        code: CauseCode::UNRECOGNIZED_PARAMETER,
        data: Bytes::copy_from_slice(&parameter),
    }]);
    assert!(outputs.contains(&TestOutput::Asap(from, report)));
    // The same parameter in an error message is not reported.
    let mut error = vec![0x0e, 0, 0, 12, 0, 0x0c, 0, 4];
    error.extend(parameter);
    let error = Bytes::from(error);
    bench.machine.handle_asap(bench.now, id, &error);
    let answers = bench.outputs();
    assert!(
        !answers
            .iter()
            .any(|output| matches!(output, TestOutput::Asap(..))),
        "{answers:?}"
    );
}

/// RFC 5352 section 3.5: an undeliverable keep-alive means that the element is gone, also a keep-alive that does not
/// name it, as in the RFC.
#[test]
fn undeliverable_keep_alive_removes_element() {
    for names_element in [true, false] {
        let mut config = config();
        config.settings.keep_alive_names_element = names_element;
        let mut bench = TestBench::new(config);
        let (from, other) = (bench.open_association(9), bench.open_association(8));
        bench.register(from, element(1, 9, RR));
        bench.register(other, element(2, 8, RR));
        let mut keep_alives = Vec::new();
        while keep_alives.len() < 2 {
            let outputs = bench.wait(SECOND);
            keep_alives.extend(outputs.into_iter().filter_map(|out| match out {
                TestOutput::Asap(to, message @ Asap::EndpointKeepAlive { .. }) => {
                    Some((to, message))
                }
                _ => None,
            }));
        }
        let id = ElementId(2);
        let handle = handle();
        bench.send_asap(other, &Asap::EndpointKeepAliveAck { handle, id });
        for (to, message) in keep_alives {
            let bytes = bytes(|buffer| message.encode(buffer).unwrap());
            let to = AssociationId(to);
            bench
                .machine
                .handle_send_failed(to, PoolProtocol::Asap, &bytes);
        }
        assert_eq!(
            removal_reason(&bench.outputs()),
            Some(RemovalReason::Unreachable),
            "{names_element}"
        );
        // The other element has answered.
        assert_eq!(
            (bench.has_element(1), bench.has_element(2)),
            (false, true),
            "{names_element}"
        );
    }
}

/// RFC 5352 section 3.3: "MUST respond", also if the element does not fit into any answer.
#[test]
fn resolution_is_answered_even_if_element_exceeds_message() {
    let mut bench = TestBench::new(config());
    let (user, peer) = (bench.open_association(9), bench.add_peer(2));
    // The longest transport that fits between registrars; answers to users contain the pool's policy too.
    let zero = PolicyKind::LeastUsedDegradationDpf.zeroed();
    let fits = (0..65_536).rev().step_by(4).find_map(|length| {
        let mut element = element(1, 9, zero);
        element.user_transport = Transport::Opaque(vec![0; length].into());
        let body = EnrpBody::HandleUpdate {
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
    bench.send_enrp(peer, fits.unwrap());
    assert!(bench.has_element(1));
    let resolution = Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items_max: None,
    };
    let answered = bench
        .send_asap(user, &resolution)
        .into_iter()
        .find_map(|out| match out {
            TestOutput::Asap(_, Asap::HandleResolutionResponse { causes, .. }) => Some(causes),
            _ => None,
        });
    let causes = answered.expect("an answer");
    let codes: Vec<_> = causes.iter().map(|cause| cause.code).collect();
    assert_eq!(codes, [CauseCode::LACK_OF_RESOURCES]);
    assert_eq!(bench.machine.counters().resolutions, 0);
}
