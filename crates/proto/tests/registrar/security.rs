//! Requirements of RFC 5355: permissions, limits per host, and resistance to spoofed reports.

use crate::setup::*;
use bytes::Bytes;
use holdfast_proto::registrar::{Allow, AssociationId, Config, Protocol};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{Body, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, RegistrarId};
use std::net::SocketAddr;

const RR: Policy = Policy::RoundRobin;

pub fn causes(outputs: &[Out]) -> Vec<CauseCode> {
    let messages = outputs.iter().filter_map(|output| match output {
        Out::Asap(_, message) => Some(message.causes().iter().map(|cause| cause.code)),
        _ => None,
    });
    messages.flatten().collect()
}

pub fn resolution() -> Asap {
    Asap::HandleResolution {
        updates: false,
        handle: handle(),
        items: None,
    }
}

pub fn report() -> Asap {
    Asap::EndpointUnreachable {
        handle: handle(),
        id: ElementId(1),
    }
}

#[test]
fn only_the_allowed_register_and_resolve_and_operators_change_who() {
    let only = |text: &str| Allow::Only(vec![text.parse().unwrap()]);
    let mut config: Config = config();
    config.settings.access.register = only("10.1.0.9");
    config.settings.access.resolve = only("10.1.0.8");
    let mut settings = config.settings.clone();
    let mut bench = Bench::new(config);
    let (nine, eight) = (bench.up(9), bench.up(8));
    assert_eq!(causes(&bench.register(nine, element(1, 9, RR))), []);
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.register(eight, element(2, 8, RR))), denied);
    assert_eq!(causes(&bench.asap(eight, &resolution())), []);
    assert_eq!(causes(&bench.asap(nine, &resolution())), denied);
    settings.access.resolve = Allow::Everybody;
    bench.machine.handle_settings(bench.now, settings);
    assert_eq!(causes(&bench.asap(nine, &resolution())), []);
}

#[test]
fn a_certificate_s_name_admits_wherever_its_owner_is() {
    let only = |text: &str| Allow::Only(vec![text.parse().unwrap()]);
    let mut config: Config = config();
    config.settings.access.register = only("tls:web");
    config.settings.access.resolve = only("tls:*");
    let mut bench = Bench::new(config);
    let (web, db, bare) = (bench.up(9), bench.up(8), bench.up(7));
    for (id, name) in [(web, "web"), (db, "db")] {
        let name = name.to_owned();
        bench.machine.handle_name(AssociationId(id), name);
    }
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.register(web, element(1, 9, RR))), []);
    assert_eq!(causes(&bench.register(db, element(2, 8, RR))), denied);
    assert_eq!(causes(&bench.register(bare, element(3, 7, RR))), denied);
    assert_eq!(causes(&bench.asap(db, &resolution())), []);
    assert_eq!(causes(&bench.asap(bare, &resolution())), denied);
}

/// An address can be forged, or shared; a certificate cannot.
#[test]
fn an_element_with_a_certificate_is_no_other_s_at_its_address() {
    let mut bench = Bench::new(config());
    let at = [SocketAddr::from(([10, 1, 0, 9], 5001))];
    let web = bench.up(9);
    let mut again = |id: u64, name: Option<&str>| {
        let id = AssociationId(id);
        let now = bench.now;
        bench.machine.handle_up(now, id, Protocol::Asap, &at, None);
        if let Some(name) = name {
            bench.machine.handle_name(id, name.to_owned());
        }
        id.0
    };
    let (bare, db, same) = (
        again(100, None),
        again(101, Some("db")),
        again(102, Some("web")),
    );
    bench
        .machine
        .handle_name(AssociationId(web), "web".to_owned());
    assert_eq!(causes(&bench.register(web, element(1, 9, RR))), []);
    let taken = [CauseCode::NON_UNIQUE_ELEMENT_ID];
    assert_eq!(causes(&bench.register(bare, element(1, 9, RR))), taken);
    assert_eq!(causes(&bench.register(db, element(1, 9, RR))), taken);
    let leave = Asap::Deregistration {
        handle: handle(),
        id: ElementId(1),
    };
    let denied = [CauseCode::REJECTED_FOR_SECURITY];
    assert_eq!(causes(&bench.asap(bare, &leave)), denied);
    assert_eq!(causes(&bench.register(same, element(1, 9, RR))), []);
}

#[test]
fn who_may_not_be_a_registrar_changes_nothing_and_is_cut_off() {
    let mut bench = Bench::new(config());
    let id = AssociationId(1066);
    let at = SocketAddr::from(([192, 0, 2, 66], 9901));
    bench
        .machine
        .handle_up(bench.now, id, Protocol::Enrp, &[at], None);
    let add = Body::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: element(1, 9, RR),
    };
    let outputs = bench.enrp(RegistrarId(66), add);
    assert!(outputs.contains(&Out::Abort(1066)));
    assert_eq!(bench.machine.counters().denied, 1);
    assert_eq!(
        (bench.machine.elements(), bench.machine.peers().count()),
        (0, 0)
    );
}

#[test]
fn multicast_is_not_believed_unless_configured() {
    for trusted in [false, true] {
        let mut config = config();
        config.settings.enrp_multicast = trusted;
        let mut bench = Bench::new(config);
        bench.wait(SECOND * 6);
        let presence = holdfast_wire::rserpool::enrp::Message {
            sender: RegistrarId(2),
            receiver: RegistrarId(0),
            body: Body::Presence {
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
                .handle_multicast(bench.now, source, Protocol::Enrp, &datagram);
            // The registrar must identify itself over an association.
            assert_eq!(bench.machine.peers().count(), 0);
        }
        let dials = bench
            .outputs()
            .into_iter()
            .filter(|o| matches!(o, Out::Connect(..)))
            .count();
        assert_eq!(dials, usize::from(trusted));
        let unheeded = bench.machine.counters().multicast_unheeded;
        assert_eq!(unheeded, 2 - u64::from(trusted));
    }
}

#[test]
fn another_cannot_register_deregister_or_answer_for_an_element() {
    let mut bench = Bench::new(config());
    let (nine, eight) = (bench.up(9), bench.up(8));
    bench.register(nine, element(1, 9, RR));
    let stolen = bench.register(eight, element(1, 8, RR));
    assert_eq!(causes(&stolen), [CauseCode::NON_UNIQUE_ELEMENT_ID]);
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
        causes(&bench.asap(eight, &leave)),
        [CauseCode::REJECTED_FOR_SECURITY]
    );
    bench.wait(SECOND * 31);
    bench.asap(eight, &Asap::EndpointKeepAliveAck { handle, id });
    assert!(bench.has(1));
    bench.wait(SECOND * 5);
    assert!(
        !bench.has(1),
        "its silence was not covered by another's answer"
    );
}

#[test]
fn reports_make_the_registrar_ask_and_many_of_one_host_remove_nothing() {
    let mut bench = Bench::new(config());
    let from = bench.up(9);
    bench.register(from, element(1, 9, RR));
    bench.wait(SECOND * 2);
    let spoofer = bench.up(66);
    let mut asked = 0;
    for _ in 0..10_000 {
        let outputs = bench.asap(spoofer, &report());
        let asks = |o: &&Out| matches!(o, Out::Asap(9, Asap::EndpointKeepAlive { .. }));
        asked += outputs.iter().filter(asks).count();
    }
    assert_eq!(asked, 1, "one question for all of them");
    let (handle, id) = (handle(), ElementId(1));
    bench.asap(from, &Asap::EndpointKeepAliveAck { handle, id });
    bench.wait(SECOND * 6);
    assert!(bench.has(1));
    // Reports from more hosts than the threshold, before the element answers.
    for host in 0..3 {
        let user = bench.up(70 + host);
        bench.asap(user, &report());
        assert!(bench.has(1));
    }
    let fourth = bench.up(80);
    bench.asap(fourth, &report());
    assert!(!bench.has(1));
}

#[test]
fn floods_of_one_host_leave_others_served() {
    let mut config = config();
    config.settings.limits.messages_per_second = 100;
    config.settings.limits.elements_per_host = 5;
    config.settings.limits.associations_per_host = 1;
    let mut bench = Bench::new(config);
    let (honest, flooder) = (bench.up(9), bench.up(66));
    let mut refused = 0;
    for id in 0..1_000 {
        refused += causes(&bench.register(flooder, element(id, 66, RR))).len();
    }
    assert_eq!(bench.machine.elements(), 5);
    let counted = bench.machine.counters();
    assert_eq!(
        (refused, counted.over_limit, counted.limited),
        (95, 95, 900)
    );
    let second = AssociationId(1);
    let at = [SocketAddr::from(([10, 1, 0, 66], 5001))];
    bench
        .machine
        .handle_up(bench.now, second, Protocol::Asap, &at, None);
    assert!(bench.outputs().contains(&Out::Abort(1)));
    assert_eq!(bench.machine.counters().associations_refused, 1);
    assert_eq!(causes(&bench.register(honest, element(7_000, 9, RR))), []);
    assert!(!bench.asap(honest, &resolution()).is_empty());
    // A second later the host may send again, and free capacity.
    bench.wait(SECOND);
    let (handle, id) = (handle(), ElementId(0));
    bench.asap(flooder, &Asap::Deregistration { handle, id });
    assert_eq!(causes(&bench.register(flooder, element(2_000, 66, RR))), []);
}

#[test]
fn garbage_ends_an_association_and_nothing_else() {
    let mut bench = Bench::new(config());
    let (honest, other) = (bench.up(9), bench.up(66));
    let mut aborted = false;
    for length in 0..200u8 {
        let garbage = Bytes::from(vec![length.wrapping_mul(37); usize::from(length)]);
        bench
            .machine
            .handle_asap(bench.now, AssociationId(other), &garbage);
        aborted |= bench.outputs().contains(&Out::Abort(other));
    }
    assert!(aborted);
    assert_eq!(causes(&bench.register(honest, element(1, 9, RR))), []);
}
