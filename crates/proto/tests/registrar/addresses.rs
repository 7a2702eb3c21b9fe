//! Claimed addresses: any host can write any address into the packet that begins an association.

use crate::security::causes;
use crate::test_bench::*;
use holdfast_proto::registrar::{AssociationId, PermittedHosts};
use holdfast_wire::rserpool::asap::Message as Asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{CauseCode, ElementId, Policy, PoolElement, RegistrarId, Transport};
use std::net::SocketAddr;
use std::time::Duration;

const RR: Policy = Policy::RoundRobin;
const DENIED: [CauseCode; 1] = [CauseCode::REJECTED_FOR_SECURITY];

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn report_addresses(
    bench: &mut TestBench,
    association: u64,
    confirmed: &[&str],
    claims: &[&str],
) -> Vec<TestOutput> {
    let each = |list: &[&str]| list.iter().map(|text| at(text)).collect::<Vec<_>>();
    let (confirmed, claims) = (each(confirmed), each(claims));
    let id = AssociationId(association);
    bench
        .machine
        .handle_addresses(bench.now, id, &confirmed, &claims);
    bench.outputs()
}

/// Returns an association of 10.1.0.66 that also claims the address 10.1.0.9, with the port of the host there.
fn impostor(bench: &mut TestBench) -> u64 {
    let impostor = bench.open_association(66);
    report_addresses(bench, impostor, &["10.1.0.66:5000"], &["10.1.0.9:5000"]);
    impostor
}

fn service(addresses: &[&str]) -> PoolElement {
    let mut service = transport([10, 1, 0, 9], 80);
    service.addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    PoolElement {
        user_transport: Transport::Sctp(service),
        ..element(1, 9, RR)
    }
}

#[test]
fn claimed_address_gives_no_control_over_its_elements() {
    let mut bench = TestBench::new(config());
    let honest = bench.open_association(9);
    bench.register(honest, element(1, 9, RR));
    let impostor = impostor(&mut bench);
    let (handle, id) = (handle(), ElementId(1));
    let leave = Asap::Deregistration {
        handle: handle.clone(),
        id,
    };
    assert_eq!(causes(&bench.send_asap(impostor, &leave)), DENIED);
    // The keep-alive goes to the honest host, and the impostor's answer does not count.
    bench
        .machine
        .handle_association_down(bench.now, AssociationId(honest));
    let outputs = bench.outputs();
    assert!(
        outputs
            .iter()
            .any(|out| matches!(out, TestOutput::Connect(..)))
    );
    bench.send_asap(impostor, &Asap::EndpointKeepAliveAck { handle, id });
    bench.wait(SECOND * 6);
    assert!(!bench.has_element(1));
}

#[test]
fn claimed_address_gives_no_permission() {
    let mut config = config();
    config.settings.access.register = PermittedHosts::Only(vec!["10.1.0.9".parse().unwrap()]);
    let mut bench = TestBench::new(config);
    let impostor = impostor(&mut bench);
    let mut own_registration = element(1, 66, RR);
    own_registration.registration_life = i32::MAX;
    assert_eq!(causes(&bench.register(impostor, own_registration)), []);
    let later = bench.wait(SECOND * 3);
    assert_eq!(causes(&later), DENIED);
    assert_eq!(bench.machine.elements(), 0);
}

#[test]
fn unconfirmed_address_is_not_given_to_users() {
    let mut bench = TestBench::new(config());
    let impostor = impostor(&mut bench);
    assert_eq!(causes(&bench.register(impostor, element(1, 9, RR))), []);
    let unusable = [CauseCode::RSPLIB_NO_USABLE_USER_ADDRESSES];
    assert_eq!(causes(&bench.wait(SECOND * 3)), unusable);
    // Of several addresses only the association's own ones are kept.
    let both = service(&["10.1.0.9", "10.1.0.66", "192.0.2.9"]);
    assert_eq!(causes(&bench.register(impostor, both)), []);
    let known = bench.machine.element(&handle(), ElementId(1)).unwrap();
    let own = service(&["10.1.0.66"]);
    assert_eq!(known.user_transport, own.user_transport);
}

#[test]
fn registration_waits_for_address_confirmation() {
    let mut bench = TestBench::new(config());
    let honest = bench.open_association(9);
    report_addresses(
        &mut bench,
        honest,
        &["10.1.0.9:5000"],
        &["10.2.0.9:5000", "10.3.0.9:5000"],
    );
    let both = service(&["10.1.0.9", "10.2.0.9"]);
    assert_eq!(bench.register(honest, both.clone()), []);
    assert!(!bench.has_element(1));
    let outputs = report_addresses(
        &mut bench,
        honest,
        &["10.1.0.9:5000", "10.2.0.9:5000"],
        &["10.3.0.9:5000"],
    );
    let granted = |out: &TestOutput| {
        let TestOutput::Asap(_, Asap::RegistrationResponse { rejected, .. }) = out else {
            return false;
        };
        !rejected
    };
    assert_eq!(outputs.iter().filter(|out| granted(out)).count(), 1);
    let known = bench.machine.element(&handle(), ElementId(1)).unwrap();
    assert_eq!(known.user_transport, both.user_transport);
    let addresses = &known.asap_transport.as_ref().unwrap().addresses;
    assert_eq!(addresses.len(), 2);
    // An address that is never confirmed delays the registration only briefly.
    let third = service(&["10.1.0.9", "10.3.0.9"]);
    assert_eq!(bench.register(honest, third.clone()), []);
    let outputs = bench.wait(SECOND * 2);
    assert!(outputs.iter().any(granted));
    assert!(bench.register(honest, third).iter().any(granted));
}

/// A peer's element without an ASAP transport belongs to its service's address, not to every host.
#[test]
fn element_without_asap_transport_belongs_to_service_address() {
    let mut bench = TestBench::new(config());
    let peer = bench.add_peer(2);
    let add = EnrpBody::HandleUpdate {
        takeover_suggested: false,
        action: UpdateAction::Add,
        handle: handle(),
        element: PoolElement {
            home: RegistrarId(2),
            ..element(1, 9, RR)
        },
    };
    bench.send_enrp(peer, add);
    let (other, own) = (bench.open_association(66), bench.open_association(9));
    let taken = [CauseCode::NON_UNIQUE_ELEMENT_ID];
    assert_eq!(causes(&bench.register(other, element(1, 66, RR))), taken);
    assert_eq!(causes(&bench.register(own, element(1, 9, RR))), []);
}

#[test]
fn any_confirmed_address_identifies_the_element() {
    let mut config = config();
    config.settings.access.register = PermittedHosts::Only(vec!["10.2.0.0/16".parse().unwrap()]);
    let mut bench = TestBench::new(config);
    let honest = bench.open_association(9);
    assert_eq!(causes(&bench.register(honest, element(1, 9, RR))), DENIED);
    report_addresses(&mut bench, honest, &["10.1.0.9:5000", "10.2.0.9:5000"], &[]);
    assert_eq!(causes(&bench.register(honest, element(1, 9, RR))), []);
    bench.wait(Duration::from_secs(3));
    let udp = Transport::Udp {
        port: 1,
        address: [10, 2, 0, 9].into(),
    };
    let mut second = element(2, 9, RR);
    second.user_transport = udp;
    let other = "other".into();
    let message = Asap::Registration {
        handle: other,
        element: second,
    };
    assert_eq!(causes(&bench.send_asap(honest, &message)), []);
}
