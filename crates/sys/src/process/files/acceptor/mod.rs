//! Restore of a tree's descriptors at the acceptor.

mod fd_store;
mod table_slots;
mod table_steps;
mod update;
mod verify;

pub use fd_store::FdStore;
pub use table_slots::{InProcessWatch, TableSlot};
pub use table_steps::TableStep;

use super::image::FileId;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// Resources that are restored elsewhere and handed in.
#[derive(Debug, Default)]
pub struct ProvidedFiles {
    /// TCP and UDP sockets, at any descriptor numbers.
    pub sockets: BTreeMap<FileId, OwnedFd>,
    /// Memory that moves with its mappings, by device and inode at the donor ([`super::image::NamelessContent::mapped_memory`]),
    /// open for reading and writing.
    pub memory: BTreeMap<(u64, u64), OwnedFd>,
}
