//! The audit log: each decision with its reasons, and its effect on the load.

use super::decision::{LoadChange, ObstacleReason, PlannedMove};
use core::time::Duration;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{
    DeclineReason, MovePurpose, OfferEnd, OfferId, ProcessKey, Utilization,
};
use holdfast_wire::failure::Failure;
use std::collections::VecDeque;

/// Most records that the log keeps.
pub const RECORDS_MAX: usize = 256;

/// Part of this node in a move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditRole {
    /// The own node gives the process, by this plan.
    Donor(PlannedMove),
    /// The own node takes the process.
    Acceptor {
        /// Process that the donor offers.
        process: ProcessKey,
        /// Node that gives the process.
        from: NodeId,
        /// Reason for the move.
        purpose: MovePurpose,
        /// Predicted change of this node's load.
        own: LoadChange,
    },
}

/// End of an offer of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditOutcome {
    /// The process moved.
    Moved,
    /// The acceptor declined.
    Declined(DeclineReason),
    /// The acceptor did not answer in time.
    Unanswered,
    /// The acceptor left the group before the move began.
    AcceptorLeft,
    /// By the load that the acceptor told, the move would not help.
    NotBeneficial(ObstacleReason),
    /// The process ended or became unable to move before the move began.
    ProcessGone,
    /// The drain or the balancing was switched off before the move began.
    SwitchedOff,
    /// The move failed, and the process stayed.
    Failed(Failure),
    /// The daemon did not learn the end of the move in time.
    NoNews,
    /// At the acceptor: the end that the donor reported.
    ReportedByDonor(OfferEnd),
    /// At the acceptor: the donor left the group.
    DonorLeft,
}

/// Record of one offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRecord {
    /// Time of the decision, by the machine's clock.
    pub at: Duration,
    /// Time at which the offer ended.
    pub ended_at: Duration,
    /// Identity of the offer.
    pub id: OfferId,
    /// Part of this node, with reasons and predictions.
    pub role: AuditRole,
    /// End of the offer.
    pub outcome: AuditOutcome,
    /// Load of this node once it had calmed down after the move.
    pub observed: Option<Utilization>,
}

/// The latest records of offers.
#[derive(Debug, Default)]
pub(super) struct AuditLog {
    records: VecDeque<AuditRecord>,
    /// Time at which the load after the last move is observed, and the move's offer.
    awaited: Option<(Duration, OfferId)>,
}

impl AuditLog {
    /// Adds a record. The load is observed at `observe_at`, if that is given.
    pub fn push(&mut self, record: AuditRecord, observe_at: Option<Duration>) {
        if self.records.len() >= RECORDS_MAX {
            self.records.pop_front();
        }
        if let Some(at) = observe_at {
            self.awaited = Some((at, record.id));
        }
        self.records.push_back(record);
    }

    /// Returns the time at which to call [`AuditLog::observe`].
    pub fn observe_at(&self) -> Option<Duration> {
        self.awaited.map(|(at, _)| at)
    }

    /// Completes the record of the last move.
    pub fn observe(&mut self, own: Option<Utilization>) -> Option<AuditRecord> {
        let (_, id) = self.awaited.take()?;
        let record = self
            .records
            .iter_mut()
            .rev()
            .find(|record| record.id == id)?;
        record.observed = own;
        Some(record.clone())
    }

    /// Returns the records, the latest last.
    pub fn records(&self) -> impl Iterator<Item = &AuditRecord> {
        self.records.iter()
    }
}
