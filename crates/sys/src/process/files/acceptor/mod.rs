//! Making the descriptors of a tree at the acceptor.

mod arrange;
mod stock;
mod update;
mod verify;

pub use arrange::Step;
pub use stock::Stock;

use super::image::FileId;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// TCP and UDP sockets by the number of their open file.
pub type Sockets = BTreeMap<FileId, OwnedFd>;
