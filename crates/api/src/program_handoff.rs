//! Handoffs as a server program sees them: types of the asynchronous and the blocking interface.

use std::fmt;
use std::time::Duration;

use crate::Drain;

/// The destination of a handoff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Name of the node that is to take the connection.
    pub to: String,
    /// The donor's wait for its send queue.
    pub drain: Drain,
}

impl Destination {
    /// Returns the node as destination, without waiting for the send queue.
    pub fn node(name: impl Into<String>) -> Self {
        Self {
            to: name.into(),
            drain: Drain::None,
        }
    }

    /// Returns the same node as destination, after the send queue is empty or `wait_max` has passed.
    pub fn with_drain(self, wait_max: Duration) -> Self {
        let max_wait_ms = u32::try_from(wait_max.as_millis()).unwrap_or(u32::MAX);
        Self {
            drain: Drain::First { max_wait_ms },
            ..self
        }
    }
}

impl From<&str> for Destination {
    fn from(name: &str) -> Self {
        Self::node(name)
    }
}

/// A connection that arrived at a service. `C` is the interface's connection type.
#[derive(Debug)]
pub enum Arrival<C> {
    /// A client connected.
    New(C),
    /// Another node handed the connection over.
    HandedOff {
        /// The connection, in which the program may read and write.
        connection: C,
        /// The application state from the program on the donor.
        state: Vec<u8>,
    },
}

/// Result of a handoff: the connection is on another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Name of the node that took the connection.
    pub to: String,
}

/// Result of a failed handoff: the connection stayed, and is as usable as before the attempt.
pub struct Kept<C> {
    /// Connection that stayed with the program.
    pub connection: C,
    /// Reason why the handoff failed.
    pub reason: String,
}

impl<C> fmt::Debug for Kept<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<C> fmt::Display for Kept<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the connection stayed: {}", self.reason)
    }
}

impl<C> std::error::Error for Kept<C> {}
