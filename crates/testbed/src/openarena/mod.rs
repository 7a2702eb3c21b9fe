//! OpenArena's dedicated server with players: the load of paper 002 section VI B.
//!
//! The server is Debian's, unmodified; the players are ours and speak its [`protocol`] over UDP. Each player is a
//! machine without IO ([`GameClient`]); [`Players`] gives several of them sockets in hosts of a lab, and a thread.

mod client;
mod player_actions;
mod players;
pub mod protocol;
mod server;
mod trace;

pub use client::{ClientPhase, ClientSettings, GameClient};
pub use players::{PlayerReport, Players, unix_time};
pub use server::{ArenaMatch, GameFiles, parse_missed_datagrams};
pub use trace::{PlayerTrace, SnapshotArrival};
