//! Modules of `rserpoold`, the daemon of Reliable Server Pooling (RFC 5351): registrars, and pool daemons, which
//! communicate with registrars for the programs of their host.
#![forbid(unsafe_code)]

mod api_conversion;
mod asap_over_tcp;
pub mod config;
mod mailbox;
mod multicast;
pub mod pool;
pub mod registrar;
mod sctp_addresses;
mod start_error;
