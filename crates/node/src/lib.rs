//! The parts of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

pub mod config;
pub mod tls;
