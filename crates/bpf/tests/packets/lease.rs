//! The contact node's lease, and a contact node that another one has replaced.

use holdfast_bpf::LEASE_WITHOUT_END;
use holdfast_bpf::SteeringVerdict;
use holdfast_bpf::shared_with_c::{
    NEW_CLIENTS_MAX, NEW_CLIENTS_SLOT, RECORD_OWNED, ROLE_FORMER_HOLDER, ROLE_HOLDER, Record,
    Service,
};

use super::support::raw_peer::{ACK, SYN};
use super::support::tun::VNET_HEADER_BYTES;
use super::support::*;

/// Time without an answer after which there is none, milliseconds.
const SILENCE_MS: i32 = 200;

fn one_segment() -> Pool {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all_on(2);
    pool
}

fn peer_of_contact(pool: &Pool, v6: bool) -> RawPeer {
    let number = if v6 { 150 } else { 151 };
    RawPeer::new(pool, "c1", number, v6, pool.lab.position("n1").link())
}

fn set_lease(pool: &Pool, until_ns: u64) {
    pool.node("n1")
        .with_dataplane(|plane| plane.lease.writer().set_until_ns(until_ns));
}

fn record(pool: &Pool, name: &str, client: &Client, owner: u16) {
    let record = Record {
        epoch: 1,
        owner,
        state: RECORD_OWNED,
        ..Record::default()
    };
    pool.node(name)
        .with_dataplane(|plane| plane.steering.set(&client.key(), &record))
        .expect("steering");
}

fn set_role(pool: &Pool, name: &str, role: u8, contact: u16) {
    pool.node(name).with_dataplane(|plane| {
        let mut config = plane.config().expect("config");
        config.role = role;
        plane.set_config(&config).expect("config");
        plane.lease.set_contact(contact);
        plane.lease.set_table_ready(role == ROLE_HOLDER);
    });
}

#[test]
fn past_the_lease_only_recorded_flows_are_forwarded() {
    let pool = one_segment();
    let contact = pool.node("n1");
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        record(&pool, "n1", &client, 2);
        let peer = peer_of_contact(&pool, v6);
        // A time long past.
        set_lease(&pool, 1);
        let drops_before = contact.counter("drop_no_lease");
        peer.send_segment(5000, ACK, 0, &[]);
        eventually("dropped", || {
            contact.counter("drop_no_lease") > drops_before
        });
        assert!(peer.next_segment(5000, SILENCE_MS).is_none());
        client.echo(&pattern(50_000));
        set_lease(&pool, LEASE_WITHOUT_END);
        peer.send_segment(5001, SYN, 0, &[]);
        assert!(peer.next_segment(5001, 60_000).is_some());
    }
}

#[test]
fn new_client_before_the_lease_is_held_and_steered_later() {
    let pool = one_segment();
    let contact = pool.node("n1");
    for v6 in [false, true] {
        let peer = peer_of_contact(&pool, v6);
        set_lease(&pool, 1);
        peer.send_segment(5000, SYN, 0, &[]);
        let held = contact.tun.read(60_000).expect("the client is held");
        assert!(contact.held_count(NEW_CLIENTS_SLOT) > 0);
        let packet = &held[VNET_HEADER_BYTES..];
        // The program would hold the client again.
        assert!(matches!(contact.steer(packet), SteeringVerdict::ToStack));
        set_lease(&pool, LEASE_WITHOUT_END);
        let SteeringVerdict::Forwarded { frame, .. } = contact.steer(packet) else {
            panic!("n2 gets new flows");
        };
        assert_eq!(frame[..6], pool.lab.position("n2").link());
        assert_eq!(frame[6..12], pool.lab.position("n1").link());
        // The peer sends in place of n1. With n1's link address, the segment's bridge would look for n1 at the peer.
        let own_link = pool.lab.position("c1").link();
        let sent = [&frame[..6], &own_link, &frame[12..]].concat();
        peer.send_frame(&sent);
        assert!(peer.next_segment(5000, 60_000).is_some());
    }
}

#[test]
fn held_new_clients_are_bounded() {
    let pool = one_segment();
    let contact = pool.node("n1");
    let peer = peer_of_contact(&pool, false);
    set_lease(&pool, 1);
    let drops_before = contact.counter("drop_no_lease");
    for number in 0..=NEW_CLIENTS_MAX {
        peer.send_segment(10_000 + number, SYN, 0, &[]);
    }
    eventually("the last one is dropped", || {
        contact.counter("drop_no_lease") > drops_before
    });
    assert_eq!(
        contact.held_count(NEW_CLIENTS_SLOT),
        u32::from(NEW_CLIENTS_MAX)
    );
}

#[test]
fn incomplete_table_places_no_flows() {
    let pool = one_segment();
    let peer = peer_of_contact(&pool, false);
    let set_ready = |ready| {
        pool.node("n1")
            .with_dataplane(|plane| plane.lease.set_table_ready(ready));
    };
    set_ready(false);
    peer.send_segment(5000, SYN, 0, &[]);
    assert!(peer.next_segment(5000, SILENCE_MS).is_none());
    set_ready(true);
    peer.send_segment(5000, SYN, 0, &[]);
    assert!(peer.next_segment(5000, 60_000).is_some());
}

#[test]
fn past_the_lease_nobody_answers_for_service_addresses() {
    let pool = one_segment();
    let contact = pool.lab.position("n1").link();
    let peer = peer_of_contact(&pool, false);
    let client_place = pool.lab.position("c1");
    let std::net::IpAddr::V4(target) = service(false).ip() else {
        panic!("IPv4")
    };
    let mut arp = vec![0xff; 6];
    arp.extend(client_place.link());
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    arp.extend(client_place.link());
    arp.extend(client_place.v4().octets());
    arp.extend([0; 6]);
    arp.extend(target.octets());
    let is_answered = |wait_ms| {
        peer.send_frame(&arp);
        let mut frames = std::iter::from_fn(|| peer.receive(wait_ms));
        frames.any(|frame| {
            frame[12..14] == [8, 6] && frame[20..22] == [0, 2] && frame[6..12] == contact
        })
    };
    assert!(is_answered(2000));
    set_lease(&pool, 1);
    assert!(!is_answered(SILENCE_MS));
    assert!(pool.node("n1").counter("drop_no_lease") > 0);
}

#[test]
fn former_holder_forwards_to_owners_and_to_the_contact_node() {
    let pool = one_segment();
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        record(&pool, "n1", &client, 2);
        // n3 replaces n1, and places new flows on itself.
        set_role(&pool, "n1", ROLE_FORMER_HOLDER, 3);
        set_role(&pool, "n3", ROLE_HOLDER, 0);
        pool.set_services_at("n3", &[3; 1024], Service::default());
        client.echo(&pattern(50_000));
        assert_eq!(Client::connect(pool.lab.host("c1"), v6).owner, 3);
        // n3 places flows on the former holder, which takes them.
        pool.set_services_at("n3", &[1; 1024], Service::default());
        let mut at_former = Client::connect(pool.lab.host("c1"), v6);
        assert_eq!(at_former.owner, 1);
        at_former.echo(&pattern(50_000));
        set_role(&pool, "n3", 0, 0);
        set_role(&pool, "n1", ROLE_HOLDER, 0);
    }
}

#[test]
fn former_holder_outside_the_group_leaves_new_flows_unanswered() {
    let pool = one_segment();
    for v6 in [false, true] {
        // The node knows no contact node but itself.
        set_role(&pool, "n1", ROLE_FORMER_HOLDER, 1);
        set_lease(&pool, 0);
        let peer = peer_of_contact(&pool, v6);
        peer.send_segment(5000, SYN, 0, &[]);
        assert!(peer.next_segment(5000, SILENCE_MS).is_none());
        set_role(&pool, "n1", ROLE_HOLDER, 0);
        set_lease(&pool, LEASE_WITHOUT_END);
    }
}
