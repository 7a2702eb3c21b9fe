//! Benchmarks, demonstrations and the papers' experiments: the library of the program `holdfast-bench`.
#![forbid(unsafe_code)]

mod balanced_trees;
pub mod churn;
pub mod demo;
pub mod group;
pub mod handlespace;
pub mod handoff;
pub mod migrate;
pub mod registrar;
pub mod repro;
pub mod simulator_speed;
pub mod steer;
