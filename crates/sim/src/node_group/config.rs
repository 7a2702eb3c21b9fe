//! The configuration of one run.

use super::{FaultFrequencies, node_id};
use crate::time::Time;
use std::fmt;

/// A run's configuration, which a seed derives from a [`PlanDistribution`](super::PlanDistribution); `K` is the part
/// specific to handoff or migration.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupRunConfig<K> {
    /// Number of nodes.
    pub nodes: usize,
    /// The node that holds the records.
    pub holder: usize,
    /// Number of flows, see [`PlanDistribution::flows`](super::PlanDistribution::flows).
    pub flows: usize,
    /// True if channels lose, repeat and reorder single frames.
    pub hostile: bool,
    /// True if commands can fail.
    pub failing: bool,
    /// Frequencies of unplanned faults.
    pub faults: FaultFrequencies,
    /// The planned actions with their times.
    pub plan: Vec<(Time, GroupAction)>,
    /// Time at which all faults end: daemons are restarted, channels mended.
    pub faults_end: Time,
    /// Time by which all activity must have ended.
    pub idle_deadline: Time,
    /// The part specific to handoff or migration.
    pub specific: K,
}

/// A planned action. Its objects are chosen by its own random number `draw`, so that the choice depends as little as
/// possible on other actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupAction {
    /// A node's daemon dies; the kernel's state stays.
    Crash(usize),
    /// A node's daemon restarts.
    Restart(usize),
    /// The channel between two nodes breaks, and is not reconnected.
    Cut(usize, usize),
    /// The channel between two nodes can be connected again.
    Mend(usize, usize),
    /// An operator requests a handoff or a migration.
    Request {
        /// Random number that chooses the flows or process.
        draw: u64,
    },
    /// An operator cancels the requests in progress.
    Cancel,
    /// All server programs that may act process data.
    Serve,
    /// A connection is closed.
    Close {
        /// Random number that chooses the connection.
        draw: u64,
    },
    /// A client connects.
    Open {
        /// Random number that chooses the node or process.
        draw: u64,
    },
    /// Another node becomes contact node.
    ChangeContact {
        /// Random number that chooses the node.
        draw: u64,
    },
    /// A process is killed.
    Kill {
        /// Random number that chooses the process.
        draw: u64,
    },
}

impl fmt::Display for GroupAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            GroupAction::Crash(node) => write!(f, "the daemon of node {} crashes", node_id(node)),
            GroupAction::Restart(node) => {
                write!(f, "the daemon of node {} restarts", node_id(node))
            }
            GroupAction::Cut(a, b) => write!(
                f,
                "the channel between nodes {} and {} breaks",
                node_id(a),
                node_id(b)
            ),
            GroupAction::Mend(a, b) => write!(
                f,
                "the channel between nodes {} and {} can be connected again",
                node_id(a),
                node_id(b)
            ),
            GroupAction::Request { draw } => {
                write!(f, "an operator requests a move (draw {draw:x})")
            }
            GroupAction::Cancel => write!(f, "an operator cancels the requests in progress"),
            GroupAction::Serve => write!(f, "the server programs process data"),
            GroupAction::Close { draw } => write!(f, "a connection is closed (draw {draw:x})"),
            GroupAction::Open { draw } => write!(f, "a client connects (draw {draw:x})"),
            GroupAction::ChangeContact { draw } => {
                write!(f, "another node becomes contact node (draw {draw:x})")
            }
            GroupAction::Kill { draw } => write!(f, "a process is killed (draw {draw:x})"),
        }
    }
}
