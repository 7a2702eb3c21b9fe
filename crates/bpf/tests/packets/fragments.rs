//! Fragments and ICMP errors reach the owner of their flow.

use super::support::raw_peer::{fragment, udp_message};
use super::support::*;

#[test]
fn fragmented_datagram_is_reassembled_at_owner() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    for v6 in [false, true] {
        for owner in [1, 2] {
            pool.place_all_on(u16::from(owner));
            let client = DatagramClient::new(pool.lab.host("c1"), unspecified(v6));
            assert_eq!(client.ask(&pattern(4000)), owner);
        }
    }
}

/// Later fragments contain no ports: a datagram with a missing first fragment is lost, and counted.
#[test]
fn fragments_before_first_are_dropped_and_counted() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let (contact, owner) = (pool.node("n1"), pool.node("n2"));
    let hop = pool.lab.position("n1").link();
    for v6 in [false, true] {
        let before = contact.counter("drop_fragment_without_first");
        let peer = RawPeer::new(&pool, "c1", if v6 { 150 } else { 151 }, v6, hop);
        let (from, to) = (peer.address(5000), service(v6));
        let message = udp_message(from, to, &pattern(2000));
        let piece = |offset| fragment(from.ip(), to.ip(), UDP, &message, offset, 1000);
        peer.send(&piece(1000));
        eventually("counted", || {
            contact.counter("drop_fragment_without_first") == before + 1
        });
        // With the first fragment seen, later fragments pass, and the owner answers the whole datagram.
        for offset in [0, 2000, 1000] {
            peer.send(&piece(offset));
        }
        eventually("an association", || {
            owner.state(&flow(UDP, to, from)).is_some()
        });
        assert_eq!(contact.counter("drop_fragment_without_first"), before + 1);
    }
}

/// A router between owner and client reports a too large packet to the service address: the owner learns the path MTU.
#[test]
fn path_mtu_errors_reach_owner() {
    let pool = Pool::new(&[&["n1", "n2"], &["c1", "c2", "c3"]], Options::default());
    let router = pool.lab.router.as_ref().expect("two segments");
    router.ip("route replace 10.77.1.0/24 dev eth1 mtu lock 1300");
    router.ip("route replace fd77:1::/64 dev eth1 metric 256 mtu lock 1300");
    pool.place_all_on(2);
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        assert_eq!(client.owner, 2);
        let server = pool.node("n2").server.connection(client.address());
        assert_eq!(path_mtu(&server, v6), 1500);
        client.echo(&pattern(100_000));
        assert_eq!(path_mtu(&server, v6), 1300);

        // The owner of a datagram flow learns the path MTU too: some datagrams must not be fragmented, and some are
        // fragmented by the owner itself. Each case has its own client, because a path MTU is stored per client
        // address.
        for (host, length) in [("c2", 1400), ("c3", 4000)] {
            let datagrams = DatagramClient::new(pool.lab.host(host), unspecified(v6));
            assert_eq!(datagrams.ask(&pattern(length)), 2);
        }
    }
}
