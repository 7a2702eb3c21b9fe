//! The parts of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

pub mod app;
pub mod channel;
pub mod config;
pub mod control;
pub mod dataplane;
pub mod engine;
pub mod logs;
pub mod metrics;
pub mod pid_file;
pub mod queue;
pub mod registrar;
mod socket_path;
pub mod tls;
