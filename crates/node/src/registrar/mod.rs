//! `holdfastd` as a registrar: SCTP and multicast in, `holdfast_proto::registrar` in the middle, messages out.
//!
//! One thread has the machine and all its sockets ([`run`]). Another serves the control API, and asks the first.

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
