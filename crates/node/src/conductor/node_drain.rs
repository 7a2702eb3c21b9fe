//! A drain of this node: its phase, and the moves that it has made.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use holdfast_wire::NodeId;
use holdfast_wire::failure::Failure;

/// Most moves that a report names.
const MOVES_MAX: usize = 256;
/// Most reasons for which connections stay that a report names.
const REASONS_MAX: usize = 8;

/// Phase of a drain of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainPhase {
    /// The processes are checked in the scan of this number.
    Surveying { scan: u64 },
    /// The machine moves processes.
    Moving,
}

/// Result of a move of a process away from this node.
#[derive(Debug)]
pub(crate) struct MoveResult {
    /// The end: the process runs at the acceptor, or here for this reason.
    pub end: Result<(), Failure>,
    /// Time for which the process stood still, in microseconds.
    pub freeze_us: Option<f64>,
    /// Connections whose packets this node forwards from now on, since their other ends run no daemon.
    pub forwarded: usize,
}

/// A move of a process in a drain of this node.
#[derive(Debug)]
pub(super) struct DrainMove {
    pub number: u64,
    pub pid: i32,
    pub name: String,
    pub to: NodeId,
    pub freeze_us: Option<f64>,
    pub failure: Option<String>,
}

/// The handoff of connections of server programs in a drain.
#[derive(Debug, Default)]
pub(crate) struct ConnectionsHandoff {
    /// Numbers of the handoffs under way.
    pub running: BTreeSet<u64>,
    /// Time of the next attempt.
    pub next_at: Duration,
    /// Reasons why connections stay, of the last attempt.
    pub reasons: BTreeSet<String>,
}

impl ConnectionsHandoff {
    /// Notes a reason for which a connection stays, up to a limit.
    pub fn note(&mut self, reason: String) {
        if self.reasons.len() < REASONS_MAX {
            self.reasons.insert(reason);
        }
    }
}

/// A drain of this node.
#[derive(Debug)]
pub(super) struct NodeDrain {
    /// Time at which the drain ends, by the machine's clock.
    pub deadline: Option<Duration>,
    pub phase: DrainPhase,
    pub moves: VecDeque<DrainMove>,
    /// Connections whose packets this node forwards for processes that left.
    pub forwarded: usize,
    pub handoff: ConnectionsHandoff,
    last_number: u64,
}

impl NodeDrain {
    pub fn new(deadline: Option<Duration>, phase: DrainPhase) -> NodeDrain {
        NodeDrain {
            deadline,
            phase,
            moves: VecDeque::new(),
            forwarded: 0,
            handoff: ConnectionsHandoff::default(),
            last_number: 0,
        }
    }

    /// Records the end of a move.
    pub fn record(&mut self, (pid, name): (i32, String), to: NodeId, result: &MoveResult) {
        self.last_number += 1;
        self.forwarded += result.forwarded;
        if self.moves.len() >= MOVES_MAX {
            self.moves.pop_front();
        }
        self.moves.push_back(DrainMove {
            number: self.last_number,
            pid,
            name,
            to,
            freeze_us: result.freeze_us,
            failure: result.end.as_ref().err().map(ToString::to_string),
        });
    }
}
