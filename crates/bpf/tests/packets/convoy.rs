//! Flows that move together (a convoy): one map entry changes the state of all of them, and each flow has its own state
//! before and afterwards.

use std::io::Write;

use holdfast_bpf::shared::{Convoy, EVENT_CLOSED, FlowState, FlowValue, RECORD_TRANSIT, Record};

use super::support::node::Node;
use super::support::server::unsent;
use super::support::tun::VNET;
use super::support::*;

const SLOT: u32 = 5;
const CONVOY: u8 = 7;

fn join(node: &Node, clients: &[Client], convoy: u8) {
    let keys: Vec<_> = clients.iter().map(Client::key).collect();
    let joins = FlowValue {
        convoy,
        ..FlowValue::default()
    };
    let joined = node.plane(|plane| plane.set_flows(&keys, &vec![joins; keys.len()]));
    joined.expect("joined");
}

fn turn(node: &Node, state: Option<FlowState>, peer: u16, ahead: u8) {
    let state = state.map_or(0, |state| state as u8);
    let convoy = Convoy {
        state,
        ahead,
        peer,
        pad: 0,
    };
    node.plane(|plane| plane.convoys.turn(CONVOY, convoy));
}

#[test]
fn a_convoy_leaves_with_what_brings_data_and_keeps_what_acknowledges() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all(2);
    let (donor, acceptor) = (pool.node("n2"), pool.node("n3"));
    for v6 in [false, true] {
        let host = pool.lab.host("c1");
        let mut clients = [Client::connect(host, v6), Client::connect(host, v6)];
        for client in &clients {
            donor.server.settle(client.address());
            acceptor.set_state(&client.key(), FlowState::TransitIn, 2, SLOT);
        }
        join(donor, &clients, CONVOY);
        clients[0].echo(b"each has its own state still");
        turn(donor, Some(FlowState::Leaving), 3, 0);
        for client in &mut clients {
            // Data of the server still leaves, and the acknowledgement reaches the server.
            let mut server = donor.server.connection(client.address());
            server.write_all(b"a last word").expect("write");
            client.expect(b"a last word");
            donor.server.settle(client.address());
            client.send(b"and what now?");
            let packet = acceptor.tun.read(60_000).expect("held at the acceptor");
            assert!(packet[VNET..].ends_with(b"and what now?"));
        }
        turn(donor, Some(FlowState::TransitOut), 3, 0);
        let dropped = donor.count("drop_egress_transit");
        let mut server = donor.server.connection(clients[0].address());
        server.write_all(b"nobody hears this yet").expect("write");
        eventually("it does not leave", || {
            donor.count("drop_egress_transit") > dropped
        });
        assert!(unsent(&server) > 0, "TCP knows that it was not sent");
        // All flows return to the donor; the clients retransmit the packets that were held.
        for client in &clients {
            let removed = acceptor.plane(|plane| plane.flows.remove(&client.key()));
            removed.expect("removed");
        }
        turn(donor, None, 0, 0);
        clients[0].expect(b"nobody hears this yetand what now?");
        clients[1].expect(b"and what now?");
        join(donor, &clients, 0);
        for client in &clients {
            let value = donor.flow(&client.key()).expect("known");
            assert_eq!((value.state, value.convoy), (FlowState::Owned as u8, 0));
        }
        while acceptor.tun.read(0).is_some() {}
    }
}

#[test]
fn a_flow_that_ends_in_a_convoy_says_so_at_the_epoch_it_has_there() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all(2);
    let node = pool.node("n2");
    let clients = [Client::connect(pool.lab.host("c1"), false)];
    let [client] = &clients;
    let (key, address) = (client.key(), client.address());
    node.server.settle(address);
    let epoch = node.flow(&key).expect("known").epoch;
    // The state of an acceptor with a running process: the flow was held, and is owned here since the convoy changed
    // state.
    node.set_state(&key, FlowState::TransitIn, 0, 0);
    join(node, &clients, CONVOY);
    turn(node, Some(FlowState::Flushing), 0, 1);
    drop(clients);
    eventually("told", || {
        let said = (EVENT_CLOSED, key, epoch + 1);
        let mut events = node.events().into_iter();
        events.any(|event| (event.kind, event.flow, event.epoch) == said)
    });
    let value = node.flow(&key).expect("known");
    let all = node.plane(|plane| plane.convoys.get(CONVOY));
    assert_eq!(value.standing(all).state, FlowState::Closing as u8);
    assert_eq!(value.standing(all).epoch, epoch + 1);
}

#[test]
fn flows_in_transit_by_way_of_their_donor_are_steered_to_it() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all(2);
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        client.echo(b"before");
        let record = Record {
            epoch: 9,
            owner: 2,
            acceptor: 3,
            state: RECORD_TRANSIT,
            by_donor: 1,
            pad: [0; 2],
        };
        let contact = pool.node("n1");
        let keys = [client.key()];
        let set = contact.plane(|plane| plane.steering.set_many(&keys, &[record]));
        set.expect("set");
        client.echo(b"by way of the donor, who has it still");
        let to_acceptor = Record {
            by_donor: 0,
            ..record
        };
        let acceptor = pool.node("n3");
        acceptor.set_state(&client.key(), FlowState::TransitIn, 2, SLOT);
        pool.node("n2").server.settle(client.address());
        let set = contact.plane(|plane| plane.steering.set_many(&keys, &[to_acceptor]));
        set.expect("set");
        client.send(b"held");
        // Pure acknowledgements may precede the data.
        eventually("held at the acceptor", || {
            let packet = acceptor.tun.read(1000);
            packet.is_some_and(|packet| packet[VNET..].ends_with(b"held"))
        });
        while acceptor.tun.read(0).is_some() {}
    }
}
