//! The number of a node.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The number of a node within its group, from 1 on: set in the configuration, by default the node's position there.
///
/// The eBPF maps use 0 for "none"; no configured node has number 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for NodeId {
    type Err = std::num::ParseIntError;

    /// Reads a decimal number.
    ///
    /// # Errors
    /// Anything but a number from 1 to 65535.
    fn from_str(text: &str) -> Result<NodeId, Self::Err> {
        text.parse::<std::num::NonZeroU16>()
            .map(|number| NodeId(number.get()))
    }
}
