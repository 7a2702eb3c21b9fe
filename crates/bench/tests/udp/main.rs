//! Datagram associations move between servers while their clients continue. Needs root.
//!
//! Every datagram has a number that its answer repeats, so that lost and duplicated datagrams are counted.

#[path = "../common/mod.rs"]
mod common;
mod numbered;
mod odd;

use std::collections::BTreeSet;

use holdfast_api::app::{FromDaemon, Piece, ToDaemon};
use holdfast_api::control::{
    FlowFilter, FlowOutcome, FlowQuery, FlowResult, FlowState, HandoffRequest, HandoffState,
    HandoffStatus, Selection,
};
use holdfast_api::{Drain, FlowText, Protocol};
use holdfast_bench::cluster::{Cluster, ClusterSpec, Family, LATE_MAX, Program, Service, was_late};
use holdfast_lab::Reach;

use common::{PORT, alone, eventually, says};
use numbered::Datagrams;
use odd::{Odd, hear, say, socket_in};

/// Number of clients.
const ASSOCIATIONS: usize = 24;
/// Port of a service that only tests serve.
const ODD_PORT: u16 = 8007;

#[test]
fn associations_move_over_ipv4() {
    associations_move("udp4", Reach::Steer, Family::V4);
}

#[test]
fn associations_move_over_ipv6() {
    associations_move("udp6", Reach::Steer, Family::V6);
}

#[test]
fn associations_move_with_broadcast() {
    associations_move("udpb", Reach::Broadcast, Family::V4);
}

/// Associations are placed on several nodes and moved one by one and many at once: no datagram is lost. With steering
/// none is duplicated. With broadcast, acceptor and donor both receive datagrams that arrive during the prepare step.
fn associations_move(name: &str, reach: Reach, family: Family) {
    let Some(_alone) = alone() else { return };
    let cluster = group(name, reach, &[]);
    let load = Datagrams::start(&cluster, family, ASSOCIATIONS);
    load.all_answered_again();
    eventually("all are known", || {
        all_owned(&cluster, &load) == ASSOCIATIONS && all_have_programs(&cluster, &load)
    });
    let owners = owners(&cluster, &load);
    assert!(owners.len() > 1, "all are placed on {owners:?}");

    for client in 0..6 {
        let flow = load.flow(client);
        let from = owner(&cluster, flow).unwrap();
        let to = if from == "n2" { "n3" } else { "n2" };
        let moved = all_move(&cluster, &from, Selection::Flows(vec![flow]), to);
        assert_eq!(moved, 1);
        assert_eq!(owner(&cluster, flow).as_deref(), Some(to));
        load.all_answered_again();
    }
    for to in ["n2", "n3", "n1", "n2"] {
        for from in ["n1", "n2", "n3"].into_iter().filter(|from| *from != to) {
            if owners_now(&cluster, &load, from) == 0 {
                continue;
            }
            let all = Selection::AllOf(FlowFilter {
                protocol: Some(Protocol::Udp),
                ..FlowFilter::default()
            });
            all_move(&cluster, from, all, to);
        }
        assert_eq!(owners_now(&cluster, &load, to), ASSOCIATIONS);
        load.all_answered_again();
    }
    let counts = load.end(name);
    assert_eq!(counts.lost, [], "{counts:?}");
    if reach == Reach::Steer {
        assert_eq!(counts.doubled, 0, "{counts:?}");
    }
}

/// Datagrams that the donor's program has not read move too, and are read at the acceptor before later ones.
#[test]
fn queued_datagrams_move() {
    let Some(_alone) = alone() else { return };
    let cluster = group("udpq", Reach::Steer, &["n2"]);
    let load = Datagrams::start(&cluster, Family::V4, 4);
    load.all_answered_again();
    let odd = Odd::new(&cluster);
    let at_acceptor = socket_in(&cluster, "n3", odd.service);
    for number in 0..5u8 {
        odd.client.send(&[number]).unwrap();
    }
    let id = odd.give();
    let unread = (0..5).map(|_| {
        let mut byte = [0];
        odd.server.recv_from(&mut byte).unwrap();
        Piece {
            bytes: byte.to_vec(),
            more: false,
        }
    });
    let collected = ToDaemon::Collected {
        flow: odd.flow,
        unread: unread.collect(),
        last: true,
    };
    say(&odd.giver, &collected);
    let gone = hear(&odd.giver);
    assert!(matches!(gone, FromDaemon::Gone { .. }), "{gone:?}");
    let go = hear(&odd.taker);
    assert!(
        matches!(&go, FromDaemon::Go { ids } if *ids == [id]),
        "{go:?}"
    );
    assert_eq!(owner(&cluster, odd.flow).as_deref(), Some("n3"));
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
    let counts = load.end("udpq");
    assert_eq!((counts.lost.len(), counts.doubled), (0, 0), "{counts:?}");
}

/// A program that never reports its unread datagrams keeps its association, and delays no other handoff.
#[test]
fn a_program_that_hangs_when_frozen() {
    let Some(_alone) = alone() else { return };
    let cluster = group("udph", Reach::Steer, &["n2"]);
    let load = Datagrams::start(&cluster, Family::V4, 4);
    load.all_answered_again();
    let odd = Odd::new(&cluster);
    odd.give();
    // The program does not answer the freeze.
    match hear(&odd.giver) {
        FromDaemon::Kept { reason, .. } => says(reason, &["did not say what it had not read"]),
        other => panic!("{other:?}"),
    }
    assert!(matches!(hear(&odd.taker), FromDaemon::Cancel { .. }));
    assert_eq!(owner(&cluster, odd.flow).as_deref(), Some("n2"));
    let all = Selection::Flows((0..4).map(|client| load.flow(client)).collect());
    assert_eq!(all_move(&cluster, "n2", all, "n3"), 4);
    let counts = load.end("udph");
    assert_eq!((counts.lost.len(), counts.doubled), (0, 0), "{counts:?}");
}

/// Brings up three nodes with echo servers. New flows are placed on the named nodes, or on all nodes if none is named.
fn group(name: &str, reach: Reach, places: &[&str]) -> Cluster {
    let name = format!("{name}-{}", std::process::id());
    let mut spec = ClusterSpec::new(name).program(Program::Echo { port: PORT });
    spec.reach = reach;
    let odd = Service::new("odd", Protocol::Udp, ODD_PORT);
    spec.services.push(odd);
    for service in spec.services.iter_mut().filter(|_| !places.is_empty()) {
        let weight = |node: &str| (node.to_owned(), u32::from(places.contains(&node)));
        service.weights = ["n1", "n2", "n3"].map(weight).into();
    }
    Cluster::up(spec).unwrap()
}

fn begin(cluster: &Cluster, from: &str, selection: Selection, to: &str) -> u64 {
    let request = HandoffRequest {
        selection,
        to: to.to_owned(),
        drain: Drain::None,
    };
    let control = cluster.control_blocking(from).unwrap();
    let accepted = control.run(async |client| client.hand_off(&request).await);
    accepted.unwrap().id
}

fn ended(cluster: &Cluster, from: &str, id: u64) -> HandoffStatus {
    let control = cluster.control_blocking(from).unwrap();
    let status = || {
        control
            .run(async |client| client.handoff(id).await)
            .unwrap()
    };
    eventually("the handoff ends", || {
        status().summary.state == HandoffState::Finished
    });
    // The daemon reports the freeze times of the last batch just after its outcomes.
    eventually("the times are told", || {
        let moved =
            |result: &holdfast_api::control::FlowResult| result.outcome == FlowOutcome::Moved;
        let mut results = status().results.into_iter().filter(moved);
        results.all(|result| result.freeze_us.is_some())
    });
    status()
}

/// Hands off the selected flows, asserts that all of them move, and returns their number.
fn all_move(cluster: &Cluster, from: &str, mut selection: Selection, to: &str) -> u64 {
    let (mut late, mut moved) = (0, 0);
    loop {
        let status = ended(cluster, from, begin(cluster, from, selection, to));
        let kept = |result: &FlowResult| match &result.outcome {
            FlowOutcome::Kept { reason } => Some((result.flow, was_late(reason))),
            _ => None,
        };
        let kept: Vec<_> = status.results.iter().filter_map(kept).collect();
        moved += status.summary.moved;
        if kept.is_empty() {
            return moved;
        }
        let all_late = kept.iter().all(|(_, late)| *late);
        assert!(all_late && late < LATE_MAX, "{status:#?}");
        late += 1;
        selection = Selection::Flows(kept.into_iter().map(|(flow, _)| flow).collect());
    }
}

/// Returns the owner of each datagram flow according to the holder.
fn flows(cluster: &Cluster) -> Vec<(FlowText, Option<String>)> {
    let query = FlowQuery {
        protocol: Some(Protocol::Udp),
        limit: Some(100_000),
        ..FlowQuery::default()
    };
    let control = cluster.control_blocking("n1").unwrap();
    let list = control
        .run(async |client| client.flows(&query).await)
        .unwrap();
    let entries = list.flows.into_iter().map(|entry| match entry.state {
        FlowState::Owned { owner } => (entry.flow, Some(owner)),
        FlowState::Transit { .. } => (entry.flow, None),
    });
    entries.collect()
}

fn owner(cluster: &Cluster, flow: FlowText) -> Option<String> {
    let mut flows = flows(cluster).into_iter();
    flows.find(|(other, _)| *other == flow)?.1
}

/// Returns the nodes that own flows of the load.
fn owners(cluster: &Cluster, load: &Datagrams) -> BTreeSet<String> {
    let flows = flows(cluster).into_iter();
    let ours = flows.filter(|(flow, _)| load.flows.contains(flow));
    ours.filter_map(|(_, owner)| owner).collect()
}

/// Returns true if each owner knows the server program of each of its flows of the load.
fn all_have_programs(cluster: &Cluster, load: &Datagrams) -> bool {
    flows(cluster).into_iter().all(|(flow, owner)| {
        let Some(owner) = owner.filter(|_| load.flows.contains(&flow)) else {
            return true;
        };
        let control = cluster.control_blocking(&owner).unwrap();
        let detail = control.run(async |client| client.flow(&flow).await);
        detail.is_ok_and(|detail| detail.entry.program.is_some())
    })
}

/// Returns the number of flows of the load that have an owner.
fn all_owned(cluster: &Cluster, load: &Datagrams) -> usize {
    let flows = flows(cluster).into_iter();
    flows
        .filter(|(flow, owner)| load.flows.contains(flow) && owner.is_some())
        .count()
}

/// Returns the number of flows of the load that a node owns.
fn owners_now(cluster: &Cluster, load: &Datagrams, node: &str) -> usize {
    let flows = flows(cluster).into_iter();
    let ours = flows.filter(|(flow, _)| load.flows.contains(flow));
    ours.filter(|(_, owner)| owner.as_deref() == Some(node))
        .count()
}
