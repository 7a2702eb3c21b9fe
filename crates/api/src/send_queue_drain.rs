//! The setting to wait for the send queue before a handoff.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The donor's wait for its send queue to empty before the connection is frozen (paper 000, Figure 2).
///
/// In JSON: `"none"`, or `{"first": {"max_wait_ms": 500}}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Drain {
    /// Move at once; the send queue travels with the connection.
    #[default]
    None,
    /// Wait until the peer has acknowledged everything, then move. If the queue is not empty in time, the connection
    /// moves with the rest of it.
    First {
        /// Maximum wait, in milliseconds.
        max_wait_ms: u32,
    },
}
