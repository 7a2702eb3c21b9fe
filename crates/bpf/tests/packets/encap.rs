//! Reach `steer` across segments: IP in IP to the owner, which answers the client directly.

use holdfast_bpf::shared_with_c::{EVENT_ESTABLISHED, FlowState};

use super::support::lab::ROUTER;
use super::support::raw_peer::{ACK, ip_packet, packet, tcp, udp};
use super::support::*;

const SEGMENTS: &[&[&str]] = &[&["n1", "c1"], &["n2"], &["c2"]];

fn pool(outer_v6: bool, clamp: bool) -> Pool {
    let pool = Pool::new(
        SEGMENTS,
        Options {
            outer_v6,
            clamp,
            ..Options::default()
        },
    );
    pool.place_all_on(2);
    pool
}

#[test]
fn connections_and_datagrams_reach_owner_behind_router() {
    for outer_v6 in [false, true] {
        let pool = pool(outer_v6, true);
        let (contact, owner) = (pool.node("n1"), pool.node("n2"));
        for (host, v6) in [("c1", false), ("c1", true), ("c2", false), ("c2", true)] {
            let mut client = Client::connect(pool.lab.host(host), v6);
            assert_eq!(client.owner, 2);
            client.echo(&pattern(200_000));
            let key = client.key();
            eventually("established", || owner.has_event(EVENT_ESTABLISHED, &key));
            drop(client);
            eventually("closing", || owner.state(&key) == Some(FlowState::Closing));
            let datagrams = DatagramClient::new(pool.lab.host(host), unspecified(v6));
            assert_eq!(datagrams.ask(&pattern(1000)), 2);
        }
        assert!(contact.counter("steered_encap") > 0);
        assert_eq!(contact.counter("steered_link"), 0);
        assert_eq!(
            owner.counter("decapsulated"),
            contact.counter("steered_encap")
        );
        assert_eq!(
            contact.counter("too_big_sent"),
            0,
            "the clamp keeps segments small"
        );
    }
}

#[test]
fn offered_mss_leaves_room_for_outer_header() {
    for outer_v6 in [false, true] {
        let pool = pool(outer_v6, true);
        for v6 in [false, true] {
            let hop = pool.lab.position("n1").link();
            let mut peer = RawPeer::new(&pool, "c1", if v6 { 150 } else { 151 }, v6, hop);
            let offered = peer.handshake(5000).mss;
            assert_eq!(
                offered,
                Some(1500 - pool.outer_size() - if v6 { 60 } else { 40 })
            );
        }
    }
}

/// Without the MSS clamp a full segment does not fit into the tunnel: the client gets an error, and continues with
/// smaller segments.
#[test]
fn client_recovers_after_packet_too_big() {
    for outer_v6 in [false, true] {
        let pool = pool(outer_v6, false);
        let contact = pool.node("n1");
        let fits = i32::from(1500 - pool.outer_size());
        for (host, v6) in [("c1", false), ("c1", true), ("c2", false), ("c2", true)] {
            let errors_before = contact.counter("too_big_sent");
            let mut client = Client::connect(pool.lab.host(host), v6);
            client.echo(&pattern(100_000));
            assert!(
                contact.counter("too_big_sent") > errors_before,
                "TCP got a packet-too-big error"
            );
            assert_eq!(path_mtu(&client.stream, v6), fits);
        }
        assert_eq!(
            contact.counter("drop_too_big"),
            contact.counter("too_big_sent")
        );
    }
}

/// Sends datagrams that must not be fragmented, from clients that do not know the path MTU yet, then datagrams that may
/// be fragmented.
#[test]
fn oversized_datagrams_get_packet_too_big() {
    let pool = pool(false, true);
    let contact = pool.node("n1");
    for (host, v6) in [("c1", false), ("c2", true)] {
        let errors_before = contact.counter("too_big_sent");
        let datagrams = DatagramClient::new(pool.lab.host(host), unspecified(v6));
        let (level, name) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
        } else {
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
        };
        set_option(&datagrams.socket, level, name, libc::IP_PMTUDISC_DO);
        let full_datagram = pattern(1500 - if v6 { 48 } else { 28 });
        datagrams.socket.send(&full_datagram).expect("send");
        eventually("told", || {
            contact.counter("too_big_sent") == errors_before + 1
        });
        eventually("learnt", || path_mtu(&datagrams.socket, v6) == 1480);
        let send_error = datagrams
            .socket
            .send(&full_datagram)
            .or_else(|_| datagrams.socket.send(&full_datagram));
        assert_eq!(
            send_error
                .expect_err("longer than the new path MTU")
                .raw_os_error(),
            Some(libc::EMSGSIZE)
        );
        // Datagrams that may be fragmented are cut to the size that fits.
        set_option(&datagrams.socket, level, name, libc::IP_PMTUDISC_WANT);
        assert_eq!(datagrams.ask(&pattern(4000)), 2);
    }
}

/// An oversized first fragment is answered with an error, so the fragments of the next datagram fit; the first datagram
/// is lost.
#[test]
fn oversized_fragments_lower_client_mtu() {
    let pool = pool(false, true);
    for (host, v6) in [("c1", false), ("c2", true)] {
        let datagrams = DatagramClient::new(pool.lab.host(host), unspecified(v6));
        assert_eq!(datagrams.ask(&pattern(4000)), 2);
    }
    assert!(pool.node("n1").counter("drop_too_big") > pool.node("n1").counter("too_big_sent"));
}

#[test]
fn only_peers_may_encapsulate_to_services() {
    for outer_v6 in [false, true] {
        let pool = pool(outer_v6, true);
        let owner = pool.node("n2");
        let (outside, router) = (pool.lab.position("c1"), pool.lab.position("n1"));
        let hop = HostPosition {
            number: ROUTER,
            ..outside
        }
        .link();
        let peer = RawPeer::new(&pool, "c1", 150, false, hop);
        let node = pool.lab.position("n2").address(outer_v6);
        let inner_packet_to =
            |to| packet(peer.ip(), to, UDP, &udp(5000, service(false).port(), b"x"));
        let encapsulate = |from, inner: &[u8]| ip_packet(from, node, 4, 0, inner);

        peer.send(&encapsulate(
            outside.address(outer_v6),
            &inner_packet_to(service(false).ip()),
        ));
        eventually("not a peer", || owner.counter("drop_not_a_peer") == 1);
        peer.send(&encapsulate(
            router.address(outer_v6),
            &inner_packet_to(pool.lab.position("n2").v4().into()),
        ));
        eventually("not a service", || owner.counter("drop_not_a_service") == 1);
        let foreign_packet = packet(
            peer.ip(),
            service(false).ip(),
            TCP,
            &tcp(5000, 7000, 1, 1, ACK, &[]),
        );
        peer.send(&encapsulate(router.address(outer_v6), &foreign_packet));
        eventually("decapsulated, but no flow", || {
            owner.counter("drop_no_socket") == 1
        });
        assert_eq!(owner.counter("decapsulated"), 1);
        peer.send(&encapsulate(
            router.address(outer_v6),
            &inner_packet_to(service(false).ip()),
        ));
        let key = flow(UDP, service(false), peer.address(5000));
        eventually("answered", || owner.state(&key) == Some(FlowState::Owned));
        peer.send(&encapsulate(router.address(outer_v6), &[0x45]));
        eventually("malformed", || owner.counter("drop_malformed") == 1);
    }
}
