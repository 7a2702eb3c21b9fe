//! Descriptors of a tree's processes by number, for processes that do not share the store's table.

use super::fd_store::FdStore;
use crate::files::image::{FileId, OpenFileKind};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A descriptor of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorTableSlot {
    /// Descriptor number in the tree.
    pub number: u32,
    /// Close-on-exec flag (`FD_CLOEXEC`).
    pub close_on_exec: bool,
    /// Number of the open file in the store.
    pub store_fd: u32,
    /// Open file, and number of times that it was made: equal only for the same file.
    pub identity: (FileId, u32),
}

/// An entry of an epoll set that only a process of the tree itself can add: the kernel ties the entry to the
/// process that adds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InProcessWatch {
    /// Descriptor number of the set.
    pub set: u32,
    /// Watched descriptor number.
    pub fd: u32,
    /// Event mask and mode flags.
    pub events: u32,
    /// Data word that the program attached (`epoll_data`).
    pub data: u64,
}

impl FdStore {
    /// Returns the descriptors of a table, by number. Descriptors of open files that are not made yet are left out.
    #[must_use]
    pub fn table_slots(&self, table: u32) -> Vec<DescriptorTableSlot> {
        let slots = self.image.tables.get(&table).map(|table| &table.slots);
        let slots = slots.into_iter().flatten();
        let place = |(number, slot): (&u32, &crate::files::image::DescriptorSlot)| {
            let fd = self.files.get(&slot.file)?;
            let version = self.versions.get(&slot.file).copied().unwrap_or(0);
            Some(DescriptorTableSlot {
                number: *number,
                close_on_exec: slot.close_on_exec,
                store_fd: fd.as_raw_fd() as u32,
                identity: (slot.file, version),
            })
        };
        slots.filter_map(place).collect()
    }

    /// Returns the entries of epoll sets that a process with this table must add itself.
    #[must_use]
    pub fn in_process_watches(&self, table: u32) -> Vec<InProcessWatch> {
        let mut watches_found = Vec::new();
        let Some(slots) = self.image.tables.get(&table).map(|table| &table.slots) else {
            return watches_found;
        };
        let mut files = self.image.files.values();
        if !files.any(|file| matches!(file.kind, OpenFileKind::Signal { .. })) {
            return watches_found;
        }
        let is_signals = |file| matches!(self.kind(file), Some(OpenFileKind::Signal { .. }));
        for (set, slot) in slots {
            let Some(OpenFileKind::Epoll { watches }) = self.kind(slot.file) else {
                continue;
            };
            let is_in_store = |fd, file| slots.get(&fd).is_some_and(|slot| slot.file == file);
            let is_in_table = watches
                .iter()
                .filter(|watch| is_signals(watch.file) && is_in_store(watch.fd, watch.file));
            watches_found.extend(is_in_table.map(|watch| InProcessWatch {
                set: *set,
                fd: watch.fd,
                events: watch.events,
                data: watch.data,
            }));
        }
        watches_found
    }

    /// Returns an open file of the image.
    #[must_use]
    pub fn file(&self, id: FileId) -> Option<BorrowedFd<'_>> {
        self.get(id).ok()
    }

    fn kind(&self, id: FileId) -> Option<&OpenFileKind> {
        self.image.files.get(&id).map(|file| &file.kind)
    }
}
