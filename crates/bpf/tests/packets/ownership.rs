//! Packets of flows owned by other nodes do not reach the stack, and the stack sends nothing for such flows.

use std::io::{ErrorKind, Write};
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use holdfast_bpf::shared_with_c::{Config, FlowState};

use super::support::pool::SILENT_PORT;
use super::support::raw_peer::{self, ACK, FIN, RST, SYN, tcp};
use super::support::*;

fn pool() -> Pool {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    pool
}

fn new_peer(pool: &Pool, v6: bool) -> RawPeer {
    RawPeer::new(
        pool,
        "c1",
        if v6 { 150 } else { 151 },
        v6,
        pool.lab.position("n1").link(),
    )
}

#[test]
fn packet_without_flow_is_dropped_without_reset() {
    let pool = pool();
    let (node, host) = (pool.node("n2"), pool.lab.host("n2"));
    for v6 in [false, true] {
        let peer = new_peer(&pool, v6);
        let (resets, dropped) = (host.snmp("Tcp", "OutRsts"), node.counter("drop_no_socket"));
        for (port, flags) in [
            (5000, ACK),
            (5001, ACK | FIN),
            (5002, RST),
            (5003, SYN | ACK),
        ] {
            peer.send_segment(port, flags, 0, &[]);
        }
        eventually("counted", || node.counter("drop_no_socket") >= dropped + 4);
        assert_eq!(node.counter("drop_no_socket"), dropped + 4);
        assert_eq!(host.snmp("Tcp", "OutRsts"), resets);
        assert_eq!(peer.next_segment(5000, 50), None);
    }
}

#[test]
fn only_complete_handshake_creates_entry() {
    let pool = pool();
    let node = pool.node("n2");
    for cookies in ["1", "2"] {
        pool.lab
            .host("n2")
            .sysctl("net/ipv4/tcp_syncookies", cookies);
        for v6 in [false, true] {
            let mut peer = new_peer(&pool, v6);
            let port = 5000 + cookies.parse::<u16>().expect("a digit");
            let key = flow(TCP, service(v6), peer.address(port));
            peer.send_segment(port, SYN, 0, &[]);
            let answer = peer.next_segment(port, 60_000).expect("a SYN-ACK");
            assert_eq!(node.flow(&key), None);
            // An acknowledgement with another number completes no handshake.
            let dropped = node.counter("drop_no_socket");
            if cookies == "2" {
                peer.ack = answer.seq.wrapping_add(77_777);
                peer.send_segment(port, ACK, 1, &[]);
                eventually("refused", || node.counter("drop_no_socket") == dropped + 1);
            }
            peer.ack = answer.seq.wrapping_add(1);
            peer.send_segment(port, ACK, 1, &[]);
            eventually("established", || node.state(&key) == Some(FlowState::Owned));
        }
    }
}

#[test]
fn syn_flood_creates_no_entry() {
    let pool = pool();
    for v6 in [false, true] {
        let peer = new_peer(&pool, v6);
        for port in 10_000..10_600 {
            peer.send_segment(port, SYN, 0, &[]);
        }
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        client.echo(b"still here");
        assert!(
            pool.node("n2").flow_count() <= 2,
            "{}",
            pool.node("n2").flow_count()
        );
        assert_eq!(pool.node("n1").flow_count(), 0);
    }
}

#[test]
fn port_without_listener_refuses() {
    let pool = pool();
    for v6 in [false, true] {
        let to = SocketAddr::new(service(v6).ip(), SILENT_PORT);
        let refused = open(pool.lab.host("c1"), to).expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
    assert_eq!(pool.node("n2").counter("drop_egress_not_owner"), 0);
}

/// IPv4 connections of a dual-stack listener have IPv4 flows.
#[test]
fn dual_stack_listener_creates_flows_of_both_families() {
    let pool = pool();
    let node = pool.node("n2");
    node.server.start_tcp(
        pool.lab.host("n2"),
        (Ipv6Addr::UNSPECIFIED, SILENT_PORT).into(),
        2,
    );
    for v6 in [false, true] {
        let to = SocketAddr::new(service(v6).ip(), SILENT_PORT);
        let stream = open(pool.lab.host("c1"), to).expect("connect");
        let key = flow(TCP, to, stream.local_addr().expect("address"));
        eventually("owned", || node.state(&key) == Some(FlowState::Owned));
        drop(stream);
        eventually("closing", || node.state(&key) == Some(FlowState::Closing));
    }
}

#[test]
fn non_owner_stays_silent_and_keeps_data() {
    let pool = pool();
    let node = pool.node("n2");
    for v6 in [false, true] {
        for (state, reason) in [
            (FlowState::TransitOut, "drop_egress_transit"),
            (FlowState::TransitIn, "drop_egress_transit"),
            (FlowState::Moved, "drop_egress_not_owner"),
        ] {
            let mut client = Client::connect(pool.lab.host("c1"), v6);
            client.echo(b"before");
            let mut server = node.server.connection(client.address());
            let dropped = node.counter(reason);
            node.set_state(&client.key(), state, 1, 3);
            server.write_all(b"later").expect("write");
            assert_eq!(
                unsent_bytes(&server),
                5,
                "{state:?}: TCP keeps dropped data as unsent"
            );
            assert!(node.counter(reason) > dropped);
            client
                .stream
                .set_read_timeout(Some(Duration::from_millis(50)))
                .expect("timeout");
            let mut byte = [0];
            std::io::Read::read(&mut client.stream, &mut byte).expect_err("no data arrives");
            client
                .stream
                .set_read_timeout(Some(Duration::from_secs(60)))
                .expect("timeout");
            node.set_state(&client.key(), FlowState::Owned, 0, 0);
            client.expect(b"later");
            client.echo(b"after");
        }
    }
}

#[test]
fn node_that_is_not_ready_accepts_nothing() {
    let pool = pool();
    let node = pool.node("n2");
    let config = pool.config(node);
    node.with_dataplane(|plane| plane.set_config(&Config { ready: 0, ..config }))
        .expect("config");
    let peer = new_peer(&pool, false);
    peer.send_segment(5000, SYN, 0, &[]);
    eventually("not ready", || node.counter("drop_not_ready") == 1);
    node.with_dataplane(|plane| plane.set_config(&config))
        .expect("config");
    peer.send_segment(5000, SYN, 0, &[]);
    assert!(peer.next_segment(5000, 60_000).is_some());
}

#[test]
fn unknown_node_receives_nothing() {
    let pool = pool();
    pool.place_all_on(9);
    let peer = new_peer(&pool, true);
    peer.send_segment(5000, SYN, 0, &[]);
    eventually("counted", || pool.node("n1").counter("drop_no_node") == 1);
}

/// A flow without a free table entry is counted and sends nothing, because no other node could take it over.
#[test]
fn full_table_is_counted() {
    let pool = Pool::new(
        &[&["n1", "n2", "c1"]],
        Options {
            flows_max: 2,
            ..Options::default()
        },
    );
    pool.place_all_on(2);
    let node = pool.node("n2");
    let (first, second) = (
        Client::connect(pool.lab.host("c1"), false),
        Client::connect(pool.lab.host("c1"), true),
    );
    assert_eq!((first.owner, second.owner, node.flow_count()), (2, 2, 2));
    let _third = open(pool.lab.host("c1"), service(false)).expect("connect");
    eventually("counted", || node.counter("drop_flows_full") == 1);
    eventually("silent", || node.counter("drop_egress_not_owner") > 0);
    let datagrams = DatagramClient::new(pool.lab.host("c1"), unspecified(false));
    assert_eq!(datagrams.ask(b"answered in spite of the full table"), 2);
    assert!(node.counter("drop_flows_full") > 1);
}

/// A flood of datagrams from ever new addresses leaves other services their capacity.
#[test]
fn flooded_service_leaves_others_their_quota() {
    const CAPACITY: u32 = 96;
    let options = Options {
        flows_max: CAPACITY,
        ..Options::default()
    };
    let pool = Pool::new(&[&["n1", "n2", "c1"]], options);
    pool.place_all_on(2);
    let node = pool.node("n2");
    // Rows 0 to 5 of the placement table; the datagrams are for row 1.
    node.with_dataplane(|plane| plane.flow_quota.divide(6, CAPACITY));
    let guaranteed = holdfast_bpf::guaranteed_flows(6, CAPACITY);
    let flooded_max = CAPACITY - 5 * guaranteed;
    let peer = new_peer(&pool, false);
    let to = service(false);
    for port in 10_000..10_000 + 2 * u16::try_from(CAPACITY).expect("few") {
        let datagram = raw_peer::udp(port, to.port(), b"x");
        peer.send(&raw_peer::packet(peer.ip(), to.ip(), UDP, &datagram));
    }
    eventually("full", || node.counter("drop_flows_full") > 0);
    assert_eq!(
        node.with_dataplane(|plane| plane.flow_quota.flows(1)),
        flooded_max
    );
    let clients: Vec<Client> = (0..guaranteed)
        .map(|_| Client::connect(pool.lab.host("c1"), false))
        .collect();
    for mut client in clients {
        client.echo(b"served");
    }
}

/// Packets with malformed headers are left to the stack to drop; they reach no socket and harm nothing.
#[test]
fn malformed_packets_are_harmless() {
    let pool = pool();
    let peer = new_peer(&pool, false);
    let valid_packet = raw_peer::packet(
        peer.ip(),
        service(false).ip(),
        TCP,
        &tcp(5000, 7000, 1, 1, ACK, &[]),
    );
    for length in 1..valid_packet.len() {
        peer.send(&valid_packet[..length]);
    }
    let mut bad = valid_packet;
    bad[0] = 0x4f; // options beyond the end
    peer.send(&bad);
    let mut client = Client::connect(pool.lab.host("c1"), false);
    client.echo(b"unharmed");
    assert_eq!(pool.node("n2").flow_count(), 1);
}
