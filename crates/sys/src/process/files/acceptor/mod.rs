//! Restore of a tree's descriptors at the acceptor.

mod arrange;
mod place;
mod stock;
mod update;
mod verify;

pub use arrange::Step;
pub use place::{OwnWatch, Place};
pub use stock::Stock;

use super::image::FileId;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// Resources that are restored elsewhere and handed in.
#[derive(Debug, Default)]
pub struct Given {
    /// TCP and UDP sockets, at any descriptor numbers.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Memory that moves with its mappings, by device and inode at the donor ([`super::image::Content::elsewhere`]),
    /// open for reading and writing.
    pub memory: BTreeMap<(u64, u64), OwnedFd>,
}
