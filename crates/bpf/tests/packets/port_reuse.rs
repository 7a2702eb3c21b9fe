//! A client reuses the port of an earlier connection after the server has moved to another node, or after the node has
//! ceased to get new clients.

use std::net::Shutdown;

use holdfast_bpf::shared_with_c::{
    EVENT_SUPERSEDED, FlowState, NODE_HOLDER, PLACEMENT_SLOTS, RECORD_OWNED, Record,
    SUCCESSOR_EXCLUSIVE, SUCCESSOR_FALLBACK, SUCCESSOR_PREVIOUS, Service, ServiceKey, Successor,
    to_mapped,
};

use super::support::raw_peer::{ACK, FIN, RST, SYN, Segment};
use super::support::{self, *};

const CLIENT_PORT: u16 = 5000;

/// Records that a service's server has moved from n2 to n3. With `drains`, the listener at n2 stays only for
/// handshakes that had begun.
fn move_server(pool: &Pool, v6: bool, drains: bool) {
    let role = if drains {
        SUCCESSOR_EXCLUSIVE
    } else {
        SUCCESSOR_FALLBACK
    };
    set_successor_n3(pool, v6, role);
}

/// Records at n2 that n3 is another node of the server, with this role.
fn set_successor_n3(pool: &Pool, v6: bool, role: u16) {
    set_successor(pool, v6, "n2", Successor { node: 3, role });
}

/// Records at a node that another node has, or had, the server.
fn set_successor(pool: &Pool, v6: bool, at: &str, successor: Successor) {
    let to = service(v6);
    let key = ServiceKey {
        address: to_mapped(to.ip()),
        port: to.port().to_be_bytes(),
        protocol: TCP,
        pad: 0,
    };
    let set = |plane: &holdfast_bpf::Dataplane| plane.successors.set(&key, &successor);
    pool.node(at).with_dataplane(set).expect("successor");
}

/// Returns the next answer with one of these flags.
fn next_answer(peer: &RawPeer, flags: u8) -> Segment {
    loop {
        let answer = peer.next_segment(CLIENT_PORT, 60_000).expect("an answer");
        assert_eq!(answer.flags & RST, 0, "a reset");
        if answer.flags & flags != 0 {
            return answer;
        }
    }
}

/// Performs a handshake from the port, and asserts that this node answers.
fn assert_handshake_at(pool: &Pool, peer: &mut RawPeer, name: &str) {
    peer.seq = peer.seq.wrapping_add(100_000);
    peer.ack = 0;
    peer.send_segment(CLIENT_PORT, SYN, 0, &[]);
    let syn_ack = next_answer(peer, SYN);
    assert_eq!(syn_ack.link, pool.lab.position(name).link(), "not {name}");
    peer.seq = peer.seq.wrapping_add(1);
    peer.ack = syn_ack.seq.wrapping_add(1);
    peer.send_segment(CLIENT_PORT, ACK, 0, &[]);
    let key = flow(TCP, service(peer.v6), peer.address(CLIENT_PORT));
    eventually("established", || {
        pool.node(name).state(&key) == Some(FlowState::Owned)
    });
    // The greeting: one byte.
    let server_data = next_answer(peer, ACK);
    assert_eq!(server_data.link, pool.lab.position(name).link());
    peer.ack = peer.ack.wrapping_add(1);
    peer.send_segment(CLIENT_PORT, ACK, 0, &[]);
}

/// The server closes first, so its socket waits in TIME-WAIT.
fn close_by_server(pool: &Pool, peer: &mut RawPeer, name: &str) {
    let node = pool.node(name);
    let connection = node.server.connection(peer.address(CLIENT_PORT));
    connection.shutdown(Shutdown::Write).expect("shutdown");
    next_answer(peer, FIN);
    peer.ack = peer.ack.wrapping_add(1);
    peer.send_segment(CLIENT_PORT, FIN | ACK, 0, &[]);
    assert_closed(pool, peer, name);
}

/// The client closes first, so no socket waits at the server.
fn close_by_client(pool: &Pool, peer: &mut RawPeer, name: &str) {
    peer.send_segment(CLIENT_PORT, FIN | ACK, 0, &[]);
    next_answer(peer, FIN);
    peer.seq = peer.seq.wrapping_add(1);
    peer.ack = peer.ack.wrapping_add(1);
    peer.send_segment(CLIENT_PORT, ACK, 0, &[]);
    assert_closed(pool, peer, name);
}

fn assert_closed(pool: &Pool, peer: &RawPeer, name: &str) {
    let key = flow(TCP, service(peer.v6), peer.address(CLIENT_PORT));
    eventually("closed", || {
        pool.node(name).state(&key) == Some(FlowState::Closing)
    });
}

#[test]
fn returning_client_reaches_moved_server() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all_on(2);
    let (old, new) = (pool.node("n2"), pool.node("n3"));
    for v6 in [false, true] {
        let number = if v6 { 150 } else { 151 };
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        let resets = pool.lab.host("n2").snmp("Tcp", "OutRsts");
        assert_handshake_at(&pool, &mut peer, "n2");
        close_by_server(&pool, &mut peer, "n2");

        // Another server listens at the node that the first server left.
        move_server(&pool, v6, false);
        assert_handshake_at(&pool, &mut peer, "n2");
        close_by_server(&pool, &mut peer, "n2");
        move_server(&pool, v6, true);

        // n2 still has the socket of the closed connection.
        assert_handshake_at(&pool, &mut peer, "n3");
        let former_flow = old
            .flow(&key)
            .expect("the old node still forwards the flow");
        assert_eq!(
            (former_flow.state, former_flow.peer),
            (FlowState::Moved as u8, 3)
        );
        assert!(old.has_event(EVENT_SUPERSEDED, &key));

        // n2 also has the flow's entry in the state Moved.
        close_by_client(&pool, &mut peer, "n3");
        let remove_flow =
            |node: &support::node::Node| node.with_dataplane(|plane| plane.flows.remove(&key));
        remove_flow(new).expect("forgotten");
        assert_handshake_at(&pool, &mut peer, "n3");

        // The entry is removed before the socket in TIME-WAIT.
        close_by_client(&pool, &mut peer, "n3");
        remove_flow(new).expect("forgotten");
        remove_flow(old).expect("forgotten");
        assert_handshake_at(&pool, &mut peer, "n3");
        assert_eq!(old.flow(&key), None);
        assert_eq!(pool.lab.host("n2").snmp("Tcp", "OutRsts"), resets);
    }
}

#[test]
fn handshake_completes_where_it_began() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all_on(2);
    for v6 in [false, true] {
        let number = if v6 { 152 } else { 153 };
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        set_successor_n3(&pool, v6, SUCCESSOR_EXCLUSIVE);
        peer.send_segment(CLIENT_PORT, SYN, 0, &[]);
        let syn_ack = next_answer(&peer, SYN);
        assert_eq!(syn_ack.link, pool.lab.position("n3").link());
        set_successor_n3(&pool, v6, SUCCESSOR_PREVIOUS);
        peer.seq = peer.seq.wrapping_add(1);
        peer.ack = syn_ack.seq.wrapping_add(1);
        peer.send_segment(CLIENT_PORT, ACK, 0, &[]);
        eventually("established", || {
            pool.node("n3").state(&key) == Some(FlowState::Owned)
        });
        // A new client reaches n2.
        let mut next_peer =
            RawPeer::new(&pool, "c1", number + 2, v6, pool.lab.position("n1").link());
        assert_handshake_at(&pool, &mut next_peer, "n2");
    }
}

/// Records at n1 that n2 owns the flow of the peer's connection, and that n1 is the holder at n2.
fn record_owner_n2(pool: &Pool, peer: &RawPeer) {
    let key = flow(TCP, service(peer.v6), peer.address(CLIENT_PORT));
    let record = Record {
        epoch: pool.node("n2").flow(&key).expect("an entry").epoch,
        owner: 2,
        state: RECORD_OWNED,
        ..Record::default()
    };
    let set = |plane: &holdfast_bpf::Dataplane| plane.steering.set(&key, &record);
    pool.node("n1").with_dataplane(set).expect("steering");
    pool.node("n2").with_dataplane(|plane| {
        let mut holder = plane.nodes.get(&1).expect("nodes").expect("n1");
        holder.flags |= NODE_HOLDER;
        plane.nodes.set(&1, &holder).expect("node");
    });
}

/// The server at n2 hangs: its kernel still completes handshakes, and n2 gets no new clients. A client gives its
/// connection there up, and connects again from the same port.
#[test]
fn returning_client_of_excluded_node_is_placed_anew() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    let cases = [
        (150, true, 3),
        (151, false, 3),
        (152, true, 1),
        (153, false, 1),
    ];
    for (number, v6, healthy) in cases {
        pool.place_all_on(2);
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        assert_handshake_at(&pool, &mut peer, "n2");
        record_owner_n2(&pool, &peer);
        pool.place_all_on(healthy);

        // A SYN alone does not show that the client has no connection, so the owner asks the client.
        let former = peer.seq;
        peer.seq = former.wrapping_add(100_000);
        peer.send_segment(CLIENT_PORT, SYN, 0, &[]);
        let challenge = next_answer(&peer, ACK);
        assert_eq!(challenge.link, pool.lab.position("n2").link());
        assert_eq!((challenge.flags & SYN, challenge.ack), (0, former));
        assert_eq!(pool.node("n2").state(&key), Some(FlowState::Owned));

        // A client that has the connection says so, and keeps the connection.
        peer.seq = former;
        peer.send_segment(CLIENT_PORT, ACK, 0, b"still here");
        assert_eq!(next_answer(&peer, ACK).link, pool.lab.position("n2").link());

        // A client that does not have the connection resets it.
        peer.seq = former.wrapping_add(10);
        peer.send_segment(CLIENT_PORT, RST, 0, &[]);
        assert_closed(&pool, &peer, "n2");
        assert_handshake_at(&pool, &mut peer, &format!("n{healthy}"));
        let former_flow = pool.node("n2").flow(&key).expect("n2 forwards the flow");
        let forwarded = (former_flow.state, former_flow.peer);
        assert_eq!(forwarded, (FlowState::Moved as u8, healthy));
        assert!(pool.node("n2").has_event(EVENT_SUPERSEDED, &key));

        // n2 does not take a connection back that is elsewhere: the new owner asks the client as well.
        peer.seq = peer.seq.wrapping_add(100_000);
        peer.send_segment(CLIENT_PORT, SYN, 0, &[]);
        let challenge = next_answer(&peer, ACK);
        assert_eq!(challenge.flags & SYN, 0);
        let healthy_link = pool.lab.position(&format!("n{healthy}")).link();
        assert_eq!(challenge.link, healthy_link);
    }
}

/// A connection at n2 has ended, and the placement table already names n3 (before the server leaves n2), or still names
/// n3 (after the server has come to n2). In both cases n3 sends new clients to n2, which must not send them back.
#[test]
fn returning_client_reaches_server_that_moves() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    let cases = [
        (160, true, true),
        (161, false, true),
        (162, true, false),
        (163, false, false),
    ];
    for (number, v6, is_leaving) in cases {
        pool.place_all_on(2);
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        assert_handshake_at(&pool, &mut peer, "n2");
        record_owner_n2(&pool, &peer);
        close_by_server(&pool, &mut peer, "n2");

        pool.place_all_on(3);
        let role = SUCCESSOR_EXCLUSIVE;
        set_successor(&pool, v6, "n3", Successor { node: 2, role });
        if is_leaving {
            let own_node_placed = 1;
            let service = Service {
                own_node_placed,
                ..Service::default()
            };
            pool.set_services_at("n2", &[3; PLACEMENT_SLOTS], service);
        } else {
            set_successor_n3(&pool, v6, SUCCESSOR_PREVIOUS);
        }
        assert_handshake_at(&pool, &mut peer, "n2");
    }
    for name in ["n2", "n3"] {
        assert_eq!(pool.node(name).counter("drop_hops_used_up"), 0);
    }
}

/// The server has moved from n2 to n3, with a connection that ended there, and comes back to n2. The placement table still
/// names n3. Both nodes have an entry that leads to the other one: n2 since the first move, n3 since the client's SYN.
#[test]
fn returning_client_reaches_server_that_came_back() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    for (number, v6) in [(170, true), (171, false)] {
        pool.place_all_on(3);
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        assert_handshake_at(&pool, &mut peer, "n3");
        close_by_server(&pool, &mut peer, "n3");
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        pool.node("n2").set_state(&key, FlowState::Moved, 3, 0);

        let (node, role) = (2, SUCCESSOR_EXCLUSIVE);
        set_successor(&pool, v6, "n3", Successor { node, role });
        set_successor_n3(&pool, v6, SUCCESSOR_PREVIOUS);
        assert_handshake_at(&pool, &mut peer, "n2");
    }
    for name in ["n2", "n3"] {
        assert_eq!(pool.node(name).counter("drop_hops_used_up"), 0);
    }
}

/// As before, but the server comes back only now: its process does not run at n2 yet, where the sockets are being made.
/// n2 sends new clients to n3, and n3 sends this one after the connection that it had at n2.
#[test]
fn returning_client_reaches_server_on_its_way_back() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    for (number, v6) in [(172, true), (173, false)] {
        pool.place_all_on(2);
        let mut peer = RawPeer::new(&pool, "c1", number, v6, pool.lab.position("n1").link());
        assert_handshake_at(&pool, &mut peer, "n2");
        close_by_server(&pool, &mut peer, "n2");
        set_successor_n3(&pool, v6, SUCCESSOR_EXCLUSIVE);
        let key = flow(TCP, service(v6), peer.address(CLIENT_PORT));
        pool.node("n3").set_state(&key, FlowState::Moved, 2, 0);

        peer.seq = peer.seq.wrapping_add(100_000);
        peer.ack = 0;
        peer.send_segment(CLIENT_PORT, SYN, 0, &[]);
        next_answer(&peer, SYN);
    }
    for name in ["n2", "n3"] {
        assert_eq!(pool.node(name).counter("drop_hops_used_up"), 0);
    }
}
