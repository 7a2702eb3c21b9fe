//! What cannot be done is refused with a clear error, whoever asks and however wrongly: and the connections of a running
//! group, verified all the while, do not notice. Needs root.

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
