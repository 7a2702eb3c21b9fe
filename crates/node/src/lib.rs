//! Modules of `holdfastd`, the daemon of a node.
#![forbid(unsafe_code)]

pub mod app_server;
mod conductor;
pub mod config;
pub mod control;
pub mod credentials;
pub mod dataplane;
pub mod dns;
pub mod engine;
pub mod engine_queue;
mod failure_conversion;
mod health;
pub mod load;
pub mod membership;
pub mod metrics;
pub mod migration;
pub mod peer_channel;
pub mod pid_file;
mod reach;
mod replication;
