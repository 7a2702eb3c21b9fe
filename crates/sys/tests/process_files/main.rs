//! Descriptors of a stopped process are saved from outside, restored in another process, and used there.

mod ahead;
mod blockers;
mod busy;
mod events;
mod files;
mod harness;
mod image;
mod listing;
mod rights;
mod sets;
mod sockets;
mod tables;
mod terminals;
#[allow(dead_code)]
#[path = "../common/vary.rs"]
mod vary;
