//! Placement of new flows; a change of the table moves no existing flow.

use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_bpf::shared_with_c::{
    FlowState, HAS_PREVIOUS, PLACEMENT_SLOTS, RECORD_OWNED, RECORD_TRANSIT, Record, Service,
};

use super::support::raw_peer::{ACK, SYN};
use super::support::*;

const ONE_SEGMENT: &[&[&str]] = &[&["n1", "n2", "n3", "c1"]];
const TWO_SEGMENTS: &[&[&str]] = &[&["n1", "n2", "c1"], &["n3"]];

#[test]
fn table_spreads_new_flows() {
    let pool = Pool::new(ONE_SEGMENT, Options::default());
    let slots: [u16; PLACEMENT_SLOTS] = std::array::from_fn(|slot| 2 + (slot as u16 & 1));
    pool.set_services(&slots, Service::default());
    for v6 in [false, true] {
        let tcp: Vec<u8> = (0..40)
            .map(|_| Client::connect(pool.lab.host("c1"), v6).owner)
            .collect();
        let udp: Vec<u8> = (0..40)
            .map(|_| DatagramClient::new(pool.lab.host("c1"), unspecified(v6)).ask(b"who?"))
            .collect();
        for owners in [tcp, udp] {
            assert!(owners.contains(&2) && owners.contains(&3), "{owners:?}");
            assert!(
                owners.iter().all(|owner| [2, 3].contains(owner)),
                "{owners:?}"
            );
        }
    }
    pool.set_services(
        &slots,
        Service {
            by_port: 1,
            port_owner: 3,
            ..Service::default()
        },
    );
    for _ in 0..10 {
        assert_eq!(
            Client::connect(pool.lab.host("c1"), false).owner,
            3,
            "by port"
        );
    }
}

#[test]
fn steering_table_overrides_placement() {
    let pool = Pool::new(ONE_SEGMENT, Options::default());
    pool.place_all_on(2);
    let set = |client: &DatagramClient, record: Record| {
        pool.node("n1")
            .with_dataplane(|plane| plane.steering.set(&client.key(), &record))
            .expect("steering");
    };
    for v6 in [false, true] {
        let owned = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        set(
            &owned,
            Record {
                epoch: 1,
                owner: 3,
                state: RECORD_OWNED,
                ..Record::default()
            },
        );
        assert_eq!(owned.ask(b"who?"), 3);
        let transit = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        set(
            &transit,
            Record {
                epoch: 2,
                owner: 2,
                acceptor: 1,
                state: RECORD_TRANSIT,
                via_donor: 0,
                pad: [0; 2],
            },
        );
        assert_eq!(transit.ask(b"who?"), 1);

        // A recorded connection stays at its owner, whatever the table says.
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        let record = Record {
            epoch: 1,
            owner: 2,
            state: RECORD_OWNED,
            ..Record::default()
        };
        pool.node("n1")
            .with_dataplane(|plane| plane.steering.set(&client.key(), &record))
            .expect("steering");
        pool.place_all_on(3);
        client.echo(&pattern(50_000));
        assert_eq!(Client::connect(pool.lab.host("c1"), v6).owner, 3);
        pool.place_all_on(2);
    }
    assert_eq!(pool.node("n3").counter("passed_previous"), 0);
}

/// Flows without a record at the holder, on one segment and across two.
#[test]
fn placement_change_moves_no_flow() {
    for segments in [ONE_SEGMENT, TWO_SEGMENTS] {
        let pool = Pool::new(segments, Options::default());
        for v6 in [false, true] {
            pool.place_all_on(2);
            let mut client = Client::connect(pool.lab.host("c1"), v6);
            assert_eq!(client.owner, 2);
            let number = if v6 { 150 } else { 151 };
            let mut half_open =
                RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
            half_open.send_segment(5000, SYN, 0, &[]);
            let answer = half_open.next_segment(5000, 60_000).expect("a SYN-ACK");

            pool.change_placement(2, 3);
            let passed_before = pool.node("n3").counter("passed_previous");
            client.echo(&pattern(20_000));
            assert!(pool.node("n3").counter("passed_previous") > passed_before);
            half_open.ack = answer.seq.wrapping_add(1);
            half_open.send_segment(5000, ACK, 1, &[]);
            let key = flow(TCP, service(v6), half_open.address(5000));
            eventually("established", || {
                pool.node("n2").state(&key) == Some(FlowState::Owned)
            });
            assert_eq!(pool.node("n3").flow(&key), None);
            assert_eq!(Client::connect(pool.lab.host("c1"), v6).owner, 3);
        }
        assert_eq!(pool.node("n3").counter("drop_no_socket"), 0);
    }
}

/// A contact node whose shares are wrong for a moment, as after a change of the role, steers a client to a node without
/// the server.
#[test]
fn new_client_at_node_without_server_follows_to_placed_node() {
    for segments in [ONE_SEGMENT, TWO_SEGMENTS] {
        let pool = Pool::new(segments, Options::default());
        pool.place_all_on(3);
        pool.set_services_at("n1", &[2; PLACEMENT_SLOTS], Service::default());
        pool.node("n2").server.stop();
        let resets = pool.lab.host("n2").snmp("Tcp", "OutRsts");
        for v6 in [false, true] {
            let mut client = Client::connect(pool.lab.host("c1"), v6);
            assert_eq!(client.owner, 3);
            client.echo(&pattern(20_000));
            let datagrams = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
            assert_eq!(datagrams.ask(b"who?"), 3);
        }
        // Without a server anywhere, the client is refused at once.
        pool.set_services(
            &[2; PLACEMENT_SLOTS],
            Service {
                own_node_placed: 1,
                ..Service::default()
            },
        );
        let address = service(false);
        let refused = open(pool.lab.host("c1"), address).expect_err("no server");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert_eq!(
            pool.lab.host("n2").snmp("Tcp", "OutRsts"),
            resets + 1,
            "the earlier clients were not refused"
        );
    }
}

/// Tables change one node at a time, so for a moment two nodes may forward a packet to each other; the packet is
/// dropped when its hops are used up.
#[test]
fn disagreeing_nodes_do_not_loop_packets() {
    let pool = Pool::new(ONE_SEGMENT, Options::default());
    pool.change_placement(2, 3);
    let slots = |owner| [owner; PLACEMENT_SLOTS];
    let before = Service {
        generation: 0,
        flags: HAS_PREVIOUS,
        ..Service::default()
    };
    pool.set_services_at(
        "n2",
        &slots(3),
        Service {
            generation: 1,
            ..before
        },
    );
    pool.set_services_at("n2", &slots(2), before);
    let peer = RawPeer::new(&pool, "c1", 150, false, pool.lab.position("n1").link());
    peer.send_segment(5000, ACK, 0, &[]);
    let expired_count = || {
        pool.node("n2").counter("drop_hops_used_up") + pool.node("n3").counter("drop_hops_used_up")
    };
    eventually("the hop limit expires", || expired_count() == 1);
}

/// The program caches the destination of a flow; a changed record takes effect with the next packet, even under
/// continuous traffic.
#[test]
fn changed_record_takes_effect_at_once() {
    let pool = Pool::new(ONE_SEGMENT, Options::default());
    let contact = pool.node("n1");
    pool.place_all_on(3);
    for v6 in [false, true] {
        let client = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        let noise = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        let set = |flow: &DatagramClient, owner, epoch| {
            let record = Record {
                epoch,
                owner,
                state: RECORD_OWNED,
                ..Record::default()
            };
            contact
                .with_dataplane(|plane| plane.steering.set(&flow.key(), &record))
                .expect("steering");
        };
        for epoch in 1..=100 {
            let owner = 1 + epoch % 2;
            let sent = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !sent.load(Ordering::Relaxed) {
                        noise.send(b"noise").expect("send");
                    }
                });
                set(&noise, owner as u16, epoch);
                set(&client, owner as u16, epoch);
                sent.store(true, Ordering::Relaxed);
            });
            assert_eq!(u32::from(client.ask(&epoch.to_be_bytes())), owner);
            assert_eq!(u32::from(noise.ask(&epoch.to_be_bytes())), owner);
        }
        contact
            .with_dataplane(|plane| plane.steering.remove(&client.key()))
            .expect("steering");
        assert_eq!(client.ask(b"no record"), 3);
    }
}
