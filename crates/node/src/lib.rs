//! Modules of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

pub mod app;
mod asap;
pub mod channel;
pub mod config;
pub mod control;
pub mod dataplane;
pub mod engine;
mod entries;
mod limit;
pub mod logs;
mod mailbox;
pub mod metrics;
pub mod migration;
mod multicast;
pub mod pid_file;
pub mod pool;
mod private_files;
pub mod queue;
mod ready;
pub mod registrar;
mod sctp;
mod socket_path;
mod start;
pub mod tls;
