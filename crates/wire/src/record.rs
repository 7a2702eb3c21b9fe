//! What the holder of the steering table keeps about a flow, and how it is asked to change it.

use crate::{Flow, NodeId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Counts the changes of a flow's ownership; a change names the epoch it starts from, so a stale one changes nothing.
pub type Epoch = u32;

/// Who may speak for a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RecordState {
    /// One node owns the flow.
    Owned {
        /// That node.
        owner: NodeId,
    },
    /// The flow is moving and has no owner. The donor may send until it freezes; nobody may after that.
    Transit {
        /// The node that gives the flow.
        donor: NodeId,
        /// The node that takes it.
        acceptor: NodeId,
    },
}

/// The holder's record of one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Record {
    /// The epoch of the last change.
    pub epoch: Epoch,
    /// Who may speak.
    pub state: RecordState,
}

impl Record {
    /// A record of a flow that `owner` owns.
    pub fn owned(owner: NodeId, epoch: Epoch) -> Record {
        Record {
            epoch,
            state: RecordState::Owned { owner },
        }
    }

    /// A record of a flow that moves from `donor` to `acceptor`.
    pub fn transit(donor: NodeId, acceptor: NodeId, epoch: Epoch) -> Record {
        Record {
            epoch,
            state: RecordState::Transit { donor, acceptor },
        }
    }

    /// Whether `node` owns the flow.
    pub fn is_owned_by(&self, node: NodeId) -> bool {
        self.state == RecordState::Owned { owner: node }
    }
}

impl fmt::Display for Record {
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

/// What is asked of the holder. The rules are in `holdfast_proto::ownership`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ChangeKind {
    /// The asker has a new connection. `epoch` is the least it wants; the holder may give a higher one.
    Establish,
    /// The asker, who owns the flow at `epoch`, starts to give it away.
    Divert {
        /// To whom.
        acceptor: NodeId,
    },
    /// The asker, to whom the flow moves at the transit's `epoch`, has everything and takes it.
    Commit,
    /// The asker, donor or acceptor of the transit at `epoch`, wants it undone.
    Rollback,
    /// The asker, who owns the flow at `epoch`, has closed it.
    Remove,
    /// [`Commit`](Self::Commit) of a process's record and of all flows that were diverted with one question behind it: of all, or none.
    /// A holder that does not know them, or does not know so many, refuses, and is asked for each.
    CommitAll {
        /// How many they are.
        flows: u32,
    },
}

/// One compare-and-set asked of the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Change {
    /// The flow.
    pub flow: Flow,
    /// What to do.
    pub kind: ChangeKind,
    /// The epoch the record must have (see [`ChangeKind`] for what it means to each kind).
    pub epoch: Epoch,
}

/// The holder refused a change; this is what it has instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[error("refused: the holder has the flow {}", describe(.current))]
pub struct Refusal {
    /// The record as it stands, none when the holder does not know the flow.
    pub current: Option<Record>,
}

fn describe(record: &Option<Record>) -> String {
    match record {
        Some(record) => record.to_string(),
        None => "not in its table".to_owned(),
    }
}
