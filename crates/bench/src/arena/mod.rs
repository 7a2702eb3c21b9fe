//! OpenArena's dedicated server with players: the load of paper 002 section VI B.
//!
//! The server is Debian's, unmodified; the players are ours and speak its [`protocol`] over UDP. Each player is a
//! machine without IO ([`Client`]); [`Players`] gives several of them sockets in hosts of a lab, and a thread.

mod client;
mod player_actions;
mod players;
pub mod protocol;
mod server;
mod trace;

pub use client::{Client, Phase, Settings};
pub use players::{PlayerReport, Players, now};
pub use server::{ArenaMatch, GameFiles, count_missed};
pub use trace::{Arrival, Trace};
