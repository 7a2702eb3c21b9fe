//! OpenArena's dedicated server with players that speak its protocol: a load for migrations.

mod codec;
mod real_server;
