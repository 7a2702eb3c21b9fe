//! Impossible and malformed requests from any source are refused with a clear error, and the connections of a running
//! group, verified all the time, are not affected. Needs root.

#[path = "../common/mod.rs"]
mod common;
mod compromised_member;
mod daemon;
mod descriptor_limits;
mod node_port;
mod programs;
mod requests;
mod scripted_program;
mod sockets;
