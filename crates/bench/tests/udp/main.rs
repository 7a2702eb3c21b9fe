//! Datagram associations move between servers while their clients continue. Needs root.
//!
//! Every datagram has a number that its answer repeats, so that lost and duplicated datagrams are counted.

#[path = "../common/mod.rs"]
mod common;
mod numbered_datagrams;
mod scripted_association;

use std::collections::BTreeSet;

use holdfast_api::app::{DatagramPiece, FromDaemon, ToDaemon};
use holdfast_api::control::{
    FlowFilter, FlowListQuery, FlowOutcome, FlowResult, FlowSelection, FlowState, HandoffRequest,
    HandoffState, HandoffStatus,
};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_lab::ServiceReach;
use holdfast_testbed::cluster::{
    Cluster, ClusterService, ClusterSpec, ExampleServer, IpFamily, STALLS_MAX, is_node_stall,
};

use common::{PORT, assert_contains, eventually, lock_lab};
use numbered_datagrams::DatagramLoad;
use scripted_association::{ScriptedAssociation, bind_socket_in, receive, send};

/// Number of clients.
const ASSOCIATIONS: usize = 24;
/// Port of a service that only tests serve.
const ODD_PORT: u16 = 8007;

#[test]
fn associations_are_handed_off_over_ipv4() {
    hand_off_associations("udp4", ServiceReach::Steer, IpFamily::V4);
}

#[test]
fn associations_are_handed_off_over_ipv6() {
    hand_off_associations("udp6", ServiceReach::Steer, IpFamily::V6);
}

#[test]
fn associations_are_handed_off_with_broadcast() {
    hand_off_associations("udpb", ServiceReach::Broadcast, IpFamily::V4);
}

/// Associations are placed on several nodes and moved one by one and many at once: no datagram is lost. With steering
/// none is duplicated. With broadcast, acceptor and donor both receive datagrams that arrive during the prepare step.
fn hand_off_associations(name: &str, reach: ServiceReach, family: IpFamily) {
    let Some(_lock) = lock_lab() else { return };
    let cluster = start_group(name, reach, &[]);
    let load = DatagramLoad::start(&cluster, family, ASSOCIATIONS);
    load.wait_until_all_answered();
    eventually("the owners know all associations", || {
        owned_count(&cluster, &load) == ASSOCIATIONS && owners_know_programs(&cluster, &load)
    });
    let owners = load_owners(&cluster, &load);
    assert!(owners.len() > 1, "all are placed on {owners:?}");

    for client in 0..6 {
        let flow = load.flow(client);
        let from = owner_of(&cluster, flow).unwrap();
        let to = if from == "n2" { "n3" } else { "n2" };
        let moved = assert_all_move(&cluster, &from, FlowSelection::Flows(vec![flow]), to);
        assert_eq!(moved, 1);
        assert_eq!(owner_of(&cluster, flow).as_deref(), Some(to));
        load.wait_until_all_answered();
    }
    for to in ["n2", "n3", "n1", "n2"] {
        for from in ["n1", "n2", "n3"].into_iter().filter(|from| *from != to) {
            if owned_by_count(&cluster, &load, from) == 0 {
                continue;
            }
            let all = FlowSelection::AllOf(FlowFilter {
                protocol: Some(Protocol::Udp),
                ..FlowFilter::default()
            });
            assert_all_move(&cluster, from, all, to);
        }
        assert_eq!(owned_by_count(&cluster, &load, to), ASSOCIATIONS);
        load.wait_until_all_answered();
    }
    let counts = load.finish(name);
    assert_eq!(counts.lost, [], "{counts:?}");
    if reach == ServiceReach::Steer {
        assert_eq!(counts.duplicated, 0, "{counts:?}");
    }
}

/// Datagrams that the donor's program has not read move too, and are read at the acceptor before later ones.
#[test]
fn queued_datagrams_are_handed_off() {
    let Some(_lock) = lock_lab() else { return };
    let cluster = start_group("udpq", ServiceReach::Steer, &["n2"]);
    let load = DatagramLoad::start(&cluster, IpFamily::V4, 4);
    load.wait_until_all_answered();
    let odd = ScriptedAssociation::new(&cluster);
    let at_acceptor = bind_socket_in(&cluster, "n3", odd.service);
    for number in 0..5u8 {
        odd.client.send(&[number]).unwrap();
    }
    let id = odd.start_handoff();
    let unread = (0..5).map(|_| {
        let mut byte = [0];
        odd.server.recv_from(&mut byte).unwrap();
        DatagramPiece {
            bytes: byte.to_vec(),
            is_continued: false,
        }
    });
    let collected = ToDaemon::Collected {
        flow: odd.flow,
        unread: unread.collect(),
        last: true,
    };
    send(&odd.donor_program, &collected);
    let release_message = receive(&odd.donor_program);
    assert!(
        matches!(release_message, FromDaemon::Moved { .. }),
        "{release_message:?}"
    );
    let resume_message = receive(&odd.acceptor_program);
    assert!(
        matches!(&resume_message, FromDaemon::Activate { ids } if *ids == [id]),
        "{resume_message:?}"
    );
    assert_eq!(owner_of(&cluster, odd.flow).as_deref(), Some("n3"));
    odd.client.send(&[5]).unwrap();
    let mut byte = [0];
    for number in 0..6u8 {
        at_acceptor.recv_from(&mut byte).unwrap();
        assert_eq!(byte, [number]);
    }
    at_acceptor
        .send_to(&[6], odd.client.local_addr().unwrap())
        .unwrap();
    odd.client.recv(&mut byte).unwrap();
    assert_eq!(byte, [6]);
    let counts = load.finish("udpq");
    assert_eq!((counts.lost.len(), counts.duplicated), (0, 0), "{counts:?}");
}

/// A program that never reports its unread datagrams keeps its association, and delays no other handoff.
#[test]
fn hanging_program_keeps_association() {
    let Some(_lock) = lock_lab() else { return };
    let cluster = start_group("udph", ServiceReach::Steer, &["n2"]);
    let load = DatagramLoad::start(&cluster, IpFamily::V4, 4);
    load.wait_until_all_answered();
    let odd = ScriptedAssociation::new(&cluster);
    odd.start_handoff();
    // The program does not answer the freeze.
    match receive(&odd.donor_program) {
        FromDaemon::Kept { reason, .. } => {
            assert_contains(reason, &["did not return its unread datagrams"])
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        receive(&odd.acceptor_program),
        FromDaemon::Cancel { .. }
    ));
    assert_eq!(owner_of(&cluster, odd.flow).as_deref(), Some("n2"));
    let all = FlowSelection::Flows((0..4).map(|client| load.flow(client)).collect());
    assert_eq!(assert_all_move(&cluster, "n2", all, "n3"), 4);
    let counts = load.finish("udph");
    assert_eq!((counts.lost.len(), counts.duplicated), (0, 0), "{counts:?}");
}

/// Brings up three nodes with echo servers. New flows are placed on the named nodes, or on all nodes if none is named.
fn start_group(name: &str, reach: ServiceReach, weighted_nodes: &[&str]) -> Cluster {
    let name = format!("{name}-{}", std::process::id());
    let mut spec = ClusterSpec::new(name).program(ExampleServer::Echo { port: PORT });
    spec.reach = reach;
    let odd = ClusterService::new("odd", Protocol::Udp, ODD_PORT);
    spec.services.push(odd);
    for service in spec
        .services
        .iter_mut()
        .filter(|_| !weighted_nodes.is_empty())
    {
        let weight = |node: &str| (node.to_owned(), u32::from(weighted_nodes.contains(&node)));
        service.weights = ["n1", "n2", "n3"].map(weight).into();
    }
    Cluster::up(spec).unwrap()
}

fn start_handoff(cluster: &Cluster, from: &str, selection: FlowSelection, to: &str) -> u64 {
    let request = HandoffRequest {
        selection,
        to: to.to_owned(),
        drain: Drain::None,
    };
    let control = cluster.blocking_control_client(from).unwrap();
    let accepted = control.run(async |client| client.hand_off(&request).await);
    accepted.unwrap().id
}

fn wait_for_handoff(cluster: &Cluster, from: &str, id: u64) -> HandoffStatus {
    let control = cluster.blocking_control_client(from).unwrap();
    let status = || {
        control
            .run(async |client| client.handoff(id).await)
            .unwrap()
    };
    eventually("the handoff ends", || {
        status().summary.state == HandoffState::Finished
    });
    // The daemon reports the freeze times of the last batch just after its outcomes.
    eventually("the times are reported", || {
        let moved =
            |result: &holdfast_api::control::FlowResult| result.outcome == FlowOutcome::Moved;
        let mut results = status().results.into_iter().filter(moved);
        results.all(|result| result.freeze_us.is_some())
    });
    status()
}

/// Hands off the selected flows, asserts that all of them move, and returns their number.
fn assert_all_move(cluster: &Cluster, from: &str, mut selection: FlowSelection, to: &str) -> u64 {
    let (mut late_attempts, mut moved) = (0, 0);
    loop {
        let status = wait_for_handoff(cluster, from, start_handoff(cluster, from, selection, to));
        let kept = |result: &FlowResult| match &result.outcome {
            FlowOutcome::Kept { reason, .. } => Some((result.flow, is_node_stall(reason))),
            _ => None,
        };
        let kept: Vec<_> = status.results.iter().filter_map(kept).collect();
        moved += status.summary.moved;
        if kept.is_empty() {
            return moved;
        }
        let are_all_late = kept.iter().all(|(_, late)| *late);
        assert!(are_all_late && late_attempts < STALLS_MAX, "{status:#?}");
        late_attempts += 1;
        selection = FlowSelection::Flows(kept.into_iter().map(|(flow, _)| flow).collect());
    }
}

/// Returns the owner of each datagram flow according to the holder.
fn flow_owners(cluster: &Cluster) -> Vec<(FlowText, Option<String>)> {
    let query = FlowListQuery {
        protocol: Some(Protocol::Udp),
        limit: Some(100_000),
        ..FlowListQuery::default()
    };
    let control = cluster.blocking_control_client("n1").unwrap();
    let list = control
        .run(async |client| client.flows(&query).await)
        .unwrap();
    let entries = list.flows.into_iter().map(|entry| match entry.state {
        FlowState::Owned { owner } => (entry.flow, Some(owner)),
        FlowState::Transit { .. } => (entry.flow, None),
    });
    entries.collect()
}

fn owner_of(cluster: &Cluster, flow: FlowText) -> Option<String> {
    let mut flows = flow_owners(cluster).into_iter();
    flows.find(|(other, _)| *other == flow)?.1
}

/// Returns the nodes that own flows of the load.
fn load_owners(cluster: &Cluster, load: &DatagramLoad) -> BTreeSet<String> {
    let flows = flow_owners(cluster).into_iter();
    let load_flows = flows.filter(|(flow, _)| load.flows.contains(flow));
    load_flows.filter_map(|(_, owner)| owner).collect()
}

/// Returns true if each owner knows the server program of each of its flows of the load.
fn owners_know_programs(cluster: &Cluster, load: &DatagramLoad) -> bool {
    flow_owners(cluster).into_iter().all(|(flow, owner)| {
        let Some(owner) = owner.filter(|_| load.flows.contains(&flow)) else {
            return true;
        };
        let control = cluster.blocking_control_client(&owner).unwrap();
        let detail = control.run(async |client| client.flow(&flow).await);
        detail.is_ok_and(|detail| detail.entry.program.is_some())
    })
}

/// Returns the number of flows of the load that have an owner.
fn owned_count(cluster: &Cluster, load: &DatagramLoad) -> usize {
    let flows = flow_owners(cluster).into_iter();
    flows
        .filter(|(flow, owner)| load.flows.contains(flow) && owner.is_some())
        .count()
}

/// Returns the number of flows of the load that a node owns.
fn owned_by_count(cluster: &Cluster, load: &DatagramLoad, node: &str) -> usize {
    let flows = flow_owners(cluster).into_iter();
    let load_flows = flows.filter(|(flow, _)| load.flows.contains(flow));
    load_flows
        .filter(|(_, owner)| owner.as_deref() == Some(node))
        .count()
}
