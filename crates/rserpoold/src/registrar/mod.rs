//! A registrar: drives `holdfast_proto::registrar` with SCTP and multicast.
//!
//! One thread has the machine and all its sockets ([`run`]). Another thread serves the control API, and sends its
//! requests to the first.

mod adaptive_batch_delay;
mod asap_tcp_streams;
mod associations;
mod backlog;
mod control;
mod event_log;
mod event_loop;
mod metrics;
mod operator_view;
mod round_trips;
mod setup;
mod wait;

pub use crate::start_error::StartError;
pub use setup::{examine_start, run};
