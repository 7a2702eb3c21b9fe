//! What a program needs to speak with the local `holdfastd`.
//!
//! - [`control`]: the types of the HTTP/JSON control API, its description, and a client.
//! - [`app`]: the protocol between server programs and the daemon, and its channel.
//! - [`ca`]: the group's own certificate authority (files only).
//!
//! Everything here goes through the daemon on the same host; nothing here decides who owns a connection.
#![forbid(unsafe_code)]

pub mod app;
pub mod ca;
pub mod control;
mod drain;
mod flow;

pub use drain::Drain;
pub use flow::{FlowText, FlowTextError, Protocol};
