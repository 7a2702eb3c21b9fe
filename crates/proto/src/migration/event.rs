//! Events of a migration machine: for logs, for metrics, and for the requester.

use crate::machine_output::IgnoredInput;
use core::time::Duration;
use holdfast_wire::failure::{
    Cause, Context, Failure, MigrationStep, NodeFault, OperatorFault, PeerFault, ProgramFault, Step,
};
use holdfast_wire::move_frames::StepTime;
use holdfast_wire::{ChangeRefusal, Epoch, Flow, MoveId, NodeId, OwnershipChange, OwnershipRecord};
use std::fmt;

/// Outcome of a move for its process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MoveOutcome {
    /// The process runs at the acceptor only.
    Moved,
    /// A clone runs at the acceptor, and the original on this node.
    Cloned,
    /// The process stays on this node and continues.
    Kept {
        /// Reason for staying.
        reason: ProcessKeptReason,
    },
}

/// Reason for a process to stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessKeptReason {
    /// The process uses something that cannot move.
    Blocked(Vec<Failure>),
    /// One of its flows takes part in another move.
    FlowMoving(Flow),
    /// The other end of one of its connections is moving.
    PeerMoving(Flow),
    /// The process has more flows than a request to the holder can name.
    TooManyFlows(usize),
    /// The acceptor refused the process.
    Refused {
        /// Acceptor that refused the process.
        by: NodeId,
        /// The acceptor's failures, as seen from this node.
        whys: Vec<Failure>,
    },
    /// The peer of one of its connections refused.
    PeerRefused {
        /// Node at the other end of the connection.
        by: NodeId,
        /// The peer's failure, as seen from this node.
        why: Failure,
    },
    /// The predicted freeze exceeds the limit.
    FreezeTooLong {
        /// The least freeze predicted.
        predicted: Duration,
        /// Longest freeze that the request allows.
        max: Duration,
    },
    /// A command failed on this node.
    Failed {
        /// Step of the move.
        step: MigrationStep,
        /// Failure of the command.
        why: Failure,
    },
    /// A node did not answer in time.
    TimedOut {
        /// The node that did not answer.
        peer: NodeId,
        /// Step of the move.
        step: MigrationStep,
    },
    /// The channel to the acceptor was lost.
    PeerLost {
        /// Acceptor whose channel was lost.
        peer: NodeId,
        /// Step of the move.
        step: MigrationStep,
    },
    /// The acceptor aborted the move.
    Aborted {
        /// Acceptor that aborted the move.
        by: NodeId,
        /// The acceptor's failure, as seen from this node.
        why: Failure,
    },
    /// The holder's record of the process contradicts this node's request.
    NotDiverted(ChangeRefusal),
    /// Another node owns one of its flows.
    NotOurs {
        /// Flow that another node owns.
        flow: Flow,
        /// The holder's record of the flow.
        record: OwnershipRecord,
    },
    /// The daemon restarted during the move.
    Restarted,
    /// The move was cancelled by request.
    Cancelled,
    /// Only a rehearsal was requested, and the acceptor would take the process
    /// ([`MoveRequestOptions::rehearsal`](super::MoveRequestOptions::rehearsal)).
    Rehearsed,
}

impl ProcessKeptReason {
    /// Returns the failure that keeps the process here, with the party to blame: the first one if there are several.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Blocked(whys) => first(whys).within(Context::ProcessCannotMove),
            Self::FlowMoving(flow) => OperatorFault::FlowOfProcessAlreadyMoving(*flow).into(),
            Self::PeerMoving(flow) => OperatorFault::OtherEndMoving(*flow).into(),
            Self::TooManyFlows(flows) => ProgramFault::TooManyFlows(*flows as u64).into(),
            Self::Refused { by, whys } => first(whys).within(Context::RefusedBy(*by)),
            Self::PeerRefused { by, why } => {
                why.clone().within(Context::RefusedByConnectedNode(*by))
            }
            Self::FreezeTooLong { predicted, max } => OperatorFault::FreezeTooLong {
                predicted: *predicted,
                max: *max,
            }
            .into(),
            Self::Failed { step, why } => why.clone().within(Context::StepFailed(*step)),
            Self::TimedOut { peer, step } => PeerFault::NoAnswer {
                node: *peer,
                step: Step::Migration(*step),
            }
            .into(),
            Self::PeerLost { peer, step } => PeerFault::ChannelLost {
                node: *peer,
                step: Step::Migration(*step),
            }
            .into(),
            Self::Aborted { by, why } => why.clone().within(Context::MoveAbortedBy(*by)),
            Self::NotDiverted(refusal) => PeerFault::ProcessNotDiverted(*refusal).into(),
            Self::NotOurs { flow, record } => OperatorFault::FlowOfProcessOwnedElsewhere {
                flow: *flow,
                record: *record,
            }
            .into(),
            Self::Restarted => NodeFault::RestartedInMove.into(),
            Self::Cancelled => OperatorFault::Cancelled.into(),
            Self::Rehearsed => OperatorFault::Rehearsed.into(),
        }
    }
}

/// Returns the first of several failures. A list without failures is a defect of its sender.
fn first(failures: &[Failure]) -> Failure {
    let first = failures.first().cloned();
    first.unwrap_or_else(|| Cause::Unknown.into())
}

impl fmt::Display for ProcessKeptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)?;
        match self {
            Self::Blocked(whys) | Self::Refused { whys, .. } => {
                let mut others = whys.iter().skip(1);
                others.try_for_each(|why| write!(f, "; {why}"))
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for ProcessKeptReason {}

/// Durations of a move's phases, as its donor measures them. Zero for a phase that was not reached.
///
/// `extract + transfer + restore + commit` is the freeze as the donor can see it. The sum exceeds the true freeze by
/// the delay of the frame `Done`, which counts as transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MovePhaseTimes {
    /// Check, offer, and all rounds.
    pub copy: Duration,
    /// From the last round until acceptor and peers are prepared.
    pub arm: Duration,
    /// From there until the holder has diverted and the process is stopped.
    pub divert: Duration,
    /// From there until all has been sent.
    pub extract: Duration,
    /// From there until `Done`, less the time the acceptor reports for itself.
    pub transfer: Duration,
    /// At the acceptor: until the process is restored.
    pub restore: Duration,
    /// At the acceptor: from there until the process runs.
    pub commit: Duration,
}

impl MovePhaseTimes {
    /// Returns the freeze as the donor sees it.
    pub fn freeze(&self) -> Duration {
        self.extract + self.transfer + self.restore + self.commit
    }
}

/// Measurements of a move, reported with its outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MoveMeasurements {
    /// Number of copying rounds.
    pub rounds: u32,
    /// Bytes sent in the rounds.
    pub copied_bytes: u64,
    /// Bytes sent while the process was frozen.
    pub freeze_bytes: u64,
    /// Bytes that compression saved, in the rounds and in the freeze.
    pub saved_bytes: u64,
    /// The predicted freeze.
    pub predicted: Duration,
    /// True if pages were sent after the process resumed (post-copy).
    pub post_copy: bool,
    /// Bytes of memory sent by post-copy.
    pub post_copy_bytes: u64,
    /// Durations of the phases.
    pub phases: MovePhaseTimes,
    /// Durations of the freeze's steps, at the donor and at the acceptor, which work at the same time.
    pub steps: Box<[Vec<StepTime>; 2]>,
}

/// An event of the migration machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A round of copying has ended.
    RoundEnded {
        /// Move to which the round belongs.
        id: MoveId,
        /// Number of the round, from 1 on.
        round: u32,
        /// Bytes sent in the round.
        sent_bytes: u64,
        /// Bytes that compression saved.
        saved_bytes: u64,
        /// Bytes changed during the round.
        dirty_bytes: u64,
        /// Rate at which the process changes memory, in bytes a second.
        dirty_rate: u64,
        /// Throughput of the path to the acceptor, in bytes a second.
        send_rate: u64,
        /// The predicted freeze after this round.
        predicted: Duration,
    },
    /// This node will forward these connections: their peers have no daemon, or it did not answer.
    ConnectionsForwarded {
        /// Move of the process that has the connections.
        id: MoveId,
        /// Connections that this node will forward.
        connections: Vec<Flow>,
    },
    /// A process runs at the acceptor, and its remaining pages are sent by post-copy.
    PostCopyStarted {
        /// Move whose memory is sent by post-copy.
        id: MoveId,
        /// Bytes of memory still at the donor.
        bytes: u64,
    },
    /// A move from this node has ended.
    Outcome {
        /// Move that has ended.
        id: MoveId,
        /// Result of the move: moved, cloned or kept.
        outcome: MoveOutcome,
        /// Measurements of the move.
        summary: Box<MoveMeasurements>,
    },
    /// This node took a process; the process runs.
    ProcessAccepted {
        /// Move that brought the process.
        id: MoveId,
        /// The process's flows and their epochs.
        flows: Vec<(Flow, Epoch)>,
    },
    /// This node gave up taking a process.
    ProcessDiscarded {
        /// Move that this node gave up.
        id: MoveId,
        /// Reason for giving up.
        reason: Failure,
    },
    /// Changes to report to the holder, by `handle_changes` of the handoff. The machine deferred them during a move.
    ReportChanges {
        /// Ownership changes that the machine deferred.
        changes: Vec<OwnershipChange>,
    },
    /// The holder has not answered for a while; requests are repeated. Emitted once per request.
    HolderSilent {
        /// Holder that has not answered.
        holder: NodeId,
    },
    /// The holder has lost its table while a process was frozen; the acceptor is asked as well.
    HolderLostTable {
        /// Move of the frozen process.
        id: MoveId,
    },
    /// A `Thaw`, `Release`, `Resume` or `Translate` failed at its last attempt.
    CommandFailed {
        /// Move to which the command belongs.
        id: MoveId,
        /// Name of the command.
        command: &'static str,
        /// Failure of the last attempt.
        error: Failure,
    },
    /// A frame or completion was ignored: late, repeated, or never requested.
    Ignored(IgnoredInput),
}

impl From<IgnoredInput> for Event {
    fn from(ignored: IgnoredInput) -> Self {
        Self::Ignored(ignored)
    }
}
