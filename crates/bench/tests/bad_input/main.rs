//! Impossible and malformed requests from any source are refused with a clear error, and the connections of a running
//! group, verified all the time, are not affected. Needs root.

#[path = "../common/mod.rs"]
mod common;
mod daemon;
mod descriptors;
mod nodes;
mod programs;
mod requests;
mod sockets;
mod stolen;
mod strange;
