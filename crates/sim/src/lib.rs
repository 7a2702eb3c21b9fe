//! The machines of `holdfast-proto` in virtual time.
//!
//! A simulation is a [`Queue`] of events and a world that handles them one after the other. Time passes only from event to
//! event; every chance is drawn from one [`Random`]: so one seed has one outcome, and a year may take a second.
//!
//! - [`net`]: links with delay, rate, loss, reordering and duplication, between zones that partitions may part;
//! - [`server`]: what works on several requests at once and shares its capacity among them;
//! - [`pools`]: registrars, pool elements and pool users, the very machines of the daemons, under the load of paper 004;
//! - [`faults`]: faults of pools by chance, after which all must come right;
//! - [`handoff`], [`migration`]: groups whose nodes give flows and processes to each other while daemons die and channels break;
//!   what both have in common is [`group`];
//! - [`scenario`]: simulations as text;
//! - [`seeds`]: the same for many seeds at once, and what they say together ([`Estimate`]).
#![forbid(unsafe_code)]

pub mod bugs;
mod estimate;
pub mod faults;
pub mod group;
pub mod handoff;
pub mod migration;
pub mod net;
pub mod pools;
mod queue;
mod random;
pub mod scenario;
pub mod seeds;
pub mod server;
mod shrink;
mod time;
mod violation;

pub use estimate::Estimate;
pub use queue::Queue;
pub use random::Random;
pub use time::Time;
pub use violation::Violation;
