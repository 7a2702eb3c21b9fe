//! Orders of an operator about the drain of another node: the contact node passes them on, and gets the node's report.

use crate::failure::Text;
use crate::frame::bounded_list_of;
use serde::{Deserialize, Serialize};

/// Maximum length of a report in bytes.
pub const REPORT_BYTES_MAX: usize = 32 * 1024;

/// An operator's order about the drain of the receiving node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DrainOrder {
    /// Begin the drain, or change its deadline.
    Begin {
        /// Seconds after which the drain ends.
        deadline_s: Option<u64>,
    },
    /// Report on the drain, and change nothing.
    Report,
    /// End the drain.
    End,
}

/// A node's report on its drain: the JSON of the control API's `DrainReport`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DrainReportJson(
    #[serde(deserialize_with = "bounded_list_of::<_, _, REPORT_BYTES_MAX>")] Vec<u8>,
);

impl DrainReportJson {
    /// Returns the report with this JSON; none if the JSON is longer than [`REPORT_BYTES_MAX`].
    pub fn new(json: Vec<u8>) -> Option<DrainReportJson> {
        (json.len() <= REPORT_BYTES_MAX).then_some(DrainReportJson(json))
    }

    /// Returns the JSON of the drain report.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A node's answer to an operator's drain order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DrainAnswer {
    /// The node has obeyed the drain order, and reports on its drain.
    Report(DrainReportJson),
    /// The node has not obeyed the drain order.
    Refused {
        /// The reason for which the node does not obey the drain order.
        error: Text,
        /// A remedy, shown to the operator together with the refusal.
        what_to_do: Text,
    },
}

/// A message about the drain of a node. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DrainFrame {
    /// Contact node to any other: an operator's order about the receiver's drain.
    Order {
        /// Number chosen by the contact node and repeated in the answer.
        request: u64,
        /// The operator's order about the receiver's drain.
        order: DrainOrder,
    },
    /// The answer to `Order`.
    Answer {
        /// Number of the `Order`.
        request: u64,
        /// The drain report, or the reason for which the node does not obey.
        answer: DrainAnswer,
    },
}

impl DrainFrame {
    /// The frame's name, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            DrainFrame::Order { .. } => "DrainOrder",
            DrainFrame::Answer { .. } => "DrainAnswer",
        }
    }
}
