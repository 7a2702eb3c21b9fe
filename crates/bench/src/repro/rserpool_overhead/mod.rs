//! Paper 001, "An Evaluation of the Pool Maintenance Overhead in Reliable Server Pooling Systems": its measurements.

pub(super) mod fig6;
pub(super) mod fig7;
pub(super) mod fig8;
pub(super) mod fig9;
mod load;
mod operations;
mod subject;

/// Repeats of each measurement: "All measurements are repeated 18 times" (section 4.1).
const REPEATS: u32 = 18;
