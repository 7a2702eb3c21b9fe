//! Random and mutated input for every parser; see README.md.
#![forbid(unsafe_code)]

pub mod arena;
pub mod asap_stream;
pub mod conductor;
pub mod datagram;
pub mod dns;
pub mod driver;
pub mod enrolment;
pub mod flow;
pub mod frame;
pub mod group_settings;
pub mod handoff;
pub mod image;
pub mod membership;
pub mod migration_messages;
mod mutate;
pub mod packet;
pub mod pool_messages;
pub mod program_messages;
pub mod registrar;
pub mod replication;
pub mod rserpool;
pub mod saved_membership;
pub mod socket_state;
pub mod vdso;
pub mod vnet_header;
