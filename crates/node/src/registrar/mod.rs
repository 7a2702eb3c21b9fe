//! `holdfastd` as a registrar: drives `holdfast_proto::registrar` with SCTP and multicast.
//!
//! One thread has the machine and all its sockets ([`run`]). Another thread serves the control API, and sends its
//! requests to the first.

mod backlog;
mod control;
mod event_log;
mod event_loop;
mod links;
mod metrics;
mod pacer;
mod round_trips;
mod setup;
mod streams;
mod view;
mod wait;

pub use crate::start_error::StartError;
pub use setup::run;
