//! Simulation of the `holdfast-proto` state machines in virtual time.
//!
//! A simulation is a [`FutureEvents`] of events and a world that handles them in order. Time advances only from event to
//! event, and all randomness comes from one [`Random`]: so one seed has one outcome, and a simulated year may take a
//! second.
//!
//! - [`zone_network`]: links with delay, rate, loss, reordering and duplication, between zones that partitions can separate;
//! - [`associations`]: associations like SCTP's between the nodes of a world;
//! - [`server_capacity`]: a server that shares its capacity among concurrent requests;
//! - [`pools`]: registrars, pool elements and pool users, with the daemons' own state machines, under the load of paper
//!   004;
//! - [`pool_faults`]: random faults of pools, after which all invariants must hold again;
//! - [`handoff`], [`migration`]: groups of nodes that move flows and processes while daemons die and channels break;
//!   the common part is [`node_group`];
//! - [`conductor`]: groups that even out their loads;
//! - [`membership`]: groups that run themselves: votes on views, leases, joins;
//! - [`replication`]: a replicated service whose servers, links and contact node fail;
//! - [`scenario`]: simulations described in text;
//! - [`seeds`]: one simulation with many seeds in parallel, summarised by an [`Estimate`].
#![forbid(unsafe_code)]

pub mod associations;
pub mod bug_names;
pub mod conductor;
mod estimate;
mod event_queue;
pub mod handoff;
mod machine_timer;
pub mod membership;
pub mod migration;
pub mod node_group;
pub mod pool_faults;
pub mod pools;
mod random;
pub mod replication;
pub mod scenario;
pub mod seeds;
pub mod server_capacity;
mod shrink;
mod time;
mod violation;
pub mod zone_network;

pub use estimate::Estimate;
pub use event_queue::FutureEvents;
pub use machine_timer::MachineTimer;
pub use random::Random;
pub use time::Time;
pub use violation::Violation;
