//! Decisions of a conductor, with their reasons as types: a planned move, or the reason for none.

use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{DeclineReason, MovePurpose, ProcessKey, Utilization};
use holdfast_wire::failure::Failure;
use std::fmt;

/// A decision, as `holdfast balance plan` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The move is the best one.
    Move(PlannedMove),
    /// No process moves.
    Stay(StayReason),
}

/// Load of a node before a move, and the load predicted for the time after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadChange {
    /// Load before the move.
    pub before: Utilization,
    /// Predicted load after the move.
    pub after: Utilization,
}

impl fmt::Display for LoadChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.before, self.after)
    }
}

/// A move that would even out loads, or empty a drained node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedMove {
    /// Process to move.
    pub process: ProcessKey,
    /// Node that would take the process.
    pub to: NodeId,
    /// Reason for the move.
    pub purpose: MovePurpose,
    /// Mean load of the known nodes.
    pub average: Utilization,
    /// Predicted change of this node's load.
    pub donor: LoadChange,
    /// Predicted change of the acceptor's load.
    pub acceptor: LoadChange,
}

impl fmt::Display for PlannedMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.purpose {
            MovePurpose::Balance => "to even out loads",
            MovePurpose::Drain => "to drain this node",
        };
        write!(
            f,
            "{} to node {} {why}: this node from {}, node {} from {} (average {})",
            self.process, self.to, self.donor, self.to, self.acceptor, self.average
        )
    }
}

/// Reason for which a node takes part in no move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The daemon has not measured the load of late.
    #[error("the load of this node is not known; check that its daemon can read the cgroup")]
    LoadUnknown,
    /// Balancing is off at this node.
    #[error("balancing is off at this node; `holdfast balance on` begins it")]
    BalancingOff,
    /// The node is being drained, and takes no processes.
    #[error("this node is being drained")]
    Draining,
    /// A process is moving from or to this node.
    #[error("a process is moving from or to this node")]
    Busy,
    /// The daemon has just started, and an offer that it accepted before may still begin.
    #[error("this node's daemon has just started")]
    Starting,
    /// The node has just moved a process.
    #[error("this node calms down for {} s after a move", .0.as_secs())]
    CalmingDown(Duration),
    /// The node has moved as many processes in the last minute as its limit allows, or has just started.
    #[error("this node may move {max} processes in a minute, and has moved them or just started")]
    RateLimit {
        /// Maximum number of moves in a minute.
        max: usize,
    },
}

impl From<Unavailable> for DeclineReason {
    fn from(reason: Unavailable) -> DeclineReason {
        match reason {
            Unavailable::LoadUnknown => DeclineReason::LoadUnknown,
            Unavailable::BalancingOff => DeclineReason::BalancingOff,
            Unavailable::Draining => DeclineReason::Draining,
            Unavailable::Busy => DeclineReason::Busy,
            Unavailable::Starting => DeclineReason::Starting,
            Unavailable::CalmingDown(_) => DeclineReason::CalmingDown,
            Unavailable::RateLimit { .. } => DeclineReason::RateLimit,
        }
    }
}

/// Reason for which no process moves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StayReason {
    /// The node takes part in no move.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// No other node has told its load of late.
    #[error("no other node has told its load of late; check that their daemons run")]
    NobodyKnown,
    /// The load is near enough to the average.
    #[error("the load of this node, {own}, is near enough to the average, {average}")]
    Balanced {
        /// Load of this node.
        own: Utilization,
        /// Mean load of the known nodes.
        average: Utilization,
    },
    /// The load is high, but not for long.
    #[error("the load of this node, {own}, is high over the average, {average}, but not for long")]
    NotSustained {
        /// Load of this node.
        own: Utilization,
        /// Mean load of the known nodes.
        average: Utilization,
    },
    /// No move would help, or each one is ruled out.
    #[error(
        "no beneficial migration: this node has a load of {own}, the average is {average}{}",
        describe_obstacles(.obstacles)
    )]
    NoBeneficialMove {
        /// Load of this node.
        own: Utilization,
        /// Mean load of the known nodes.
        average: Utilization,
        /// Reasons by process, at most [`OBSTACLES_MAX`].
        obstacles: Vec<Obstacle>,
    },
    /// The drained node has no process left that can move.
    #[error("this node has no process left that can move{}", describe_obstacles(.0))]
    Drained(Vec<Obstacle>),
    /// The deadline of the drain has passed.
    #[error("the deadline of the drain has passed")]
    DeadlinePassed,
}

/// Most processes that a [`StayReason`] names.
pub const OBSTACLES_MAX: usize = 64;

/// Most processes that the words of a [`StayReason`] name.
const DESCRIBED_MAX: usize = 3;

fn describe_obstacles(obstacles: &[Obstacle]) -> String {
    let mut text = String::new();
    for obstacle in obstacles.iter().take(DESCRIBED_MAX) {
        text += &format!("; {}: {}", obstacle.process, obstacle.reason);
    }
    let rest = obstacles.len().saturating_sub(DESCRIBED_MAX);
    if rest > 0 {
        text += &format!("; and {rest} more");
    }
    text
}

/// A process that does not move, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// Process that does not move.
    pub process: ProcessKey,
    /// Reason why the process stays.
    pub reason: ObstacleReason,
}

/// Reason for which one process does not move.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObstacleReason {
    /// The operator pinned the process to this node.
    #[error("it is pinned to this node")]
    Pinned,
    /// The process uses something that cannot move.
    #[error("it cannot move: {0}")]
    Blocked(Failure),
    /// The last moves of the process failed.
    #[error("its last move failed: {0}")]
    Failed(Failure),
    /// The process has moved of late.
    #[error("it moved {} s ago and rests", .0.as_secs())]
    MovedRecently(Duration),
    /// The process has moved often of late.
    #[error("it has moved {0} times of late, which is the most")]
    MovedOften(usize),
    /// Processes with the same affinity label run here.
    #[error("the move would part it from a process with the same affinity label")]
    WouldPart,
    /// The load of the process makes no difference.
    #[error("its load makes no difference")]
    TooSmall,
    /// The predicted freeze is too long for a move that only evens out loads.
    #[error("its predicted freeze of {} ms is too long", .0.as_millis())]
    FreezeTooLong(Duration),
    /// No known node is less loaded than the average.
    #[error("no known node is less loaded than the average")]
    NoReceiver,
    /// All nodes that could take the process have declined of late, have no memory for it, or would be too loaded.
    #[error("no node has room for it now")]
    NoRoom,
    /// The acceptor would be loaded as the donor was.
    #[error("node {to} would then have a load of {after}: nothing would be gained")]
    NoGain {
        /// Node that would take the process.
        to: NodeId,
        /// Predicted load of the acceptor.
        after: Utilization,
    },
    /// The acceptor would have to give processes away itself.
    #[error("node {to} would then have a load of {after}, and would have to undo the move")]
    WouldBeUndone {
        /// Node that would take the process.
        to: NodeId,
        /// Predicted load of the acceptor.
        after: Utilization,
    },
    /// The donor would have to take processes itself.
    #[error("this node would then have a load of {after}, far below the average")]
    LeavesTooLittle {
        /// The predicted load of the donor.
        after: Utilization,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_beneficial_migration_names_the_first_processes() {
        let obstacle = |number| Obstacle {
            process: ProcessKey(number),
            reason: ObstacleReason::Pinned,
        };
        let reason = StayReason::NoBeneficialMove {
            own: Utilization(7_000),
            average: Utilization(5_000),
            obstacles: (1..=5).map(obstacle).collect(),
        };
        assert_eq!(
            reason.to_string(),
            "no beneficial migration: this node has a load of 70.0 %, the average is 50.0 %; process 1: it is pinned to \
             this node; process 2: it is pinned to this node; process 3: it is pinned to this node; and 2 more"
        );
    }
}
