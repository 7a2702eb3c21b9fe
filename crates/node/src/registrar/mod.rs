//! `holdfastd` as a registrar: drives `holdfast_proto::registrar` with SCTP and multicast.
//!
//! One thread has the machine and all its sockets ([`run`]). Another thread serves the control API, and sends its
//! requests to the first.

mod backlog;
mod control;
mod event_loop;
mod links;
mod metrics;
mod pace;
mod ready;
mod report;
mod round_trips;
mod setup;
mod streams;
mod view;

pub use crate::start::StartError;
pub use setup::run;
