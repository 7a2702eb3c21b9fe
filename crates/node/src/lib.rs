//! Modules of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

mod api_conversion;
pub mod app_server;
mod asap_over_tcp;
pub mod config;
pub mod control;
pub mod dataplane;
pub mod engine;
pub mod engine_queue;
mod log_limit;
pub mod logs;
mod mailbox;
pub mod metrics;
pub mod migration;
mod multicast;
pub mod peer_channel;
pub mod pid_file;
mod polled_socket;
pub mod pool;
mod private_files;
mod reach;
pub mod registrar;
mod sctp_addresses;
mod socket_path;
mod start_error;
pub mod tls;
