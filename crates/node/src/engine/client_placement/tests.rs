//! Tests of the weights of nodes.

use super::*;
use crate::config::{CheckConfig, PlacementRule};
use holdfast_wire::Protocol;
use holdfast_wire::group_data::ServicePolicy;

fn weights(entries: &[(u16, u32)]) -> NodeWeights {
    let entries = entries.iter();
    entries
        .map(|(node, weight)| (NodeId(*node), *weight))
        .collect()
}

fn service(entries: &[(u16, u32)]) -> ServiceConfig {
    ServiceConfig {
        pool: "web".to_owned(),
        address: ([10, 0, 0, 1], 80).into(),
        protocol: Protocol::Tcp,
        placement: PlacementRule::Hash,
        weights: weights(entries),
        check: CheckConfig::default(),
        drain: None,
        policy: ServicePolicy::default(),
        row: 0,
        is_ending: false,
        replication: None,
    }
}

/// Returns the nodes with a share.
fn placed(placement: &ClientPlacement) -> Vec<u16> {
    let shares = placement.shares(0).filter(|(_, share)| *share > 0);
    shares.map(|(node, _)| node.0).collect()
}

#[test]
fn membership_changes_keep_clients_at_the_nodes_that_serve() {
    let now = Duration::ZERO;
    let first = service(&[(1, 1), (2, 1), (3, 1)]);
    let mut placement = ClientPlacement::new(std::slice::from_ref(&first), true);
    assert_eq!(placed(&placement), [1, 2, 3]);
    placement.set_well_weights(now, &first.endpoint(), &weights(&[(1, 1)]));
    assert_eq!(placed(&placement), [1]);
    // Node 2 leaves, and comes back with another number.
    placement.set_service(now, &service(&[(1, 1), (3, 1)]));
    assert_eq!(placed(&placement), [1]);
    placement.set_service(now, &service(&[(1, 1), (3, 1), (4, 1)]));
    assert_eq!(placed(&placement), [1]);
    placement.set_well_weights(now, &first.endpoint(), &weights(&[(1, 1), (4, 1)]));
    assert_eq!(placed(&placement), [1, 4]);
    // The only nodes that served have left: any node may serve.
    placement.set_service(now, &service(&[(3, 1), (5, 1)]));
    assert_eq!(placed(&placement), [3, 5]);
}

#[test]
fn new_service_and_placement_without_health_use_all_nodes() {
    let now = Duration::ZERO;
    let first = service(&[(1, 1)]);
    let mut placement = ClientPlacement::new(&[], true);
    placement.set_service(now, &service(&[(1, 1), (2, 1)]));
    assert_eq!(placed(&placement), [1, 2]);
    let mut placement = ClientPlacement::new(&[first], false);
    placement.set_service(now, &service(&[(1, 1), (2, 1)]));
    assert_eq!(placed(&placement), [1, 2]);
}
