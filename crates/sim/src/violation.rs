//! Violations found by an oracle.

use crate::time::Time;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("after {} s: {description}", .at.as_secs_f64())]
pub struct Violation {
    /// Virtual time at which the oracle found the violation.
    pub at: Time,
    /// Description of the violation, for people.
    pub description: String,
}
