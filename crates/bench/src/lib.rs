//! Benchmarks, demonstrations and the papers' experiments: the library of the program `holdfast-bench`.
#![forbid(unsafe_code)]

mod balanced_trees;
pub mod capture;
pub mod churn;
pub mod cluster;
pub mod connection_load;
pub mod demo;
pub mod handlespace;
pub mod handoff;
pub mod migrate;
pub mod openarena;
pub mod pool_lab;
pub mod process_moves;
pub mod programs;
pub mod registrar;
pub mod repro;
pub mod sim;
pub mod steer;
pub mod zone_server_lab;
