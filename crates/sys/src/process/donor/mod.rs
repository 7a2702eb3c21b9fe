//! Saving a running tree: [`Tracker`] watches it and gives what changed, round by round, while it runs;
//! [`Tracker::freeze`] stops it and gives the rest. Until [`StoppedTree::release`] everything leads back to the running original.
//!
//! Tracing is bound to a thread (`ptrace(2)`): a tracker stays in the thread that made it. If that thread dies, the
//! kernel lets the tree go, and it runs on.

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
