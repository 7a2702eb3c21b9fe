//! The machines of `holdfast-proto` in virtual time.
//!
//! A simulation is a [`Queue`] of events and a world that handles them one after the other. Time passes only from event to
//! event; every chance is drawn from one [`Random`]: so one seed has one outcome, and a year may take a second.
//!
//! - [`net`]: links with delay, rate, loss, reordering and duplication, between zones that partitions may part;
//! - [`server`]: what works on several requests at once and shares its capacity among them;
//! - [`pools`]: registrars, pool elements and pool users, the very machines of the daemons, under the load of paper 004;
//! - [`faults`]: faults by chance, after which all must come right;
//! - [`scenario`]: simulations as text;
//! - [`seeds`]: the same for many seeds at once, and what they say together ([`Estimate`]).
#![forbid(unsafe_code)]

mod estimate;
pub mod faults;
pub mod net;
pub mod pools;
mod queue;
mod random;
pub mod scenario;
pub mod seeds;
pub mod server;
mod time;

pub use estimate::Estimate;
pub use queue::Queue;
pub use random::Random;
pub use time::Time;
