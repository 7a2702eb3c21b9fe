//! Sans-IO protocol machines, one module each.
//!
//! A machine has no sockets, no threads and no clock. `handle_*` takes an input and the time (a `Duration` since a
//! fixed start, constant during the machine's life). `poll_output` returns the next action for the caller, until it
//! returns none. `poll_timeout` returns the time at which to call `handle_timeout`. Equal inputs always give equal
//! outputs.
//!
//! - [`conductor`]: processes that move until loads are even, and drained nodes;
//! - [`credentials`]: revocation lists that reach all nodes, and certificates that are renewed;
//! - [`element_choice`]: selection of the pool element to use, by latency and probes;
//! - [`enrolment`]: which host gets a certificate for which join token;
//! - [`flow_ownership`]: the compare-and-set that the holder of the steering table applies;
//! - [`greeting`]: comparison of two nodes that connect;
//! - [`handoff`]: how connections move from node to node;
//! - [`health`]: which nodes get new clients, by the health of their servers;
//! - [`machine_output`]: frames, commands and events of `handoff` and `migration` for the daemon;
//! - [`membership`]: how a group runs itself: votes on views, leases, joins;
//! - [`migration`]: how processes move with all their connections;
//! - [`node_pool`]: the shares of new flows that server nodes get by a pool policy;
//! - [`pool_element`]: one server in a pool: its registration, and the control channels to its users;
//! - [`pool_user`]: a client that asks for servers of pools, and keeps sessions with them through failures;
//! - [`registrar`]: a registrar of Reliable Server Pooling;
//! - [`replication`]: which servers a replicated connection has, and which one its client sees;
//! - [`table_rebuild`]: how a new holder learns the owners of all flows;
//! - [`view`]: the nodes of a group and their roles, which the machines take as an input.
#![forbid(unsafe_code)]

pub mod conductor;
pub mod credentials;
pub mod element_choice;
pub mod enrolment;
pub mod flow_ownership;
pub mod greeting;
pub mod handoff;
pub mod health;
mod holder_client;
pub mod machine_output;
pub mod membership;
pub mod migration;
pub mod node_pool;
pub mod pool_element;
pub mod pool_user;
pub mod registrar;
mod registration_life;
pub mod replication;
mod server_hunt;
pub mod table_rebuild;
pub mod view;
