//! A compromised node of the group tries to take flows of other nodes, and to use up their epochs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use holdfast_testbed::connection_load::open_connections;
use holdfast_wire::drain_frames::{DrainAnswer, DrainFrame, DrainOrder, DrainReportJson};
use holdfast_wire::frame::FlowToPrepare;
use holdfast_wire::{
    BatchId, ChangeKind, ChangeRefusal, Epoch, Flow, Frame, NodeId, OwnershipChange,
    OwnershipRecord, Protocol, RecordState,
};

use crate::common::compromised_node::CompromisedNode;
use crate::common::{LoadedGroup, eventually};

/// Number of the compromised member, and indices of its peers: the holder of the table and the owner of the flows.
const MEMBER_ID: NodeId = NodeId(3);
const HOLDER_PEER: usize = 0;
const OWNER_PEER: usize = 1;

/// Number of epochs left to a flow, whatever a member has requested: one per second for 17 years.
const EPOCHS_LEFT_MIN: Epoch = 1 << 29;

type ChangeResult = Result<Option<OwnershipRecord>, ChangeRefusal>;

#[test]
fn compromised_member_cannot_take_flows() {
    let Some(world) = LoadedGroup::up("stolen") else {
        return;
    };
    let daemons_before = ["n1", "n2"].map(|node| world.cluster.daemon_pid(node).unwrap());
    let mut member =
        CompromisedNode::take_over(&world.cluster, ("n3", MEMBER_ID.0), &["n1", "n2"]).unwrap();
    changes_of_other_flows_are_refused(&world, &mut member);
    prepare_of_owned_flow_is_refused(&world, &mut member);
    high_epochs_do_not_exhaust_flow(&world, &mut member);
    orders_to_drain_are_refused(&world, &mut member);
    drop(member);
    let daemons_after = ["n1", "n2"].map(|node| world.cluster.daemon_pid(node).unwrap());
    assert_eq!(daemons_after, daemons_before, "a daemon died");
    world.assert_moves("n2", world.flow(0), "n1");
    world.assert_moves("n1", world.flow(0), "n2");
    world.finish();
}

fn parse_flow(text: holdfast_api::FlowText) -> Flow {
    text.to_string().parse().unwrap()
}

/// Requests changes from the holder, and returns its answer.
fn request_changes(
    member: &mut CompromisedNode,
    changes: Vec<OwnershipChange>,
) -> Vec<ChangeResult> {
    let request = 42;
    member
        .send_to(HOLDER_PEER, &Frame::ChangeRequest { request, changes })
        .unwrap();
    let answer = member.receive("an answer of the holder", |frame| match frame {
        Frame::ChangeResponse {
            request: 42,
            results,
        } => Some(results),
        _ => None,
    });
    answer.unwrap()
}

/// Returns the holder's records of flows.
fn query_records(member: &mut CompromisedNode, flows: Vec<Flow>) -> Vec<Option<OwnershipRecord>> {
    let request = 43;
    member
        .send_to(HOLDER_PEER, &Frame::Query { request, flows })
        .unwrap();
    let answer = member.receive("the holder's records", |frame| match frame {
        Frame::QueryResponse {
            request: 43,
            records,
        } => Some(records),
        _ => None,
    });
    answer.unwrap()
}

/// No request for another node's flow changes the record.
fn changes_of_other_flows_are_refused(world: &LoadedGroup, member: &mut CompromisedNode) {
    let target_flow = parse_flow(world.flow(1));
    let before = query_records(member, vec![target_flow])[0].expect("a record");
    let owner = NodeId(2);
    assert_eq!(before.state, RecordState::Owned { owner });
    let kinds = [
        ChangeKind::Establish,
        ChangeKind::Divert {
            acceptor: MEMBER_ID,
        },
        ChangeKind::Commit,
        ChangeKind::Rollback,
        ChangeKind::Remove,
    ];
    let nearby_epochs = before.epoch.saturating_sub(1)..=before.epoch + 2;
    for epoch in nearby_epochs.chain([0, Epoch::MAX - 1, Epoch::MAX]) {
        for kind in kinds {
            let change = OwnershipChange {
                flow: target_flow,
                kind,
                epoch,
            };
            let answer = request_changes(member, vec![change]);
            assert!(answer[0].is_err(), "{change:?}: {answer:?}");
            assert_eq!(
                query_records(member, vec![target_flow]),
                [Some(before)],
                "{change:?}"
            );
        }
    }
    world.assert_unharmed();
}

/// The member offers the owner a flow that the owner has: the owner keeps the flow and its connection.
fn prepare_of_owned_flow_is_refused(world: &LoadedGroup, member: &mut CompromisedNode) {
    let target_flow = parse_flow(world.flow(2));
    for epoch in [1, 5, Epoch::MAX] {
        let batch = BatchId {
            donor: MEMBER_ID,
            boot: member.boot(),
            seq: epoch.into(),
        };
        let offered = FlowToPrepare {
            flow: target_flow,
            epoch,
            static_state: vec![0; 3].into(),
        };
        let flows = vec![offered];
        member
            .send_to(OWNER_PEER, &Frame::Prepare { batch, flows })
            .unwrap();
        let results = member.receive("an answer of the owner", |frame| match frame {
            Frame::PrepareResponse { batch: of, results } if of == batch => Some(results),
            _ => None,
        });
        let results = results.unwrap();
        assert!(results.iter().all(Result::is_err), "{results:?}");
        world.assert_unharmed();
    }
}

/// The member, which is not the contact node, orders other nodes to be drained, and answers orders that nobody gave.
fn orders_to_drain_are_refused(world: &LoadedGroup, member: &mut CompromisedNode) {
    for (peer, node) in [(HOLDER_PEER, "n1"), (OWNER_PEER, "n2")] {
        for (request, order) in [
            (1, DrainOrder::Begin { deadline_s: None }),
            (2, DrainOrder::Report),
            (3, DrainOrder::End),
        ] {
            let frame = DrainFrame::Order { request, order };
            member.send_to(peer, &Frame::Drain(frame)).unwrap();
            let answer = member.receive("an answer to the order", |frame| match frame {
                Frame::Drain(DrainFrame::Answer {
                    request: of,
                    answer,
                }) if of == request => Some(answer),
                _ => None,
            });
            let answer = answer.unwrap();
            assert!(matches!(answer, DrainAnswer::Refused { .. }), "{answer:?}");
        }
        let report = DrainReportJson::new(b"{}".to_vec()).unwrap();
        let forged = DrainFrame::Answer {
            request: 1,
            answer: DrainAnswer::Report(report),
        };
        member.send_to(peer, &Frame::Drain(forged)).unwrap();
        let control = world.cluster.blocking_control_client(node).unwrap();
        assert!(!control.run(|client| client.status()).unwrap().draining);
    }
}

/// The member requests the highest epochs for flows without a record, so that no epochs would be left for later owners.
fn high_epochs_do_not_exhaust_flow(world: &LoadedGroup, member: &mut CompromisedNode) {
    let service = world.service;
    let client_address =
        |number: u16| SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 200, 0, 1)), number);
    let flows = (1..200).map(|number| Flow {
        protocol: Protocol::Tcp,
        local: service,
        remote: client_address(number),
    });
    let flows: Vec<Flow> = flows.collect();
    for kind in [ChangeKind::Establish, ChangeKind::Remove] {
        let changes = flows.iter().map(|flow| OwnershipChange {
            flow: *flow,
            kind,
            epoch: Epoch::MAX,
        });
        request_changes(member, changes.collect());
    }
    // Connections established afterwards still have epochs to move with.
    let changes = flows.iter().map(|flow| OwnershipChange {
        flow: *flow,
        kind: ChangeKind::Establish,
        epoch: 1,
    });
    for answer in request_changes(member, changes.collect()) {
        let record = answer.expect("a new flow").expect("a record");
        assert!(record.epoch < Epoch::MAX - EPOCHS_LEFT_MIN, "{record}");
    }
    // The holder still learns of new connections, and they can move.
    let stream = open_connections(world.cluster.lab(), "c1", service, 1)
        .unwrap()
        .remove(0);
    let new_flow = world.flow_of(service, stream.local_addr().unwrap());
    eventually("the holder knows the new connection", || {
        world.owner(new_flow).is_some()
    });
    world.assert_moves("n2", new_flow, "n1");
    drop(stream);
    world.assert_unharmed();
}
