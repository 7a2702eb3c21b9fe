//! The messages of the conductors, which balance the load of a group (paper 002, section IV): loads by gossip, and the
//! two-phase commit by which a donor and an acceptor agree on a move.

use crate::NodeId;
use crate::frame::bounded_list_of;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of reports in one [`ConductorFrame::Loads`].
pub const REPORTS_MAX: usize = 32;
/// Maximum number of past moves that travel with a process.
pub const PAST_MOVES_MAX: usize = 4;

/// A managed process, by a number that the daemons keep for the life of the process, also when it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcessKey(pub u64);

impl fmt::Display for ProcessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {:x}", self.0)
    }
}

/// Load of a node as a share of its capacity, in hundredths of a percent point. More than 10,000 if processes wait.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Utilization(pub u32);

impl Utilization {
    /// Returns the share of `capacity` that `used` is; the largest value for a node without capacity.
    pub fn of(used: f64, capacity: f64) -> Utilization {
        if capacity <= 0.0 {
            return Utilization(u32::MAX);
        }
        // A float-to-integer conversion saturates.
        Utilization((used / capacity * 10_000.0).round() as u32)
    }

    /// Returns the share in percent points.
    pub fn points(self) -> f64 {
        f64::from(self.0) / 100.0
    }
}

impl fmt::Display for Utilization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} %", self.points())
    }
}

/// Load of a node, in thousandths of a processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDemand {
    /// Demand of all processes of the node, including the demand that waits for a processor.
    pub used: u32,
    /// The share of processors that the node has.
    pub capacity: u32,
}

impl NodeDemand {
    /// Returns the load as a share of the capacity.
    pub fn utilization(&self) -> Utilization {
        Utilization::of(f64::from(self.used), f64::from(self.capacity))
    }
}

/// The load of one node, as it measured itself some time ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The node that measured its load.
    pub node: NodeId,
    /// Demand and capacity of the node at the time of the measurement.
    pub demand: NodeDemand,
    /// Memory that moved processes may use at the node, in KiB.
    pub memory_free_kib: u64,
    /// False if the node takes no processes: the node is drained, or its conductor is off.
    pub is_open: bool,
    /// Time since the measurement, in milliseconds. An age needs no synchronised clocks.
    pub age_ms: u32,
}

/// Identifies an offer of one donor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OfferId {
    /// Start number of the donor's daemon, in any unit that grows from start to start.
    pub boot: u64,
    /// Sequence number of the offer since that start.
    pub seq: u64,
}

impl fmt::Display for OfferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{}", self.boot, self.seq)
    }
}

/// An earlier move of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastMove {
    /// The node that the process left.
    pub from: NodeId,
    /// Time since the move, in seconds.
    pub age_s: u32,
}

/// Reason for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MovePurpose {
    /// The donor is loaded more than the group.
    Balance,
    /// An operator has the donor drained.
    Drain,
}

/// A process that a donor offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedProcess {
    /// Key of the offered process, which stays the same when the process moves.
    pub key: ProcessKey,
    /// Smoothed load of the process, in thousandths of a processor.
    pub used: u32,
    /// Mean deviation of the process's load, in thousandths of a processor.
    pub deviation: u32,
    /// Memory that the process uses, in KiB.
    pub memory_kib: u64,
    /// Anti-affinity: no two processes with the same label run at one node.
    pub anti_affinity_label: Option<u64>,
    /// Recent moves of the process, the latest last.
    #[serde(deserialize_with = "bounded_list_of::<_, _, PAST_MOVES_MAX>")]
    pub past_moves: Vec<PastMove>,
}

/// Reason for which a node declines an offer.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    thiserror::Error,
)]
pub enum DeclineReason {
    /// The node takes part in another move.
    #[error("the node takes part in another move")]
    Busy,
    /// The node has moved a process a moment ago.
    #[error("the node calms down after a move")]
    CalmingDown,
    /// The node's daemon has just started, and an offer that it accepted before may still begin.
    #[error("the node's daemon has just started")]
    Starting,
    /// The node has moved as many processes in the last minute as its limit allows.
    #[error("the node has reached its limit of moves a minute, or has just started")]
    RateLimit,
    /// Balancing is off at the node.
    #[error("balancing is off at the node")]
    BalancingOff,
    /// The node is being drained.
    #[error("the node is being drained")]
    Draining,
    /// The node does not know its load.
    #[error("the node does not know its load")]
    LoadUnknown,
    /// The node has too little memory.
    #[error("the node has {free_kib} KiB of memory free, which is too little")]
    NoMemory {
        /// Free memory, in KiB.
        free_kib: u64,
    },
    /// A process that must run elsewhere than the offered one runs at the node.
    #[error("a process with the same anti-affinity label runs at the node")]
    AntiAffinity,
    /// The load of the node after the move would be too high.
    #[error("the node would have a load of {after}, and takes up to {limit}")]
    TooLoaded {
        /// Load that the node would have after the move.
        after: Utilization,
        /// Highest load that the node accepts.
        limit: Utilization,
    },
}

/// End of an offer, as the donor sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum OfferEnd {
    /// The process runs at the acceptor.
    Moved,
    /// The move failed, and the process runs at the donor.
    Kept,
    /// The donor does not begin the move.
    Withdrawn,
    /// The donor does not know the offer: its daemon has restarted.
    Unknown,
}

/// A message between conductors. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConductorFrame {
    /// Any node to any other: a sign of life, the sender's load, and loads that the sender has heard of.
    Loads {
        /// Measured loads of the sender and of other nodes.
        #[serde(deserialize_with = "bounded_list_of::<_, _, REPORTS_MAX>")]
        reports: Vec<LoadReport>,
    },
    /// Donor to acceptor, first phase: can the acceptor take this process?
    Offer {
        /// The offer that the donor makes.
        id: OfferId,
        /// Reason for the offered move.
        purpose: MovePurpose,
        /// Load of the donor that makes the offer.
        donor: NodeDemand,
        /// The process that the donor would move.
        process: OfferedProcess,
    },
    /// Acceptor to donor: the acceptor keeps itself free for the process until it hears of the offer's end.
    Accept {
        /// The offer that the acceptor accepts.
        id: OfferId,
        /// Load of the acceptor that accepts the offer.
        acceptor: NodeDemand,
    },
    /// Acceptor to donor: the acceptor does not take the process.
    Decline {
        /// The offer that the acceptor declines.
        id: OfferId,
        /// The reason for which the acceptor declines the offer.
        reason: DeclineReason,
    },
    /// Donor to acceptor, second phase: the move begins, or goes on.
    Begin {
        /// The offer whose move begins, or goes on.
        id: OfferId,
    },
    /// Acceptor to donor: how does the move stand? The donor answers with `Begin` or `Ended`.
    Inquire {
        /// The offer whose move the acceptor asks about.
        id: OfferId,
    },
    /// Donor to acceptor: the offer has ended.
    Ended {
        /// The offer that has ended.
        id: OfferId,
        /// Result of the offer: whether the process has moved, or why not.
        end: OfferEnd,
    },
}

impl ConductorFrame {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            ConductorFrame::Loads { .. } => "Loads",
            ConductorFrame::Offer { .. } => "ProcessOffer",
            ConductorFrame::Accept { .. } => "OfferAccept",
            ConductorFrame::Decline { .. } => "OfferDecline",
            ConductorFrame::Begin { .. } => "OfferBegin",
            ConductorFrame::Inquire { .. } => "OfferInquire",
            ConductorFrame::Ended { .. } => "OfferEnded",
        }
    }
}
