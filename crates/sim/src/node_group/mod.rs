//! The common part of [`handoff`](crate::handoff) and [`migration`](crate::migration): nodes with daemons that die and
//! restart, channels that break, one node that holds the records, and random faults.
//!
//! A [`PlanDistribution`] describes the possible actions and faults. A seed derives from it a [`GroupRunConfig`], which fixes everything
//! but the delays; a config and the seed determine a run with one outcome. Oracles check a run after every event and at
//! its end; from a failing run's plan all steps are removed that the failure does not need ([`ShrunkSeedFailure`]).

mod channels;
mod config;
mod group_core;
mod plan;
mod plan_distribution;
mod protocol_machine;
mod run;
mod table_rebuilds;
mod world;

pub use config::{GroupAction, GroupRunConfig};
pub use plan_distribution::{CountRange, FaultFrequencies, PlanDistribution};
pub use run::{GroupRunOutcome, ShrunkSeedFailure};

pub(crate) use self::group_core::GroupCore;
pub(crate) use channels::pairs;
pub(crate) use plan::{AccompanyingAction, draw_run_config};
pub(crate) use run::{shrink, try_run};
pub(crate) use table_rebuilds::{DEFERRED_RETRY, RebuildingWorld, TableRebuilds};
pub(crate) use world::GroupWorld;

use holdfast_wire::{
    ChangeKind, Flow, NodeId, OwnershipChange, OwnershipRecord, Protocol, RecordState,
};
use std::net::{Ipv4Addr, SocketAddr};

/// Returns the node ID of the node with this index.
pub(crate) fn node_id(index: usize) -> NodeId {
    NodeId(index as u16 + 1)
}

/// Returns the index of a node.
pub(crate) fn node_index(id: NodeId) -> usize {
    usize::from(id.0) - 1
}

pub(crate) fn change(flow: Flow, kind: ChangeKind, epoch: u32) -> OwnershipChange {
    OwnershipChange { flow, kind, epoch }
}

/// Returns a client's connection to the service, a different one for each number.
pub(crate) fn client_flow(number: u64) -> Flow {
    let address = |last, port| SocketAddr::from((Ipv4Addr::new(10, 0, last, 1), port));
    // Use 60,000 ports, then the next address.
    let (host, port) = (number / 60_000, number % 60_000);
    Flow {
        protocol: Protocol::Tcp,
        local: address(0, 80),
        remote: address(1 + host as u8, 4_000 + port as u16),
    }
}

/// Returns the node that may send according to the record: the owner, or the donor of a flow in transit (until it
/// freezes).
pub(crate) fn sender(record: &OwnershipRecord) -> NodeId {
    match record.state {
        RecordState::Owned { owner } => owner,
        RecordState::Transit { donor, .. } => donor,
    }
}
