//! Restoring a tree. A *restorer* ([`Restorer`]) is a separate program: the first process of a new PID, IPC and mount
//! namespace. A restorer executes requests that arrive over a channel ([`serve`]), and stays as the tree's reaper.
//!
//! For each process the restorer makes a *husk*: the empty process that becomes the restored one, called the empty
//! process in these modules. The restorer copies itself under the original's PID, unmaps the copied memory, fills the
//! empty process while the original runs, and resumes it after the original has stopped for good. Empty processes are
//! traced with `PTRACE_O_EXITKILL`: until [`Restorer::go`] they die with their restorer, and a restorer dies with its
//! channel.

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
