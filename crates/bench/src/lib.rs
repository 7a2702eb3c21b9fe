//! Benchmarks, demonstrations and the papers' experiments: the library of the program `holdfast-bench`.
#![forbid(unsafe_code)]

pub mod arena;
pub mod capture;
pub mod churn;
pub mod cluster;
pub mod demo;
pub mod handlespace;
pub mod handoff;
pub mod load;
pub mod migrate;
pub mod moves;
pub mod pools;
pub mod programs;
pub mod registrar;
pub mod repro;
pub mod sim;
pub mod steer;
mod trees;
pub mod zone;
