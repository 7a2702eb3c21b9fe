//! Unix sockets: save at the donor, restore at the acceptor.

mod address;
mod list;
mod naming;
mod peer;
mod queue;
mod restore;
mod save;
mod stage;

pub use list::Listed;
pub use queue::peek;
pub use restore::{fill, make, settle};
pub use save::save;
pub use stage::Stage;
