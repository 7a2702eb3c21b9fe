//! The steering table's record of a flow, and the changes that its holder accepts.

use crate::{Flow, NodeId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Counter of a flow's ownership changes; a change names its starting epoch, so a stale one has no effect.
pub type Epoch = u32;

/// The node or nodes that may send for a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RecordState {
    /// One node owns the flow.
    Owned {
        /// The node that owns the flow.
        owner: NodeId,
    },
    /// The flow is moving and has no owner. The donor may send until it freezes; after that no node may.
    Transit {
        /// The node that gives the flow.
        donor: NodeId,
        /// The node that takes the flow.
        acceptor: NodeId,
    },
}

/// The holder's record of one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnershipRecord {
    /// The epoch of the last change.
    pub epoch: Epoch,
    /// The owner, or the transit.
    pub state: RecordState,
}

impl OwnershipRecord {
    /// Returns a record of a flow that `owner` owns.
    pub fn owned(owner: NodeId, epoch: Epoch) -> OwnershipRecord {
        OwnershipRecord {
            epoch,
            state: RecordState::Owned { owner },
        }
    }

    /// Returns a record of a flow that moves from `donor` to `acceptor`.
    pub fn transit(donor: NodeId, acceptor: NodeId, epoch: Epoch) -> OwnershipRecord {
        OwnershipRecord {
            epoch,
            state: RecordState::Transit { donor, acceptor },
        }
    }

    /// Returns true if `node` owns the flow.
    pub fn is_owned_by(&self, node: NodeId) -> bool {
        self.state == RecordState::Owned { owner: node }
    }
}

impl fmt::Display for OwnershipRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.state {
            RecordState::Owned { owner } => write!(f, "owned by node {owner}")?,
            RecordState::Transit { donor, acceptor } => {
                write!(f, "in transit from node {donor} to node {acceptor}")?;
            }
        }
        write!(f, " at epoch {}", self.epoch)
    }
}

/// Kind of change that a node requests from the holder. The rules are in `holdfast_proto::flow_ownership`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ChangeKind {
    /// The requester has a new connection. `epoch` is the lowest acceptable one; the holder may give a higher one.
    Establish,
    /// The requester, owner of the flow at `epoch`, starts to give it away.
    Divert {
        /// The node that takes the flow.
        acceptor: NodeId,
    },
    /// The requester, acceptor of the transit at `epoch`, has the complete state and takes the flow.
    Commit,
    /// The requester, donor or acceptor of the transit at `epoch`, wants to undo it.
    Rollback,
    /// The requester, owner of the flow at `epoch`, has closed it.
    Remove,
    /// [`Commit`](Self::Commit) of a process's record and of all flows that were diverted in one request with it: of
    /// all, or none. A holder that does not know the flows, or knows a different number, refuses; the requester then
    /// commits each.
    CommitAll {
        /// The number of flows.
        flows: u32,
    },
}

/// One compare-and-set request to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OwnershipChange {
    /// The flow whose record is to change.
    pub flow: Flow,
    /// Kind of the requested change.
    pub kind: ChangeKind,
    /// The epoch that the record must have (see [`ChangeKind`] for its meaning in each kind).
    pub epoch: Epoch,
}

/// A refused change, with the record that the holder has instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[error("the holder's record differs: {}", describe_record(.current))]
pub struct ChangeRefusal {
    /// The current record; none when the holder does not know the flow.
    pub current: Option<OwnershipRecord>,
}

fn describe_record(record: &Option<OwnershipRecord>) -> String {
    match record {
        Some(record) => record.to_string(),
        None => "the flow is not in its table".to_owned(),
    }
}
