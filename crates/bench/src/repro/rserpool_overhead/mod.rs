//! Paper 001, "An Evaluation of the Pool Maintenance Overhead in Reliable Server Pooling Systems": its measurements.

pub(super) mod figure6;
pub(super) mod figure7;
pub(super) mod figure8;
pub(super) mod figure9;
mod handlespaces;
mod operations;
mod registrar_cpu_load;

/// Repeats of each measurement: "All measurements are repeated 18 times" (section 4.1).
const REPEATS: u32 = 18;
