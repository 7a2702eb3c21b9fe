//! Modules of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

mod api_conversion;
pub mod app;
mod asap;
pub mod channel;
pub mod config;
pub mod control;
pub mod dataplane;
pub mod engine;
mod log_limit;
pub mod logs;
mod mailbox;
pub mod metrics;
pub mod migration;
mod multicast;
pub mod pid_file;
mod polled_socket;
pub mod pool;
mod private_files;
pub mod queue;
pub mod registrar;
mod sctp;
mod socket_path;
mod start_error;
pub mod tls;
