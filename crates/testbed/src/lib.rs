//! Groups and pools of daemons in a lab, with captures, loads and real programs: what tests and benchmarks stand on.
#![forbid(unsafe_code)]

pub mod capture;
pub mod cluster;
pub mod connection_load;
pub mod detached_program;
pub mod latency_probe;
pub mod longest_waits;
pub mod network_counters;
pub mod new_clients;
pub mod openarena;
pub mod process_lab;
pub mod process_moves;
pub mod programs;
pub mod server_fleet;
pub mod stats;
pub mod zone_server_lab;
