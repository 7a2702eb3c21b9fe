//! Flows in transit: held at the acceptor, forwarded by the donor, and copied when out of order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_bpf::shared_with_c::FlowState;

use super::support::node::Node;
use super::support::raw_peer::{self, ACK, packet, tcp};
use super::support::tun::VNET_HEADER_BYTES;
use super::support::*;

const SLOT: u32 = 5;

/// Replays held packets until `done` and the hold is empty; returns the number of packets.
fn replay_until(node: &Node, done: &AtomicBool) -> u64 {
    let mut replayed = 0;
    while !done.load(Ordering::Relaxed) || node.held_count(SLOT) > 0 {
        if let Some(packet) = node.tun.read(20) {
            node.tun.replay(&packet);
            node.with_dataplane(|plane| plane.hold_counters.count_replayed(SLOT));
            replayed += 1;
        }
    }
    replayed
}

#[test]
fn flow_in_transit_is_held_and_released_in_order() {
    let options = Options {
        xdp_everywhere: false,
        ..Options::default()
    };
    let pool = Pool::new(&[&["n1", "n2", "c1"]], options);
    let (node, client_host) = (pool.node("n2"), pool.lab.host("c1"));
    // The client sends directly to the acceptor, with segments not cut yet, as a NIC's receive offload makes them from
    // a burst.
    client_host.feature("eth0", "tx", "on");
    client_host.feature("eth0", "tso", "on");
    for v6 in [false, true] {
        let (to, length) = (service(v6).ip(), if v6 { 128 } else { 32 });
        client_host.ip(&format!(
            "route replace {to}/{length} via {}",
            pool.lab.position("n2").address(v6)
        ));
        let mut client = Client::connect(client_host, v6);
        assert_eq!(client.owner, 2);
        node.server.wait_until_acknowledged(client.address());
        let key = client.key();
        let held_before = node.counter("held");
        node.set_state(&key, FlowState::TransitIn, 1, SLOT);
        let data = pattern(100_000);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut writer = client.stream.try_clone().expect("clone");
            let data = &data;
            scope.spawn(move || std::io::Write::write_all(&mut writer, data).expect("write"));
            eventually("held", || node.held_count(SLOT) > 0);
            let first = node.tun.read(60_000).expect("the first packet");
            assert!(
                first.len() > VNET_HEADER_BYTES + 1500,
                "not segmented: {} bytes",
                first.len()
            );
            assert_eq!(node.state(&key), Some(FlowState::TransitIn));
            node.set_state(&key, FlowState::Flushing, 0, SLOT);
            node.tun.replay(&first);
            node.with_dataplane(|plane| plane.hold_counters.count_replayed(SLOT));
            let replayer = scope.spawn(|| replay_until(node, &done));
            client.expect(data);
            done.store(true, Ordering::Relaxed);
            let replayed = replayer.join().expect("replay") + 1;
            assert_eq!(node.counter("held") - held_before, replayed);
        });
        client.echo(b"and on");
        assert_eq!(node.state(&key), Some(FlowState::Owned));
        assert_eq!(node.held_count(SLOT), 0);
    }
}

#[test]
fn datagrams_in_transit_are_held() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let node = pool.node("n2");
    for v6 in [false, true] {
        let datagrams = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
        assert_eq!(datagrams.ask_once(b"before"), 2);
        node.set_state(&datagrams.key(), FlowState::TransitIn, 1, SLOT);
        let attempt = datagrams.send(&pattern(4000)).expect("send");
        eventually("all three fragments", || node.held_count(SLOT) == 3);
        node.set_state(&datagrams.key(), FlowState::Flushing, 0, SLOT);
        replay_until(node, &AtomicBool::new(true));
        assert_eq!(
            datagrams.answer(&pattern(4000), attempt, Duration::from_secs(60)),
            Some(2)
        );
        assert_eq!(datagrams.ask(b"after"), 2);
        assert_eq!(node.state(&datagrams.key()), Some(FlowState::Owned));
    }
}

/// Segments that place the acceptor n3 beside the donor n2, or behind a router.
const SAME_SEGMENT: &[&[&str]] = &[&["n1", "n2", "n3", "c1"]];
const BEHIND_ROUTER: &[&[&str]] = &[&["n1", "n2", "c1"], &["n3"]];

#[test]
fn stragglers_are_forwarded_to_acceptor() {
    for (segments, outer_v6) in [
        (SAME_SEGMENT, false),
        (BEHIND_ROUTER, false),
        (BEHIND_ROUTER, true),
    ] {
        let pool = Pool::new(
            segments,
            Options {
                outer_v6,
                ..Options::default()
            },
        );
        pool.place_all_on(2);
        let (donor, acceptor) = (pool.node("n2"), pool.node("n3"));
        for v6 in [false, true] {
            for state in [FlowState::TransitOut, FlowState::Moved] {
                let mut client = Client::connect(pool.lab.host("c1"), v6);
                donor.server.wait_until_acknowledged(client.address());
                let forwarded = donor.counter("forwarded_straggler");
                acceptor.set_state(&client.key(), FlowState::TransitIn, 2, SLOT);
                donor.set_state(&client.key(), state, 3, 0);
                client.send(b"where are you?");
                let packet = acceptor.tun.read(60_000).expect("held at the acceptor");
                let ip = &packet[VNET_HEADER_BYTES..];
                assert!(ip.ends_with(b"where are you?"), "{ip:?}");
                // A router before the contact node decrements the hop limit too.
                let expected_ttl = 63 - u8::from(pool.lab.router.is_some());
                assert_eq!(
                    ip[if v6 { 7 } else { 8 }],
                    expected_ttl,
                    "a forwarder decrements the hop limit"
                );
                assert!(donor.counter("forwarded_straggler") > forwarded);
                // The flow returns to the donor; the client retransmits the held packet.
                acceptor
                    .with_dataplane(|plane| plane.flows.remove(&client.key()))
                    .expect("remove");
                donor.set_state(&client.key(), FlowState::Owned, 0, 0);
                client.expect(b"where are you?");
                while acceptor.tun.read(0).is_some() {}
            }
        }
    }
}

#[test]
fn expired_stragglers_are_counted() {
    let pool = Pool::new(BEHIND_ROUTER, Options::default());
    pool.place_all_on(2);
    let donor = pool.node("n2");
    let peer = RawPeer::new(&pool, "c1", 150, false, pool.lab.position("n1").link());
    let key = flow(TCP, service(false), peer.address(5000));
    donor.set_state(&key, FlowState::Moved, 3, 0);
    let mut expired_packet = packet(
        peer.ip(),
        service(false).ip(),
        TCP,
        &tcp(5000, 7000, 1, 1, ACK, &[]),
    );
    raw_peer::set_ttl(&mut expired_packet, 1); // its last hop
    peer.send(&expired_packet);
    eventually("too old", || donor.counter("drop_hops_used_up") == 1);
    peer.send_segment(5000, ACK, 0, &pattern(1460));
    eventually("too big", || donor.counter("drop_too_big") == 1);
    donor.set_state(&key, FlowState::Moved, 9, 0);
    peer.send_segment(5000, ACK, 0, &[]);
    eventually("no node", || donor.counter("drop_no_node") == 1);
    donor.set_state(&key, FlowState::TransitIn, 3, u32::MAX);
    peer.send_segment(5000, ACK, 0, &[]);
    eventually("no such hold", || {
        donor.counter("drop_transit_elsewhere") == 1
    });
    assert_eq!(donor.counter("forwarded_straggler"), 0);
}

/// The ports are reused by a new connection, steered to the node that still has the previous connection's tombstone.
#[test]
fn new_connection_replaces_tombstone() {
    let pool = Pool::new(SAME_SEGMENT, Options::default());
    pool.place_all_on(2);
    let node = pool.node("n2");
    for cookies in ["1", "2"] {
        pool.lab
            .host("n2")
            .sysctl("net/ipv4/tcp_syncookies", cookies);
        for v6 in [false, true] {
            let number = if v6 { 150 } else { 151 };
            let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
            let port = 5000 + cookies.parse::<u16>().expect("a digit");
            let key = flow(TCP, service(v6), peer.address(port));
            node.set_state(&key, FlowState::Moved, 3, 0);
            peer.handshake(port);
            eventually("owned", || node.state(&key) == Some(FlowState::Owned));
        }
    }
    assert_eq!(node.counter("forwarded_straggler"), 0);
}

#[test]
fn out_of_order_segments_are_copied_from_prepare() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let (node, host) = (pool.node("n2"), pool.lab.host("n2"));
    for v6 in [false, true] {
        let number = if v6 { 150 } else { 151 };
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        peer.handshake(5000);
        let key = flow(TCP, service(v6), peer.address(5000));
        eventually("owned", || node.state(&key) == Some(FlowState::Owned));
        let copied = node.counter("copied_out_of_order");
        let queued = host.snmp("TcpExt", "TCPOFOQueue");
        peer.send_segment(5000, ACK, 20, b"before prepare");
        // A segment still in flight would be copied too.
        eventually("queued", || host.snmp("TcpExt", "TCPOFOQueue") > queued);
        node.set_state(&key, FlowState::Prepared, 1, 0);
        peer.send_segment(5000, ACK, 0, b"in order");
        peer.send_segment(5000, ACK, 40, b"out of order");
        let packet = node.tun.read(60_000).expect("a copy");
        assert!(
            packet.ends_with(b"out of order"),
            "only the out-of-order segment"
        );
        assert_eq!(node.counter("copied_out_of_order"), copied + 1);
        assert!(node.tun.read(0).is_none());
        // The stack has all segments: once the gaps are filled, it acknowledges the end.
        peer.send_segment(5000, ACK, 8, &[b'.'; 32]);
        let end = peer.seq.wrapping_add(52);
        eventually("acknowledged", || {
            peer.next_segment(5000, 1000)
                .is_some_and(|answer| answer.ack == end)
        });
    }
}
