//! Requirements of RFC 5355: permissions, limits per host, and resistance to spoofed reports.

use crate::test_bench::*;
use bytes::Bytes;
use holdfast_proto::registrar::{
    AssociationId, PermittedHosts, PoolProtocol, RegistrarMachineConfig,
};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, RegistrarId};
use std::net::SocketAddr;

const RR: Policy = Policy::RoundRobin;

pub fn causes(outputs: &[TestOutput]) -> Vec<CauseCode> {
    let messages = outputs.iter().filter_map(|output| match output {
        TestOutput::Asap(_, message) => Some(message.causes().iter().map(|cause| cause.code)),
        _ => None,
    });
    messages.flatten().collect()
}

pub fn resolution() -> Asap {
    Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items_max: None,
    }
}

pub fn report() -> Asap {
    Asap::EndpointUnreachable {
        handle: handle(),
        id: ElementId(1),
    }
}

#[test]
fn permissions_restrict_registration_and_resolution_at_run_time() {
    let only = |text: &str| PermittedHosts::Only(vec![text.parse().unwrap()]);
    let mut config: RegistrarMachineConfig = config();
    config.settings.access.register = only("10.1.0.9");
    config.settings.access.resolve = only("10.1.0.8");
    let mut settings = config.settings.clone();
    let mut bench = TestBench::new(config);
    let (nine, eight) = (bench.open_association(9), bench.open_association(8));
    assert_eq!(causes(&bench.register(nine, element(1, 9, RR))), []);
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.register(eight, element(2, 8, RR))), denied);
    assert_eq!(causes(&bench.send_asap(eight, &resolution())), []);
    assert_eq!(causes(&bench.send_asap(nine, &resolution())), denied);
    settings.access.resolve = PermittedHosts::Everyone;
    bench.machine.handle_settings(bench.now, settings);
    assert_eq!(causes(&bench.send_asap(nine, &resolution())), []);
}

#[test]
fn certificate_name_permits_any_address() {
    let only = |text: &str| PermittedHosts::Only(vec![text.parse().unwrap()]);
    let mut config: RegistrarMachineConfig = config();
    config.settings.access.register = only("tls:web");
    config.settings.access.resolve = only("tls:*");
    let mut bench = TestBench::new(config);
    let (web, db, bare) = (
        bench.open_association(9),
        bench.open_association(8),
        bench.open_association(7),
    );
    for (id, name) in [(web, "web"), (db, "db")] {
        let name = name.to_owned();
        bench
            .machine
            .handle_certificate_name(AssociationId(id), name);
    }
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.register(web, element(1, 9, RR))), []);
    assert_eq!(causes(&bench.register(db, element(2, 8, RR))), denied);
    assert_eq!(causes(&bench.register(bare, element(3, 7, RR))), denied);
    assert_eq!(causes(&bench.send_asap(db, &resolution())), []);
    assert_eq!(causes(&bench.send_asap(bare, &resolution())), denied);
}

/// An address can be forged, or shared; a certificate cannot.
#[test]
fn certified_element_is_not_controlled_by_same_address() {
    let mut bench = TestBench::new(config());
    let at = [SocketAddr::from(([10, 1, 0, 9], 5001))];
    let web = bench.open_association(9);
    let mut open_association = |id: u64, name: Option<&str>| {
        let id = AssociationId(id);
        let now = bench.now;
        bench
            .machine
            .handle_association_up(now, id, PoolProtocol::Asap, &at, None);
        if let Some(name) = name {
            bench.machine.handle_certificate_name(id, name.to_owned());
        }
        id.0
    };
    let (bare, db, same) = (
        open_association(100, None),
        open_association(101, Some("db")),
        open_association(102, Some("web")),
    );
    bench
        .machine
        .handle_certificate_name(AssociationId(web), "web".to_owned());
    assert_eq!(causes(&bench.register(web, element(1, 9, RR))), []);
    let taken = [CauseCode::NON_UNIQUE_ELEMENT_ID];
    assert_eq!(causes(&bench.register(bare, element(1, 9, RR))), taken);
    assert_eq!(causes(&bench.register(db, element(1, 9, RR))), taken);
    let leave = Asap::Deregistration {
        handle: handle(),
        id: ElementId(1),
    };
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.send_asap(bare, &leave)), denied);
    assert_eq!(causes(&bench.register(same, element(1, 9, RR))), []);
}

#[test]
fn unpermitted_registrar_is_ignored_and_aborted() {
    let mut bench = TestBench::new(config());
    let id = AssociationId(1066);
    let at = SocketAddr::from(([192, 0, 2, 66], 9901));
    bench
        .machine
        .handle_association_up(bench.now, id, PoolProtocol::Enrp, &[at], None);
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: element(1, 9, RR),
    };
    let outputs = bench.send_enrp(RegistrarId(66), add);
    assert!(outputs.contains(&TestOutput::Abort(1066)));
    assert_eq!(bench.machine.counters().access_denied, 1);
    assert_eq!(
        (bench.machine.elements(), bench.machine.peers().count()),
        (0, 0)
    );
}

#[test]
fn multicast_is_ignored_unless_configured() {
    for trusted in [false, true] {
        let mut config = config();
        config.settings.enrp_multicast = trusted;
        let mut bench = TestBench::new(config);
        bench.wait(SECOND * 6);
        let presence = holdfast_wire::rserpool::enrp::Message {
            sender: RegistrarId(2),
            receiver: RegistrarId(0),
            body: EnrpBody::Presence {
                reply_required: true,
                checksum: Some(1),
                server: Some(holdfast_wire::rserpool::ServerInformation {
                    id: RegistrarId(2),
                    transport: transport([10, 0, 0, 2], 9901),
                }),
            },
        };
        let datagram = bytes(|buffer| presence.encode(buffer).unwrap());
        for source in ["192.0.2.1:9901", "10.0.0.2:9901"] {
            let source = source.parse().unwrap();
            bench
                .machine
                .handle_multicast(bench.now, source, PoolProtocol::Enrp, &datagram);
            // The registrar must identify itself over an association.
            assert_eq!(bench.machine.peers().count(), 0);
        }
        let dials = bench
            .outputs()
            .into_iter()
            .filter(|o| matches!(o, TestOutput::Connect(..)))
            .count();
        assert_eq!(dials, usize::from(trusted));
        let unheeded = bench.machine.counters().multicast_ignored;
        assert_eq!(unheeded, 2 - u64::from(trusted));
    }
}

#[test]
fn other_host_cannot_act_for_an_element() {
    let mut bench = TestBench::new(config());
    let (nine, eight) = (bench.open_association(9), bench.open_association(8));
    bench.register(nine, element(1, 9, RR));
    let takeover_response = bench.register(eight, element(1, 8, RR));
    assert_eq!(
        causes(&takeover_response),
        [CauseCode::NON_UNIQUE_ELEMENT_ID]
    );
    let elsewhere = bench.register(eight, element(2, 9, RR));
    assert_eq!(
        causes(&elsewhere),
        [CauseCode::RSPLIB_NO_USABLE_USER_ADDRESSES]
    );
    let (handle, id) = (handle(), ElementId(1));
    let leave = Asap::Deregistration {
        handle: handle.clone(),
        id,
    };
    assert_eq!(
        causes(&bench.send_asap(eight, &leave)),
        [CauseCode::REJECTED_FOR_SECURITY]
    );
    bench.wait(SECOND * 31);
    bench.send_asap(eight, &Asap::EndpointKeepAliveAck { handle, id });
    assert!(bench.has_element(1));
    bench.wait(SECOND * 5);
    assert!(
        !bench.has_element(1),
        "another host's answer does not keep a silent element"
    );
}

#[test]
fn reports_cause_keep_alive_and_one_host_cannot_remove_element() {
    let mut bench = TestBench::new(config());
    let from = bench.open_association(9);
    bench.register(from, element(1, 9, RR));
    bench.wait(SECOND * 2);
    let spoofer = bench.open_association(66);
    let mut keep_alive_count = 0;
    for _ in 0..10_000 {
        let outputs = bench.send_asap(spoofer, &report());
        let asks =
            |o: &&TestOutput| matches!(o, TestOutput::Asap(9, Asap::EndpointKeepAlive { .. }));
        keep_alive_count += outputs.iter().filter(asks).count();
    }
    assert_eq!(keep_alive_count, 1, "one keep-alive for all reports");
    let (handle, id) = (handle(), ElementId(1));
    bench.send_asap(from, &Asap::EndpointKeepAliveAck { handle, id });
    bench.wait(SECOND * 6);
    assert!(bench.has_element(1));
    // Reports from more hosts than the threshold, before the element answers.
    for host in 0..3 {
        let user = bench.open_association(70 + host);
        bench.send_asap(user, &report());
        assert!(bench.has_element(1));
    }
    let fourth = bench.open_association(80);
    bench.send_asap(fourth, &report());
    assert!(!bench.has_element(1));
}

#[test]
fn flood_from_one_host_does_not_block_others() {
    let mut config = config();
    config.settings.limits.messages_per_second = 100;
    config.settings.limits.elements_per_host = 5;
    config.settings.limits.associations_per_host = 1;
    let mut bench = TestBench::new(config);
    let (honest, flooder) = (bench.open_association(9), bench.open_association(66));
    let mut refused = 0;
    for id in 0..1_000 {
        refused += causes(&bench.register(flooder, element(id, 66, RR))).len();
    }
    assert_eq!(bench.machine.elements(), 5);
    let counters = bench.machine.counters();
    assert_eq!(
        (refused, counters.limit_refusals, counters.rate_limited),
        (95, 95, 900)
    );
    let second = AssociationId(1);
    let at = [SocketAddr::from(([10, 1, 0, 66], 5001))];
    bench
        .machine
        .handle_association_up(bench.now, second, PoolProtocol::Asap, &at, None);
    assert!(bench.outputs().contains(&TestOutput::Abort(1)));
    assert_eq!(bench.machine.counters().associations_refused, 1);
    assert_eq!(causes(&bench.register(honest, element(7_000, 9, RR))), []);
    assert!(!bench.send_asap(honest, &resolution()).is_empty());
    // A second later the host may send again, and free capacity.
    bench.wait(SECOND);
    let (handle, id) = (handle(), ElementId(0));
    bench.send_asap(flooder, &Asap::Deregistration { handle, id });
    assert_eq!(causes(&bench.register(flooder, element(2_000, 66, RR))), []);
}

#[test]
fn garbage_aborts_only_its_association() {
    let mut bench = TestBench::new(config());
    let (honest, other) = (bench.open_association(9), bench.open_association(66));
    let mut aborted = false;
    for length in 0..200u8 {
        let garbage = Bytes::from(vec![length.wrapping_mul(37); usize::from(length)]);
        bench
            .machine
            .handle_asap(bench.now, AssociationId(other), &garbage);
        aborted |= bench.outputs().contains(&TestOutput::Abort(other));
    }
    assert!(aborted);
    assert_eq!(causes(&bench.register(honest, element(1, 9, RR))), []);
}
