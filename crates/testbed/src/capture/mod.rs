//! Packets recorded at a client's interface, and statistics of its connections.
//!
//! [`RunningCapture`] records with `tcpdump`, [`read_capture_file`] reads the file, [`analyse`] counts events that an undisturbed
//! connection does not have: second SYNs, resets, segments sent again, long gaps.

#[cfg(test)]
mod capture_builder;
mod connection;
mod segment;
mod sequence_ranges;
mod tcpdump;
#[cfg(test)]
mod tests;

pub use connection::{CapturedConnection, DataGap, DirectionStatistics, analyse};
pub use segment::{TcpSegment, read_capture_file};
pub use tcpdump::{Recording, RunningCapture};
