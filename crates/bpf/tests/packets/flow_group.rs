//! Flows that move together (a flow group): one map entry changes the state of all of them, and each flow has its own state
//! before and afterwards.

use std::io::Write;

use holdfast_bpf::shared_with_c::{
    EVENT_CLOSED, FlowGroup, FlowState, FlowValue, RECORD_TRANSIT, Record,
};

use super::support::node::Node;
use super::support::server::unsent_bytes;
use super::support::tun::VNET_HEADER_BYTES;
use super::support::*;

const SLOT: u32 = 5;
const GROUP: u8 = 7;

fn join_group(node: &Node, clients: &[Client], group: u8) {
    let keys: Vec<_> = clients.iter().map(Client::key).collect();
    let member_value = FlowValue {
        flow_group: group,
        ..FlowValue::default()
    };
    let set_result =
        node.with_dataplane(|plane| plane.set_flows(&keys, &vec![member_value; keys.len()]));
    set_result.expect("joined");
}

fn set_group(node: &Node, state: Option<FlowState>, peer: u16, epoch_offset: u8) {
    let state = state.map_or(0, |state| state as u8);
    let group_state = FlowGroup {
        state,
        epoch_offset,
        peer,
        pad: 0,
    };
    node.with_dataplane(|plane| plane.flow_groups.set(GROUP, group_state));
}

#[test]
fn leaving_group_forwards_data_and_keeps_acknowledgements() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all_on(2);
    let (donor, acceptor) = (pool.node("n2"), pool.node("n3"));
    for v6 in [false, true] {
        let host = pool.lab.host("c1");
        let mut clients = [Client::connect(host, v6), Client::connect(host, v6)];
        for client in &clients {
            donor.server.wait_until_acknowledged(client.address());
            acceptor.set_state(&client.key(), FlowState::TransitIn, 2, SLOT);
        }
        join_group(donor, &clients, GROUP);
        clients[0].echo(b"each flow still has its own state");
        set_group(donor, Some(FlowState::RedirectingData), 3, 0);
        for client in &mut clients {
            // Data of the server still leaves, and the acknowledgement reaches the server.
            let mut server = donor.server.connection(client.address());
            server.write_all(b"a last word").expect("write");
            client.expect(b"a last word");
            donor.server.wait_until_acknowledged(client.address());
            client.send(b"and what now?");
            let packet = acceptor.tun.read(60_000).expect("held at the acceptor");
            assert!(packet[VNET_HEADER_BYTES..].ends_with(b"and what now?"));
        }
        set_group(donor, Some(FlowState::TransitOut), 3, 0);
        let dropped = donor.counter("drop_egress_transit");
        let mut server = donor.server.connection(clients[0].address());
        server.write_all(b"nobody hears this yet").expect("write");
        eventually("the egress filter drops the segment", || {
            donor.counter("drop_egress_transit") > dropped
        });
        assert!(
            unsent_bytes(&server) > 0,
            "TCP counts dropped data as unsent"
        );
        // All flows return to the donor; the clients retransmit the packets that were held.
        for client in &clients {
            let removed = acceptor.with_dataplane(|plane| plane.flows.remove(&client.key()));
            removed.expect("removed");
        }
        set_group(donor, None, 0, 0);
        clients[0].expect(b"nobody hears this yetand what now?");
        clients[1].expect(b"and what now?");
        join_group(donor, &clients, 0);
        for client in &clients {
            let value = donor.flow(&client.key()).expect("known");
            assert_eq!((value.state, value.flow_group), (FlowState::Owned as u8, 0));
        }
        while acceptor.tun.read(0).is_some() {}
    }
}

#[test]
fn closing_flow_reports_group_epoch() {
    let pool = Pool::new(&[&["n1", "n2", "c1"]], Options::default());
    pool.place_all_on(2);
    let node = pool.node("n2");
    let clients = [Client::connect(pool.lab.host("c1"), false)];
    let [client] = &clients;
    let (key, address) = (client.key(), client.address());
    node.server.wait_until_acknowledged(address);
    let epoch = node.flow(&key).expect("known").epoch;
    // The state of an acceptor with a running process: the flow was held, and is owned here since the group changed
    // state.
    node.set_state(&key, FlowState::TransitIn, 0, 0);
    join_group(node, &clients, GROUP);
    set_group(node, Some(FlowState::Flushing), 0, 1);
    drop(clients);
    eventually("told", || {
        let close_event = (EVENT_CLOSED, key, epoch + 1);
        let mut events = node.events().into_iter();
        events.any(|event| (event.kind, event.flow, event.epoch) == close_event)
    });
    let value = node.flow(&key).expect("known");
    let group_state = node.with_dataplane(|plane| plane.flow_groups.get(GROUP));
    assert_eq!(value.effective(group_state).state, FlowState::Closing as u8);
    assert_eq!(value.effective(group_state).epoch, epoch + 1);
}

#[test]
fn transit_via_donor_is_steered_to_donor() {
    let pool = Pool::new(&[&["n1", "n2", "n3", "c1"]], Options::default());
    pool.place_all_on(2);
    for v6 in [false, true] {
        let mut client = Client::connect(pool.lab.host("c1"), v6);
        client.echo(b"before");
        let record = Record {
            epoch: 9,
            owner: 2,
            acceptor: 3,
            state: RECORD_TRANSIT,
            via_donor: 1,
            pad: [0; 2],
        };
        let contact = pool.node("n1");
        let keys = [client.key()];
        let set = contact.with_dataplane(|plane| plane.steering.set_many(&keys, &[record]));
        set.expect("set");
        client.echo(b"by way of the donor, which still owns the flow");
        let to_acceptor = Record {
            via_donor: 0,
            ..record
        };
        let acceptor = pool.node("n3");
        acceptor.set_state(&client.key(), FlowState::TransitIn, 2, SLOT);
        pool.node("n2")
            .server
            .wait_until_acknowledged(client.address());
        let set = contact.with_dataplane(|plane| plane.steering.set_many(&keys, &[to_acceptor]));
        set.expect("set");
        client.send(b"held");
        // Pure acknowledgements may precede the data.
        eventually("held at the acceptor", || {
            let packet = acceptor.tun.read(1000);
            packet.is_some_and(|packet| packet[VNET_HEADER_BYTES..].ends_with(b"held"))
        });
        while acceptor.tun.read(0).is_some() {}
    }
}
