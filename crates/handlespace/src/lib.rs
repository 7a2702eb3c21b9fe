//! The handlespace of a registrar: pools by handle, their elements by id, and the six operations on them.
//!
//! Registration, deregistration, re-registration, handle resolution, timer and synchronisation (paper 001 section 3) are
//! methods of [`Handlespace`]. There is no clock here and no socket: a time is an argument (a `Duration` since any start
//! that does not change while the handlespace lives), and what a registrar knows of an element beyond its identity and
//! policy, its transport addresses for one, is a value of any type `T` that travels with the element.
//!
//! An element stands in five sets, and no operation is linear in any: the index by (handle, id), its pool's selection set,
//! the timers, the members of its pool that have the same home registrar, and that registrar's checksum. A new policy is
//! a few lines in `policy.rs`: a sorting order or a weight, and a selection procedure.
#![forbid(unsafe_code)]

mod checksum;
mod element;
mod expect;
mod index;
mod look;
mod ownership;
mod policy;
mod pool;
mod renew;
mod resolve;
mod schedule;
mod selection;
mod space;
mod synchronize;
mod timers;

pub use element::{ElementKey, ElementRef};
pub use expect::Coming;
pub use policy::counts_selections;
pub use pool::PoolRef;
pub use space::{Handlespace, RegisterError, Registered, Registration};
pub use synchronize::Cursor;
pub use timers::{Expired, TimerKind};
