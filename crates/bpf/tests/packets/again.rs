//! A client reuses the port of a closed connection after the server has moved to another node.

use std::net::Shutdown;

use holdfast_bpf::shared::{
    EVENT_FOLLOWED, FlowState, SUCCESSOR_ALONE, SUCCESSOR_BEFORE, SUCCESSOR_SERVES, ServiceKey,
    Successor, mapped,
};

use super::support::raw::{ACK, FIN, RST, SYN, Segment};
use super::support::{self, *};

const CLIENT_PORT: u16 = 5000;

/// Records that a service's server has moved from n2 to n3. With `drains`, the listener at n2 stays only for
/// handshakes that had begun.
fn server_goes(pool: &Pool, v6: bool, drains: bool) {
    let role = if drains {
        SUCCESSOR_ALONE
    } else {
        SUCCESSOR_SERVES
    };
    is_with_n3(pool, v6, role);
}

/// Records at n2 that n3 is another node of the server, with this role.
fn is_with_n3(pool: &Pool, v6: bool, role: u16) {
    let to = service(v6);
    let key = ServiceKey {
        address: mapped(to.ip()),
        port: to.port().to_be_bytes(),
        protocol: TCP,
        pad: 0,
    };
    let successor = Successor { node: 3, role };
    let set = |plane: &holdfast_bpf::Dataplane| plane.successors.set(&key, &successor);
    pool.node("n2").plane(set).expect("successor");
}

/// Returns the next answer with one of these flags.
fn answer(peer: &RawPeer, flags: u8) -> Segment {
    loop {
        let answer = peer.answer(CLIENT_PORT, 60_000).expect("an answer");
        assert_eq!(answer.flags & RST, 0, "a reset");
        if answer.flags & flags != 0 {
            return answer;
        }
    }
}

/// Performs a handshake from the port, and asserts that this node answers.
fn begins_at(pool: &Pool, peer: &mut RawPeer, name: &str) {
    peer.seq = peer.seq.wrapping_add(100_000);
    peer.ack = 0;
    peer.segment(CLIENT_PORT, SYN, 0, &[]);
    let begun = answer(peer, SYN);
    assert_eq!(begun.link, pool.lab.place(name).link(), "not {name}");
    peer.seq = peer.seq.wrapping_add(1);
    peer.ack = begun.seq.wrapping_add(1);
    peer.segment(CLIENT_PORT, ACK, 0, &[]);
    let key = flow(TCP, service(peer.v6), peer.address(CLIENT_PORT));
    eventually("established", || {
        pool.node(name).state(&key) == Some(FlowState::Owned)
    });
    // The greeting: one byte.
    let greeting = answer(peer, ACK);
    assert_eq!(greeting.link, pool.lab.place(name).link());
    peer.ack = peer.ack.wrapping_add(1);
    peer.segment(CLIENT_PORT, ACK, 0, &[]);
}

/// The server closes first, so its socket waits in TIME-WAIT.
fn server_closes(pool: &Pool, peer: &mut RawPeer, name: &str) {
    let node = pool.node(name);
    let connection = node.server.connection(peer.address(CLIENT_PORT));
    connection.shutdown(Shutdown::Write).expect("shutdown");
    answer(peer, FIN);
    peer.ack = peer.ack.wrapping_add(1);
    peer.segment(CLIENT_PORT, FIN | ACK, 0, &[]);
    closed(pool, peer, name);
}

/// The client closes first, so no socket waits at the server.
fn client_closes(pool: &Pool, peer: &mut RawPeer, name: &str) {
    peer.segment(CLIENT_PORT, FIN | ACK, 0, &[]);
    answer(peer, FIN);
    peer.seq = peer.seq.wrapping_add(1);
    peer.ack = peer.ack.wrapping_add(1);
    peer.segment(CLIENT_PORT, ACK, 0, &[]);
    closed(pool, peer, name);
}

fn closed(pool: &Pool, peer: &RawPeer, name: &str) {
    let key = flow(TCP, service(peer.v6), peer.address(CLIENT_PORT));
    eventually("closed", || {
        pool.node(name).state(&key) == Some(FlowState::Closing)
    });
}

#[test]
fn a_client_that_comes_again_finds_the_server_where_it_is() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all(2);
    let (old, new) = (pool.node("n2"), pool.node("n3"));
    for v6 in [false, true] {
        let number = if v6 { 150 } else { 151 };
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.place("n1").link());
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        let resets = pool.lab.host("n2").snmp("Tcp", "OutRsts");
        begins_at(&pool, &mut peer, "n2");
        server_closes(&pool, &mut peer, "n2");

        // Another server listens at the node that the first server left.
        server_goes(&pool, v6, false);
        begins_at(&pool, &mut peer, "n2");
        server_closes(&pool, &mut peer, "n2");
        server_goes(&pool, v6, true);

        // n2 still has the socket of the closed connection.
        begins_at(&pool, &mut peer, "n3");
        let left = old.flow(&key).expect("it sends on what comes");
        assert_eq!((left.state, left.peer), (FlowState::Moved as u8, 3));
        assert!(old.has_event(EVENT_FOLLOWED, &key));

        // n2 also has the flow's entry in the state Moved.
        client_closes(&pool, &mut peer, "n3");
        let forget = |node: &support::node::Node| node.plane(|plane| plane.flows.remove(&key));
        forget(new).expect("forgotten");
        begins_at(&pool, &mut peer, "n3");

        // The entry is removed before the socket in TIME-WAIT.
        client_closes(&pool, &mut peer, "n3");
        forget(new).expect("forgotten");
        forget(old).expect("forgotten");
        begins_at(&pool, &mut peer, "n3");
        assert_eq!(old.flow(&key), None);
        assert_eq!(pool.lab.host("n2").snmp("Tcp", "OutRsts"), resets);
    }
}

#[test]
fn a_handshake_ends_where_it_began_when_the_server_comes_meanwhile() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all(2);
    for v6 in [false, true] {
        let number = if v6 { 152 } else { 153 };
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.place("n1").link());
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        is_with_n3(&pool, v6, SUCCESSOR_ALONE);
        peer.segment(CLIENT_PORT, SYN, 0, &[]);
        let begun = answer(&peer, SYN);
        assert_eq!(begun.link, pool.lab.place("n3").link());
        is_with_n3(&pool, v6, SUCCESSOR_BEFORE);
        peer.seq = peer.seq.wrapping_add(1);
        peer.ack = begun.seq.wrapping_add(1);
        peer.segment(CLIENT_PORT, ACK, 0, &[]);
        eventually("established", || {
            pool.node("n3").state(&key) == Some(FlowState::Owned)
        });
        // A new client reaches n2.
        let mut next = RawPeer::new(&pool, "c1", number + 2, v6, pool.lab.place("n1").link());
        begins_at(&pool, &mut next, "n2");
    }
}
