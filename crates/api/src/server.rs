//! Words that both faces of the library share.

use std::fmt;
use std::time::Duration;

use crate::Drain;

/// Where a connection is to go, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Name of the node.
    pub to: String,
    /// Whether the donor waits for its send queue first.
    pub drain: Drain,
}

impl Destination {
    /// That node, at once.
    pub fn node(name: impl Into<String>) -> Self {
        Self {
            to: name.into(),
            drain: Drain::None,
        }
    }

    /// The same node, but after the send queue ran empty, or `wait_max` passed.
    pub fn drained(self, wait_max: Duration) -> Self {
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

/// A connection that came to a service. `C` is the face's connection.
#[derive(Debug)]
pub enum Arrival<C> {
    /// A client connected.
    New(C),
    /// Another node handed it over.
    HandedOff {
        /// The connection, live.
        connection: C,
        /// What the program on the donor said about it.
        state: Vec<u8>,
    },
}

/// The connection lives on another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Name of that node.
    pub to: String,
}

/// The connection stayed. It is as usable as before the attempt.
pub struct Kept<C> {
    /// The connection.
    pub connection: C,
    /// Why.
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
