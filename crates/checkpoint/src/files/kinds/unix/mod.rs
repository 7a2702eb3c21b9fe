//! Unix sockets: save at the donor, restore at the acceptor.

mod address;
mod diag;
mod naming;
mod peer_credentials;
mod receive_queue;
mod restore;
mod save;
mod staging_directory;

pub use diag::DiagSockets;
pub use receive_queue::peek;
pub use restore::{apply_options_and_shutdown, fill_receive_queues, make_socket};
pub use save::save;
pub use staging_directory::StagingDirectory;
