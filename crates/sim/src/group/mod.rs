//! What [`handoff`](crate::handoff) and [`migration`](crate::migration) have in common: nodes whose daemons die and come back,
//! channels between them that break, one node that keeps the records, and faults by chance.
//!
//! A [`Setting`] says what may happen. A seed makes a [`Config`] of it, in which all is decided but the delays; that and the
//! seed again make a run, with one outcome. What a run violates is found by oracles after every event and in the end, and what a
//! failing run fails without is left out of its plan ([`Failure`]).

mod channels;
mod config;
mod core;
mod machine;
mod plan;
mod run;
mod setting;
mod world;

pub use config::{Action, Config};
pub use run::{Failure, Outcome};
pub use setting::{Faults, Setting, Span};

pub(crate) use self::core::Core;
pub(crate) use channels::pairs;
pub(crate) use plan::{WithRequest, schedule};
pub(crate) use run::{shrink, try_run};
pub(crate) use world::World;

use holdfast_wire::{Change, ChangeKind, Flow, NodeId, Protocol, Record, RecordState};
use std::net::{Ipv4Addr, SocketAddr};

/// The node with this place among all.
pub(crate) fn id(index: usize) -> NodeId {
    NodeId(index as u16 + 1)
}

/// The place of a node among all.
pub(crate) fn index(id: NodeId) -> usize {
    usize::from(id.0) - 1
}

pub(crate) fn change(flow: Flow, kind: ChangeKind, epoch: u32) -> Change {
    Change { flow, kind, epoch }
}

/// A client's connection with the service, one for each number.
pub(crate) fn client(number: u64) -> Flow {
    let at = |last, port| SocketAddr::from((Ipv4Addr::new(10, 0, last, 1), port));
    // So many ports, then the next address.
    let (host, port) = (number / 60_000, number % 60_000);
    Flow {
        protocol: Protocol::Tcp,
        local: at(0, 80),
        remote: at(1 + host as u8, 4_000 + port as u16),
    }
}

/// Who may speak, as the record says: the owner, or the donor of a flow in transit (until it freezes).
pub(crate) fn speaker(record: &Record) -> NodeId {
    match record.state {
        RecordState::Owned { owner } => owner,
        RecordState::Transit { donor, .. } => donor,
    }
}
