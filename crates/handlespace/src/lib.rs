//! The handlespace of a registrar: pools by handle, their elements by id, and the six operations on them.
//!
//! Registration, deregistration, re-registration, handle resolution, timer and synchronisation (paper 001 section 3)
//! are methods of [`Handlespace`]. The crate has no clock and no socket: a time is an argument (a `Duration` since any
//! origin that stays fixed while the handlespace lives), and a registrar's data on an element beyond identity and
//! policy, such as transport addresses, is a value of any type `T` that is stored with the element.
//!
//! An element is in five sets, and no operation takes time linear in any of them: the index by (handle, id), its pool's
//! selection set, the timers, the group of its pool's elements with the same home registrar, and that registrar's
//! checksum. A new policy takes a few lines in `policy.rs`: a sorting order or a weight, and a selection procedure.
#![forbid(unsafe_code)]

mod checksum;
mod element;
mod element_cursor;
mod element_timers;
mod handlespace;
mod home_registrars;
mod operator_queries;
mod policy;
mod pool;
mod prefetch_announcements;
mod record_index;
mod reregistration;
mod resolve;
mod selection;
mod timers;

pub use element::{ElementKey, ElementRef};
pub use element_cursor::ElementCursor;
pub use handlespace::{Handlespace, RegisterError, RegistrationData, RegistrationOutcome};
pub use policy::{counts_selections, relative_share};
pub use pool::PoolRef;
pub use prefetch_announcements::AnnouncedOperation;
pub use timers::{ExpiredTimer, TimerKind};
