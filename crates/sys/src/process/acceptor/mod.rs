//! Recreating a tree. A *restorer* ([`Restorer`]) is a program of its own that is the first process of a new PID, IPC and mount
//! namespace, does what it is told over a channel ([`serve`]), and stays as the tree's reaper.
//!
//! The restorer makes each process as a *husk*: a copy of itself with the PID of the original, emptied, filled
//! while the original runs, and let go when the original has stopped for good. Husks are traced with
//! `PTRACE_O_EXITKILL`: until [`Restorer::go`] they die with their restorer, and a restorer dies with its channel.

mod birth;
pub(crate) mod channel;
mod compare;
mod courier;
mod credentials;
mod descriptors;
mod door;
mod emptied;
mod foreign;
mod go;
mod husk;
mod layout;
mod locks;
mod lost;
mod mapper;
mod missing;
mod objects;
mod plan;
mod remote;
mod serve;
mod slots;
mod state;
mod stopped;
mod threads;

pub(crate) use channel::Kind;
pub use channel::Reply;
pub(crate) use courier::Courier;
pub use remote::{ClockOffsets, Restorer};
pub use serve::serve;
