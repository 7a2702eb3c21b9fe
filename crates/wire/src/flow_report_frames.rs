//! The messages by which a new holder of the steering table learns which flows the nodes of its group have.

use crate::frame::bounded_list_of;
use crate::{Flow, OwnershipRecord};
use serde::{Deserialize, Serialize};

/// Maximum number of claims in one part of a report.
pub const CLAIMS_MAX: usize = 4_096;

/// A message about the flows of a node. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlowReportFrame {
    /// Holder to node: report your flows.
    Request {
        /// Epoch of the view with which the holder's role began.
        term: u64,
    },
    /// Node to holder: one part of the report.
    Report {
        /// The `term` of the `Request`.
        term: u64,
        /// Number of the report, different for each that the sender begins.
        report: u64,
        /// Number of the part, from 0.
        part: u32,
        /// Flows that the sender owns, and transits of which the sender is donor or acceptor. A part has the state at its
        /// sending.
        #[serde(deserialize_with = "bounded_list_of::<_, _, CLAIMS_MAX>")]
        claims: Vec<(Flow, OwnershipRecord)>,
        /// True in the last part.
        is_last: bool,
    },
    /// Holder to node: all parts before `next_part` have arrived. With 0, the holder does not know the report, which must
    /// begin again.
    Ack {
        /// The `term` of the `Report`.
        term: u64,
        /// The `report` of the `Report`.
        report: u64,
        /// Number of the part that the holder expects.
        next_part: u32,
    },
}

impl FlowReportFrame {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            FlowReportFrame::Request { .. } => "FlowReportRequest",
            FlowReportFrame::Report { .. } => "FlowReport",
            FlowReportFrame::Ack { .. } => "FlowReportAck",
        }
    }
}
