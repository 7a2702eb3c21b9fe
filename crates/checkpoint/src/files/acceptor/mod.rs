//! Restore of a tree's descriptors at the acceptor.

mod fd_store;
mod fd_store_update;
mod named_file_check;
mod table_slots;
mod table_steps;

pub use fd_store::FdStore;
pub use table_slots::{DescriptorTableSlot, InProcessWatch};
pub use table_steps::DescriptorTableStep;

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
