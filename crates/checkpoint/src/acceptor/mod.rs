//! Restoring a tree. A *restorer* ([`Restorer`]) is a separate program: the first process of a new PID, IPC and mount
//! namespace. A restorer executes requests that arrive over a channel ([`run_restorer`]), and stays as the tree's reaper.
//!
//! For each process the restorer makes a *stub process*: an empty process that becomes the restored one. The restorer
//! copies itself under the original's PID, unmaps the copied memory, fills the stub process while the original runs,
//! and resumes the stub process after the original has stopped for good. Stub processes are traced with
//! `PTRACE_O_EXITKILL`: until [`Restorer::resume`] they die with their restorer, and a restorer dies with its channel.

mod credentials;
mod descriptors;
mod digest;
mod fd_channel;
mod fd_table;
mod foreign_vdso;
mod group_stop;
mod locks;
mod mapped_object_store;
mod mappings;
mod memory_fields;
mod missing_page_watch;
mod process_state;
mod restorer;
pub(crate) mod restorer_channel;
mod restorer_failure;
mod restorer_link;
mod restorer_main_loop;
mod resume;
mod spawn;
mod stub_placement;
mod stub_process;
mod threads;
mod tree_restoration;
mod unmap;

pub use restorer::{ClockOffsets, Restorer};
pub(crate) use restorer_channel::RestorerMessageKind;
pub use restorer_channel::RestorerReply;
pub(crate) use restorer_link::RestorerLink;
pub use restorer_main_loop::run_restorer;
