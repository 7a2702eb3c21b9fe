//! What an oracle found.

use crate::time::Time;

/// Something was not as it must be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("after {} s: {what}", .at.as_secs_f64())]
pub struct Violation {
    /// When.
    pub at: Time,
    /// What.
    pub what: String,
}
