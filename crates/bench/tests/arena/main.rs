//! OpenArena's dedicated server with players that speak its protocol, as the load for migrations.

mod codec;
mod play;
