//! Packets recorded at a client's interface, and statistics of its connections.
//!
//! [`Capture`] records with `tcpdump`, [`segments`] reads the file, [`analyse`] counts events that an undisturbed
//! connection does not have: second SYNs, resets, segments sent again, long gaps.

#[cfg(test)]
mod capture_builder;
mod connection;
mod segment;
mod sequence_ranges;
mod tcpdump;
#[cfg(test)]
mod tests;

pub use connection::{Connection, Direction, Gap, analyse};
pub use segment::{Segment, segments};
pub use tcpdump::{Capture, Recording};
