//! What the daemons of Holdfast stand on: the configuration file, the log, TLS among members of a group, the control
//! API's server, and the sockets and files of a daemon alone.
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod log_limit;
pub mod logs;
pub mod polled_socket;
pub mod private_files;
pub mod socket_path;
pub mod tls;
