//! The pool daemon: elements and sessions of this host's programs, over SCTP to registrars.
//!
//! One thread has the machines (`holdfast_proto::pool_element` for each element, one `pool_user` for all users) and the
//! SCTP sockets ([`run`]). Another thread has the control API, the programs' channels and the sessions' TCP and UDP
//! sockets, and sends requests and events to the first.

mod api_server;
mod caller_admission;
mod control;
mod element_index;
mod endpoints;
mod event_loop;
mod hosted_elements;
mod links;
mod machine_io;
mod machine_timers;
mod operator_view;
mod policy_conversion;
mod pool_users;
mod probes;
mod program_channels;
mod program_roles;
mod request_handling;
mod requests;
mod session_data;
mod session_streams;
mod setup;
mod unconfirmed_callers;

pub use setup::{examine_start, run};
