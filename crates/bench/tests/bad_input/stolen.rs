//! A compromised node of the group tries to take flows of other nodes, and to use up their epochs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use holdfast_bench::load::connect;
use holdfast_wire::frame::PrepareFlow;
use holdfast_wire::{
    BatchId, Change, ChangeKind, Epoch, Flow, Frame, NodeId, Protocol, Record, RecordState, Refusal,
};

use crate::common::member::Member;
use crate::common::{World, eventually};

/// Number of the compromised member, and indices of its peers: the holder of the table and the owner of the flows.
const OWN: NodeId = NodeId(3);
const HOLDER: usize = 0;
const OWNER: usize = 1;

/// Number of epochs left to a flow, whatever a member has requested: one per second for 17 years.
const LEFT: Epoch = 1 << 29;

type Answer = Result<Option<Record>, Refusal>;

#[test]
fn what_a_member_wants_of_others() {
    let Some(world) = World::up("stolen") else {
        return;
    };
    let daemons = ["n1", "n2"].map(|node| world.cluster.daemon_pid(node).unwrap());
    let mut member = Member::take_over(&world.cluster, ("n3", OWN.0), &["n1", "n2"]).unwrap();
    flows_of_others(&world, &mut member);
    prepared_for_others(&world, &mut member);
    epochs(&world, &mut member);
    drop(member);
    let now = ["n1", "n2"].map(|node| world.cluster.daemon_pid(node).unwrap());
    assert_eq!(now, daemons, "a daemon has died");
    world.moves("n2", world.flow(0), "n1");
    world.moves("n1", world.flow(0), "n2");
    world.end();
}

fn flow(of: holdfast_api::FlowText) -> Flow {
    of.to_string().parse().unwrap()
}

/// Requests changes from the holder, and returns its answer.
fn asked(member: &mut Member, changes: Vec<Change>) -> Vec<Answer> {
    let request = 42;
    member
        .say_to(HOLDER, &Frame::Ask { request, changes })
        .unwrap();
    let answer = member.hear("an answer of the holder", |frame| match frame {
        Frame::Answer {
            request: 42,
            results,
        } => Some(results),
        _ => None,
    });
    answer.unwrap()
}

/// Returns the holder's records of flows.
fn records(member: &mut Member, flows: Vec<Flow>) -> Vec<Option<Record>> {
    let request = 43;
    member
        .say_to(HOLDER, &Frame::Query { request, flows })
        .unwrap();
    let answer = member.hear("the holder's records", |frame| match frame {
        Frame::QueryAnswer {
            request: 43,
            records,
        } => Some(records),
        _ => None,
    });
    answer.unwrap()
}

/// No request for another node's flow changes the record.
fn flows_of_others(world: &World, member: &mut Member) {
    let wanted = flow(world.flow(1));
    let before = records(member, vec![wanted])[0].expect("a record");
    let owner = NodeId(2);
    assert_eq!(before.state, RecordState::Owned { owner });
    let kinds = [
        ChangeKind::Establish,
        ChangeKind::Divert { acceptor: OWN },
        ChangeKind::Commit,
        ChangeKind::Rollback,
        ChangeKind::Remove,
    ];
    let near = before.epoch.saturating_sub(1)..=before.epoch + 2;
    for epoch in near.chain([0, Epoch::MAX - 1, Epoch::MAX]) {
        for kind in kinds {
            let change = Change {
                flow: wanted,
                kind,
                epoch,
            };
            let answer = asked(member, vec![change]);
            assert!(answer[0].is_err(), "{change:?}: {answer:?}");
            assert_eq!(records(member, vec![wanted]), [Some(before)], "{change:?}");
        }
    }
    world.unharmed();
}

/// The member offers the owner a flow that the owner has: the owner keeps the flow and its connection.
fn prepared_for_others(world: &World, member: &mut Member) {
    let wanted = flow(world.flow(2));
    for epoch in [1, 5, Epoch::MAX] {
        let batch = BatchId {
            donor: OWN,
            boot: member.boot(),
            seq: epoch.into(),
        };
        let offered = PrepareFlow {
            flow: wanted,
            epoch,
            static_state: vec![0; 3].into(),
        };
        let flows = vec![offered];
        member
            .say_to(OWNER, &Frame::Prepare { batch, flows })
            .unwrap();
        let results = member.hear("an answer of the owner", |frame| match frame {
            Frame::Prepared { batch: of, results } if of == batch => Some(results),
            _ => None,
        });
        let results = results.unwrap();
        assert!(results.iter().all(Result::is_err), "{results:?}");
        world.unharmed();
    }
}

/// The member requests the highest epochs for flows without a record, so that no epochs would be left for later owners.
fn epochs(world: &World, member: &mut Member) {
    let service = world.service;
    let client = |number: u16| SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 200, 0, 1)), number);
    let flows = (1..200).map(|number| Flow {
        protocol: Protocol::Tcp,
        local: service,
        remote: client(number),
    });
    let flows: Vec<Flow> = flows.collect();
    for kind in [ChangeKind::Establish, ChangeKind::Remove] {
        let changes = flows.iter().map(|flow| Change {
            flow: *flow,
            kind,
            epoch: Epoch::MAX,
        });
        asked(member, changes.collect());
    }
    // Connections established afterwards still have epochs to move with.
    let changes = flows.iter().map(|flow| Change {
        flow: *flow,
        kind: ChangeKind::Establish,
        epoch: 1,
    });
    for answer in asked(member, changes.collect()) {
        let record = answer.expect("a new flow").expect("a record");
        assert!(record.epoch < Epoch::MAX - LEFT, "{record}");
    }
    // The holder still learns of new connections, and they can move.
    let stream = connect(world.cluster.lab(), "c1", service, 1)
        .unwrap()
        .remove(0);
    let new = world.flow_of(service, stream.local_addr().unwrap());
    eventually("a new connection is known", || world.owner(new).is_some());
    world.moves("n2", new, "n1");
    drop(stream);
    world.unharmed();
}
