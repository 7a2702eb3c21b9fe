//! Limits on the resources of one host, besides messages and elements.

use crate::security::{causes, report, resolution};
use crate::test_bench::*;
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, PermittedHosts, PoolProtocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message as Enrp};
use holdfast_wire::rserpool::{
    CauseCode, ElementId, Policy, PoolHandle, RegistrarId, ServerInformation,
};
use std::net::SocketAddr;
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;

fn registration(handle: &str, host: u8) -> Asap {
    Asap::Registration {
        handle: PoolHandle::from(handle),
        element: element(1, host, RR),
    }
}

#[test]
fn pool_limit_per_host_allows_joining_other_pools() {
    let mut config = config();
    config.settings.limits.pools_per_host = 2;
    let mut bench = TestBench::new(config);
    let (flooder, honest) = (bench.open_association(66), bench.open_association(9));
    assert_eq!(
        causes(&bench.send_asap(honest, &registration("theirs", 9))),
        []
    );
    for (handle, expected) in [
        ("one", &[][..]),
        ("two", &[]),
        ("three", &[CauseCode::LACK_OF_RESOURCES]),
    ] {
        let outputs = bench.send_asap(flooder, &registration(handle, 66));
        assert_eq!(causes(&outputs), expected, "{handle}");
    }
    assert_eq!(
        causes(&bench.send_asap(honest, &registration("three", 9))),
        []
    );
    let joins = Asap::Registration {
        handle: "theirs".into(),
        element: element(2, 66, RR),
    };
    assert_eq!(causes(&bench.send_asap(flooder, &joins)), []);
    // The end of one pool allows another.
    let leave = Asap::Deregistration {
        handle: "one".into(),
        id: ElementId(1),
    };
    bench.send_asap(flooder, &leave);
    assert_eq!(
        causes(&bench.send_asap(flooder, &registration("four", 66))),
        []
    );
}

/// Elements with ended associations still count for their host, whether they answer or not.
#[test]
fn reconnecting_host_gets_no_new_quota() {
    let mut config = config();
    config.settings.limits.elements_per_host = 2;
    let mut bench = TestBench::new(config);
    let full = [CauseCode::LACK_OF_RESOURCES];
    let from = bench.open_association(66);
    bench.register(from, element(1, 66, RR));
    bench.register(from, element(2, 66, RR));
    for id in [3, 4] {
        bench
            .machine
            .handle_association_down(bench.now, AssociationId(from));
        bench.open_association(66);
        bench.outputs();
        assert_eq!(causes(&bench.register(from, element(id, 66, RR))), full);
        let (handle, id) = (handle(), ElementId(1));
        bench.send_asap(from, &Asap::EndpointKeepAliveAck { handle, id });
    }
    bench.wait(SECOND * 6);
    assert!(
        bench.has_element(1) && !bench.has_element(2),
        "only the silent element is removed"
    );
    assert_eq!(causes(&bench.register(from, element(3, 66, RR))), []);
    assert_eq!(causes(&bench.register(from, element(4, 66, RR))), full);
}

#[test]
fn silent_association_is_aborted() {
    let mut config = config();
    config.settings.limits.associations = 3;
    let mut bench = TestBench::new(config);
    let (honest, idle, garbling) = (
        bench.open_association(9),
        bench.open_association(66),
        bench.open_association(67),
    );
    bench.send_asap(honest, &resolution());
    let garbage = Bytes::from_static(b"garbage");
    let from = AssociationId(garbling);
    bench.machine.handle_asap(bench.now, from, &garbage);
    bench.outputs();
    bench.open_association(68);
    assert_eq!(bench.outputs().first(), Some(&TestOutput::Abort(68)));
    let mut ended: Vec<_> = bench.wait(SECOND * 61);
    ended.retain(|out| matches!(out, TestOutput::Abort(_)));
    assert_eq!(
        ended,
        [TestOutput::Abort(idle), TestOutput::Abort(garbling)]
    );
    for aborted in [idle, garbling] {
        bench
            .machine
            .handle_association_down(bench.now, AssociationId(aborted));
    }
    assert!(!bench.send_asap(honest, &resolution()).is_empty());
    bench.open_association(68);
    assert_eq!(bench.outputs(), []);
}

/// RFC 5355 section 2.14: however many reports arrive, an answering element is probed once a second.
#[test]
fn reports_do_not_cause_keep_alive_flood() {
    let mut bench = TestBench::new(config());
    let element_at = bench.open_association(9);
    bench.register(element_at, element(1, 9, RR));
    let users: Vec<u64> = (70..80).map(|host| bench.open_association(host)).collect();
    let mut keep_alive_count = 0;
    let ack = Asap::EndpointKeepAliveAck {
        handle: handle(),
        id: ElementId(1),
    };
    for round in 0..5_000 {
        let mut outputs = bench.send_asap(users[round % users.len()], &report());
        outputs.extend(bench.wait(Duration::from_millis(1)));
        let questions = keep_alives(&outputs).len();
        if questions > 0 {
            keep_alive_count += questions;
            bench.send_asap(element_at, &ack);
        }
    }
    assert!(bench.has_element(1));
    assert!(
        (4..=5).contains(&keep_alive_count),
        "{keep_alive_count} questions in 5 s"
    );
    assert!(bench.machine.counters().reports_ignored > 4_900);
}

/// An owner of a network has any number of addresses.
#[test]
fn ipv6_network_counts_as_one_reporter() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    bench.wait(SECOND * 2);
    let mut report_from = |number: u64, address: &str| {
        let at: SocketAddr = address.parse().unwrap();
        let id = AssociationId(number);
        bench
            .machine
            .handle_association_up(bench.now, id, PoolProtocol::Asap, &[at], None);
        bench.send_asap(number, &report());
        bench.has_element(1)
    };
    for number in 0..10 {
        let spoofed = format!("[2001:db8::{number}]:5000");
        assert!(report_from(200 + number, &spoofed));
    }
    let other_networks = (1..4).map(|net| format!("[2001:db8:{net}::1]:5000"));
    let still: Vec<_> = (300..)
        .zip(other_networks)
        .map(|(n, at)| report_from(n, &at))
        .collect();
    assert_eq!(still, [true, true, false]);
}

fn encoded_presence(id: u32, host: u8, port: u16) -> Bytes {
    let id = RegistrarId(id);
    let message = Enrp {
        sender: id,
        receiver: RegistrarId(0),
        body: EnrpBody::Presence {
            reply_required: true,
            checksum: Some(1),
            server: Some(ServerInformation {
                id,
                transport: transport([10, 0, 0, host], port),
            }),
        },
    };
    bytes(|buffer| message.encode(buffer).unwrap())
}

/// Returns the calls caused by a presence of this registrar, with trusted multicast and a possibly forged source.
fn deliver_multicast_presence(
    bench: &mut TestBench,
    id: u32,
    host: u8,
    port: u16,
) -> Vec<(DialId, SocketAddr)> {
    let source = "10.0.0.2:9901".parse().unwrap();
    let presence = encoded_presence(id, host, port);
    bench
        .machine
        .handle_multicast(bench.now, source, PoolProtocol::Enrp, &presence);
    let called = bench.outputs().into_iter().filter_map(|out| match out {
        TestOutput::Connect(dial, _, at) => Some((dial, at)),
        _ => None,
    });
    called.collect()
}

fn bench_with_multicast() -> TestBench {
    let mut config = config();
    config.settings.enrp_multicast = true;
    config.settings.announce_cycle = Some(SECOND);
    let mut bench = TestBench::new(config);
    bench.wait(SECOND * 6);
    bench
}

#[test]
fn forged_presences_do_not_block_real_registrars() {
    let mut bench = bench_with_multicast();
    let mut called = Vec::new();
    for id in 1_000..3_000 {
        called.extend(deliver_multicast_presence(
            &mut bench,
            id,
            (id % 200) as u8 + 10,
            id as u16,
        ));
    }
    assert_eq!(called.len(), 16);
    // A registrar at the usual port is called all the same, once.
    let real_address = "10.0.0.2:9901".parse().unwrap();
    let calls = deliver_multicast_presence(&mut bench, 2, 2, 9901);
    assert_eq!(
        calls.iter().map(|(_, at)| *at).collect::<Vec<_>>(),
        [real_address]
    );
    assert_eq!(deliver_multicast_presence(&mut bench, 2, 2, 9901), []);
    // Made-up registrars there are called once in a while, and others then have their turn.
    let mut dead = Vec::new();
    for id in 20..80 {
        dead.extend(deliver_multicast_presence(&mut bench, id, id as u8, 9901));
    }
    assert_eq!(dead.len(), 15);
    for (dial, _) in &dead {
        bench.machine.handle_dial_failed(bench.now, *dial);
    }
    assert_eq!(deliver_multicast_presence(&mut bench, 20, 20, 9901), []);
    assert_eq!(deliver_multicast_presence(&mut bench, 3, 3, 9901).len(), 1);
    bench.wait(SECOND * 21);
    assert_eq!(
        deliver_multicast_presence(&mut bench, 20, 20, 9901).len(),
        1
    );
    // No registrar is known before it has identified itself.
    assert_eq!(bench.machine.peers().count(), 0);
    bench.add_peer(2);
    assert_eq!(bench.machine.peers().count(), 1);
}

#[test]
fn forged_announces_do_not_slow_own_announces() {
    let mut bench = bench_with_multicast();
    let source = "10.0.0.2:9901".parse().unwrap();
    for id in 1_000..3_000 {
        let announce = Asap::ServerAnnounce {
            registrar: RegistrarId(id),
            transports: Vec::new(),
        };
        let announce = bytes(|buffer| announce.encode(buffer).unwrap());
        bench
            .machine
            .handle_multicast(bench.now, source, PoolProtocol::Asap, &announce);
    }
    let outputs = bench.wait(SECOND * 10);
    let announced = |out: &&TestOutput| **out == TestOutput::Multicast(PoolProtocol::Asap);
    let announces = outputs.iter().filter(announced).count();
    assert!(announces >= 9, "{announces} announces in 10 s");
}

#[test]
fn element_without_permission_is_removed() {
    let mut bench = TestBench::new(config());
    let (permitted, forbidden) = (bench.open_association(9), bench.open_association(8));
    bench.register(permitted, element(1, 9, RR));
    bench.register(forbidden, element(2, 8, RR));
    bench.add_peer(2);
    bench.add_peer(3);
    bench.outputs();
    let only = |text: &str| PermittedHosts::Only(vec![text.parse().unwrap()]);
    let mut settings = config().settings;
    settings.access.register = only("10.1.0.9");
    settings.access.registrar = only("10.0.0.2");
    bench.machine.handle_settings(bench.now, settings);
    let outputs = bench.outputs();
    assert_eq!(causes(&outputs), [CauseCode::REJECTED_FOR_SECURITY]);
    assert_eq!(count_enrp_messages(&outputs, "HANDLE_UPDATE"), 1);
    let aborted: Vec<_> = outputs
        .iter()
        .filter(|out| matches!(out, TestOutput::Abort(_)))
        .collect();
    assert_eq!(aborted, [&TestOutput::Abort(1003)]);
    assert!(bench.has_element(1) && !bench.has_element(2));
    let retry = bench.register(forbidden, element(2, 8, RR));
    assert_eq!(causes(&retry), [CauseCode::REJECTED_FOR_SECURITY]);
}

/// A message of neither protocol counts as malformed too.
#[test]
fn stray_messages_abort_association() {
    let mut bench = TestBench::new(config());
    let stray_association = bench.open_association(66);
    for _ in 0..16 {
        bench
            .machine
            .handle_unknown_protocol(bench.now, AssociationId(stray_association));
    }
    assert!(
        bench
            .outputs()
            .contains(&TestOutput::Abort(stray_association))
    );
    let counters = bench.machine.counters();
    assert_eq!((counters.malformed, counters.associations_aborted), (16, 1));
}
