//! States of a daemon that prevent a handoff or a move.

use super::Text;
use crate::Flow;
use serde::{Deserialize, Serialize};

/// A failure for which the daemon that finds it is usually to blame.
///
/// The order of the variants is part of the format: append new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NodeFault {
    /// State of this node could not be encoded.
    #[error("{0}")]
    NotEncoded(Text),
    /// All counters of held packets are in use.
    #[error("too many connections are in transit here; try again")]
    TooManyConnectionsInTransit,
    /// All flow groups are in use.
    #[error("too many processes are moving here; try again")]
    TooManyProcessesMoving,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    DaemonStopping,
    /// The thread of a move has ended.
    #[error("the move's thread has ended")]
    ThreadEnded,
    /// The donor could freeze no flow of a batch.
    #[error("no flow could be frozen")]
    NoFlowFrozen,
    /// The acceptor has no such batch.
    #[error("the batch is unknown or was aborted")]
    UnknownBatch,
    /// The acceptor has no such move.
    #[error("the move is unknown or was aborted")]
    UnknownMove,
    /// The daemon restarted during a handoff.
    #[error("the daemon restarted during the handoff")]
    RestartedInHandoff,
    /// The daemon restarted during a move.
    #[error("the daemon restarted during the move")]
    RestartedInMove,
    /// The acceptor's daemon restarted while the commit of a flow was open.
    #[error("the daemon restarted before the flow was committed")]
    RestartedBeforeFlowCommit,
    /// The acceptor's daemon restarted while the commit of a move was open.
    #[error("the daemon restarted before the move was committed")]
    RestartedBeforeMoveCommit,
    /// The acceptor's daemon restarted while the process was being received.
    #[error("the daemon restarted before it had received the whole process")]
    RestartedBeforeWholeProcess,
    /// The flow takes part in another handoff on the acceptor.
    #[error("the flow takes part in another handoff on the acceptor")]
    FlowInOtherHandoff,
    /// The flow takes part in another move on the acceptor.
    #[error("{0} takes part in another move on the acceptor")]
    FlowInOtherMove(Flow),
    /// The other end of a connection is moving away from the node that should prepare for a move.
    #[error("the other end of a connection is also moving")]
    BothEndsMoving,
    /// The acceptor is receiving as many processes as it may.
    #[error("the acceptor is receiving another process; try again when that has ended")]
    ReceivingOtherProcess,
    /// The acceptor already owns the flow that it should take.
    #[error("the acceptor already owns the flow")]
    AcceptorOwnsFlow,
    /// The flow is not arriving at this node.
    #[error("the flow is not arriving here")]
    FlowNotArriving,
    /// The flow has no prepared socket.
    #[error("the flow was never prepared")]
    FlowNotPrepared,
    /// The flow has no restored socket.
    #[error("the flow was never restored")]
    FlowNotRestored,
    /// The flow has a restored socket already.
    #[error("the flow was already restored")]
    FlowAlreadyRestored,
    /// The socket options of the flow are missing.
    #[error("the flow's socket options are missing")]
    SocketOptionsMissing,
    /// The TCP state of the flow is missing.
    #[error("the flow's TCP state is missing")]
    TcpStateMissing,
    /// The donor has never read the state of the flow.
    #[error("the flow's state was never read")]
    FlowStateNeverRead,
    /// The process is stopped already.
    #[error("the process is already stopped")]
    ProcessAlreadyStopped,
    /// The process was never stopped.
    #[error("the process was not stopped")]
    ProcessNotStopped,
    /// No pre-copy round of the process was completed.
    #[error("no pre-copy round was completed")]
    NoRoundCompleted,
    /// The record of a move does not name the restorer.
    #[error("the move's record does not name a restorer")]
    RestorerNotRecorded,
    /// The donor no longer has the original process.
    #[error("the original process is gone: the donor's host restarted, or gave up the process")]
    OriginalGone,
}
