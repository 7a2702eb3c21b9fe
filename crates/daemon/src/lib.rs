//! Common parts of the daemons `holdfastd` and `rserpoold`: configuration files, the log, TLS between members of a group,
//! the control API's server, private sockets and files, and the examination before a start.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod exit_code;
pub mod log_limit;
pub mod logs;
pub mod polled_socket;
pub mod private_files;
pub mod service_manager;
pub mod socket_path;
pub mod start_check;
pub mod tls;
