//! Silence and decisions of other nodes.

use super::Step;
use crate::{ChangeRefusal, NodeId};
use serde::{Deserialize, Serialize};

/// A failure for which another node, or the path to it, is usually to blame.
///
/// The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum PeerFault {
    /// A node did not answer in time.
    #[error("node {node} did not answer in time ({step}); check that its holdfastd runs")]
    NoAnswer {
        /// The silent node.
        node: NodeId,
        /// Step of the handoff or migration.
        step: Step,
    },
    /// The channel to a node was lost.
    #[error("the channel to node {node} was lost ({step})")]
    ChannelLost {
        /// The node at the other end of the lost channel.
        node: NodeId,
        /// Step of the handoff or migration.
        step: Step,
    },
    /// The channel to the donor was lost.
    #[error("the channel to the donor was lost")]
    DonorChannelLost,
    /// The channel to the acceptor was lost.
    #[error("the channel to the acceptor was lost")]
    AcceptorChannelLost,
    /// The holder's record of a flow contradicts the donor's request.
    #[error("the holder refused to divert the flow: {0}")]
    FlowNotDiverted(ChangeRefusal),
    /// The holder's record of a process contradicts the donor's request.
    #[error("the holder refused to divert the process: {0}")]
    ProcessNotDiverted(ChangeRefusal),
    /// The holder restarted without the record of a move.
    #[error("the holder lost its record of the move")]
    HolderLostRecord,
    /// The holder diverted no flow of a batch.
    #[error("no flow was diverted")]
    NoFlowDiverted,
    /// The holder did not commit a flow.
    #[error("the holder did not commit the flow")]
    FlowNotCommitted,
    /// The holder did not commit a move.
    #[error("the holder did not commit the move")]
    MoveNotCommitted,
    /// The donor's last frame of a batch leaves out the state of a flow.
    #[error("the flow's state did not arrive")]
    FlowStateMissing,
    /// The state of a batch did not arrive before the deadline.
    #[error("the flow's state did not arrive in time")]
    FlowStateLate,
    /// A process did not arrive before the deadline.
    #[error("the process did not arrive in time")]
    ProcessLate,
    /// A handoff was aborted.
    #[error("the handoff was aborted")]
    HandoffAborted,
    /// A move was aborted.
    #[error("the move was aborted")]
    MoveAborted,
    /// A handoff was given up before its sockets were ready.
    #[error("the handoff was given up meanwhile")]
    HandoffGivenUp,
    /// A move was given up.
    #[error("the move was given up")]
    MoveGivenUp,
    /// The donor did not share its locks in time.
    #[error("the donor did not share its locks in time")]
    LocksNotShared,
    /// The donor has been silent for too long.
    #[error("received nothing from the donor for {limit_s} s")]
    DonorSilent {
        /// The time limit, in seconds.
        limit_s: u32,
    },
    /// The acceptor has been silent for too long.
    #[error("node {0} does not answer any more")]
    AcceptorSilent(NodeId),
}
