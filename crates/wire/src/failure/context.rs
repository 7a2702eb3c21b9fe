//! Surroundings of a cause: the node, step, flow or process that a failure concerns.

use crate::{Flow, NodeId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A surrounding of a cause, printed before the cause. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Context {
    /// A node refused to take flows or a process.
    #[error("node {0} refused")]
    RefusedBy(NodeId),
    /// The node at the other end of a moving process's connection refused.
    #[error("node {0}, to which the process has connections, refused")]
    RefusedByConnectedNode(NodeId),
    /// A node aborted a handoff.
    #[error("node {0} aborted the handoff")]
    HandoffAbortedBy(NodeId),
    /// A node aborted a move.
    #[error("node {0} aborted the move")]
    MoveAbortedBy(NodeId),
    /// The donor aborted a handoff or a move.
    #[error("the donor aborted")]
    DonorAborted,
    /// A flow uses something that cannot move.
    #[error("the flow cannot move")]
    FlowCannotMove,
    /// A process uses something that cannot move.
    #[error("the process cannot move")]
    ProcessCannotMove,
    /// The state of a flow could not be read while the flow was frozen.
    #[error("the state of the flow could not be extracted")]
    FlowNotExtracted,
    /// The state of a flow could not be restored at the acceptor.
    #[error("the flow's state could not be restored")]
    FlowNotRestored,
    /// A process could not be restored at the acceptor.
    #[error("the process could not be restored")]
    ProcessNotRestored,
    /// A step of a migration failed at the donor.
    #[error("{0} failed")]
    StepFailed(MigrationStep),
    /// The cause concerns this flow.
    #[error("{0}")]
    Flow(Flow),
    /// The cause concerns the process with this PID.
    #[error("process {0}")]
    Process(i32),
    /// The cause concerns the socket with this number in the process image.
    #[error("socket {0}")]
    Socket(u32),
    /// The donor cannot read remaining pages of a process that has moved.
    #[error("cannot read the original process any more")]
    OriginalUnreadable,
    /// The acceptor lacks support for post-copy.
    #[error("the acceptor does not support post-copy")]
    PostCopyUnsupported,
    /// The kernel's keyrings could not be read.
    #[error("cannot check whether the process has keys (keyctl)")]
    KeysUnknown,
    /// The kernel's Landlock domains could not be read.
    #[error("cannot check whether the process is in a Landlock domain")]
    LandlockUnknown,
}

/// Step of a handoff or of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Step {
    /// Step of a handoff.
    Handoff(HandoffStep),
    /// Step of a migration.
    Migration(MigrationStep),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Handoff(step) => step.fmt(f),
            Step::Migration(step) => step.fmt(f),
        }
    }
}

/// Steps of a handoff, as the donor sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum HandoffStep {
    /// Read the static state, make sockets at the acceptor.
    Prepare,
    /// Wait until the send queue is empty.
    Drain,
    /// Mark the flow as in transit at the holder.
    Divert,
    /// Freeze the flow and extract its state.
    Extract,
    /// Send, restore and commit the state, until the acceptor reports `Done`.
    Transfer,
}

impl fmt::Display for HandoffStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            HandoffStep::Prepare => "prepare",
            HandoffStep::Drain => "drain",
            HandoffStep::Divert => "divert",
            HandoffStep::Extract => "extract",
            HandoffStep::Transfer => "transfer",
        })
    }
}

/// Steps of a migration, as the donor sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MigrationStep {
    /// Read which resources the process uses.
    Check,
    /// Ask if the acceptor can take the process.
    Offer,
    /// Copy the process while it runs.
    Copy,
    /// Prepare acceptor and peers for the freeze.
    Arm,
    /// Mark the process and its flows as in transit at the holder.
    Divert,
    /// Stop the process and send the rest.
    Freeze,
    /// Restore and commit the process, until the acceptor reports `Done`.
    Transfer,
}

impl fmt::Display for MigrationStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MigrationStep::Check => "check",
            MigrationStep::Offer => "offer",
            MigrationStep::Copy => "copy",
            MigrationStep::Arm => "arm",
            MigrationStep::Divert => "divert",
            MigrationStep::Freeze => "freeze",
            MigrationStep::Transfer => "transfer",
        })
    }
}
