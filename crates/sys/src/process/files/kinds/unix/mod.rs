//! Unix sockets: save at the donor, restore at the acceptor.

mod address;
mod diag;
mod naming;
mod peer_credentials;
mod queue;
mod restore;
mod save;
mod staging;

pub use diag::DiagSockets;
pub use queue::peek;
pub use restore::{apply_options_and_shutdown, fill, make};
pub use save::save;
pub use staging::StagingDirectory;
