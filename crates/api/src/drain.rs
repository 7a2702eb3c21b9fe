//! Whether the donor waits for its send queue before a handoff.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether the donor lets its send queue run empty before the connection is frozen (paper 000, Figure 2).
///
/// In JSON: `"none"`, or `{"first": {"max_wait_ms": 500}}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Drain {
    /// Move at once; what is in the send queue travels with the connection.
    #[default]
    None,
    /// Wait until the peer has acknowledged everything, then move; a connection whose queue is not empty in time
    /// moves with what is left.
    First {
        /// The longest wait, in milliseconds.
        max_wait_ms: u32,
    },
}
