//! Saving a running tree. [`TreeTracker`] watches the tree and returns its changes, round by round, while the tree runs
//! (pre-copy). [`TreeTracker::freeze`] stops the tree and returns the rest. Until [`StoppedTree::release`] every step can
//! be rolled back to the running original.
//!
//! The kernel binds tracing to a thread (`ptrace(2)`), so a tracker stays in the thread that created it. If that
//! thread dies, the kernel detaches the tree, and the tree runs on.

mod descriptors;
mod digest;
pub(crate) mod free_range;
mod freeze;
mod halt;
mod host_info;
mod interrupted_calls;
mod lock_handover;
mod mapped_object_catalogue;
mod page_source;
mod precopy_round;
mod process_state;
mod ptrace_checks;
mod shared_memory;
mod sigreturn_chain;
mod state_preview;
mod stop_without_tracer;
mod thread_state;
mod tracker_attachment;
mod tree_tracker;
mod vdso_exit;
mod watched_memory;
mod write_tracking;

pub(crate) use descriptors::living_pids_of_tree;
pub use descriptors::{DescriptorReader, FrozenDescriptors};
pub use freeze::{FreezeFailure, StoppedTree};
pub(crate) use host_info::{boot_id, xcr0};
pub use lock_handover::LockHandover;
pub use page_source::PageSource;
pub use precopy_round::PrecopyRound;
pub(crate) use process_state::TIMERS_MAX;
pub(crate) use shared_memory::{data_ranges, read_padded};
pub use stop_without_tracer::ProcessRef;
pub(crate) use thread_state::SchedulingAttributes;
pub(crate) use tracker_attachment::{
    StublessCall, find_syscall_instruction, find_syscall_instruction_in,
};
pub use tree_tracker::TreeTracker;
pub(crate) use write_tracking::{scan_guards, scan_private_pages};
