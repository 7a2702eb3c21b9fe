//! Violations found by an oracle.

use crate::time::Time;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("after {} s: {description}", .at.as_secs_f64())]
pub struct Violation {
    /// The time.
    pub at: Time,
    /// A description.
    pub description: String,
}
