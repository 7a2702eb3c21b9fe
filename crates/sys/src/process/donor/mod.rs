//! Saving a running tree. [`Tracker`] watches the tree and returns its changes, round by round, while the tree runs
//! (pre-copy). [`Tracker::freeze`] stops the tree and returns the rest. Until [`StoppedTree::release`] every step can
//! be rolled back to the running original.
//!
//! The kernel binds tracing to a thread (`ptrace(2)`), so a tracker stays in the thread that created it. If that
//! thread dies, the kernel detaches the tree, and the tree runs on.

mod attach;
mod behind;
mod catalogue;
mod chain;
mod descriptors;
mod digest;
mod freeze;
pub(crate) mod gap;
mod halt;
mod hidden;
mod hold;
mod lead_out;
mod locks;
mod machine;
mod outlook;
mod process_state;
mod round;
mod shared;
mod thread_state;
mod tracker;
mod unfinished;
mod userfault;
mod watched;

pub(crate) use attach::{LoneCall, call_instruction, call_instruction_in, value};
pub use behind::Behind;
pub(crate) use descriptors::living_tree;
pub use descriptors::{Described, Describer};
pub use freeze::{StoppedTree, Unfrozen};
pub use hold::Held;
pub use locks::GivenLock;
pub(crate) use machine::{boot_id, features};
pub(crate) use process_state::TIMERS_MAX;
pub use round::Round;
pub(crate) use shared::{data_ranges, read_padded};
pub(crate) use thread_state::SchedulingAttributes;
pub use tracker::Tracker;
pub(crate) use userfault::{scan_guards, scan_own};
