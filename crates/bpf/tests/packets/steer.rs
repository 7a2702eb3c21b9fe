//! Reach `steer` on one segment.

use holdfast_bpf::shared_with_c::{
    EVENT_CLOSED, EVENT_ESTABLISHED, FlowState, IS_REPLICATED, PLACEMENT_SLOTS, RECORD_OWNED,
    Record, Service,
};

use super::support::raw_peer::{ACK, SYN};
use super::support::*;

fn one_segment() -> Pool {
    Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default())
}

#[test]
fn connection_stays_at_owner_from_syn_to_close() {
    let pool = one_segment();
    for v6 in [false, true] {
        for (owner, name) in [(1, "n1"), (2, "n2")] {
            pool.place_all_on(u16::from(owner));
            let node = pool.node(name);
            let mut client = Client::connect(pool.lab.host("c1"), v6);
            assert_eq!(client.owner, owner);
            client.echo(&pattern(300_000));
            let key = client.key();
            eventually("established", || node.has_event(EVENT_ESTABLISHED, &key));
            let entry = node.flow(&key).expect("an entry");
            assert_eq!(FlowState::from_raw(entry.state), Some(FlowState::Owned));
            let event = node
                .events()
                .into_iter()
                .find(|e| e.flow == key)
                .expect("event");
            assert_eq!(event.epoch, entry.epoch);
            assert!(entry.epoch > 0);
            drop(client);
            // The state changes before the event is written.
            eventually("closed", || node.has_event(EVENT_CLOSED, &key));
            assert_eq!(node.state(&key), Some(FlowState::Closing));
        }
    }
    let contact = pool.node("n1");
    assert!(contact.counter("steered_link") > 0);
    assert!(contact.counter("steered_self") > 0);
    assert_eq!(contact.counter("steered_encap"), 0);
    assert_eq!(pool.node("n3").flow_count(), 0);
}

#[test]
fn answered_datagrams_create_association() {
    let pool = one_segment();
    for v6 in [false, true] {
        pool.place_all_on(3);
        let client = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        assert_eq!(client.ask(b"where"), 3);
        let node = pool.node("n3");
        assert_eq!(node.state(&client.key()), Some(FlowState::Owned));
        assert!(node.has_event(EVENT_ESTABLISHED, &client.key()));
    }
}

/// A replicated service's clients belong to the replicator of the contact node, except connections that have an owner.
#[test]
fn packets_of_replicated_service_stay_at_contact_node_without_record() {
    let pool = one_segment();
    pool.place_all_on(2);
    let contact = pool.node("n1");
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        let record = Record {
            epoch: 1,
            owner: 2,
            state: RECORD_OWNED,
            ..Record::default()
        };
        let key = client.key();
        contact
            .with_dataplane(|plane| plane.steering.set(&key, &record))
            .expect("steering");
        let replicated = Service {
            flags: IS_REPLICATED,
            ..Service::default()
        };
        pool.set_services_at("n1", &[2; PLACEMENT_SLOTS], replicated);
        client.echo(&pattern(50_000));
        let number = if v6 { 150 } else { 151 };
        let link = pool.lab.position("n1").link();
        let peer = RawPeer::new(&pool, "c1", number, v6, link);
        let dropped = contact.counter("drop_no_lease");
        peer.send_segment(5000, SYN, 0, &[]);
        peer.send_segment(5001, ACK, 0, &[]);
        // Past the lease, the packets of the replicator's connections still reach it, and new clients do not.
        contact.with_dataplane(|plane| plane.lease.writer().set_until_ns(1));
        peer.send_segment(5001, ACK, 0, &[]);
        peer.send_segment(5002, SYN, 0, &[]);
        eventually("dropped", || contact.counter("drop_no_lease") > dropped);
        assert_eq!(contact.counter("drop_no_lease"), dropped + 1);
        contact.with_dataplane(|plane| {
            plane
                .lease
                .writer()
                .set_until_ns(holdfast_bpf::LEASE_WITHOUT_END);
        });
        pool.place_all_on(2);
    }
}
