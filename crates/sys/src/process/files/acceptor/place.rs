//! What a process of the tree is to have at which number, for processes that stay apart from the stock.

use super::stock::Stock;
use crate::process::files::image::{FileId, Kind};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A descriptor of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number in the tree.
    pub number: u32,
    /// `FD_CLOEXEC`.
    pub close_on_exec: bool,
    /// Where the stock has the open file.
    pub from: u32,
    /// Which open file it is, and how often that was made: equal for the same.
    pub identity: (FileId, u32),
}

/// An entry of an epoll set that only a process of the tree itself can make: the kernel ties it to who makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnWatch {
    /// The set's number.
    pub set: u32,
    /// The watched number.
    pub fd: u32,
    /// Events and modes.
    pub events: u32,
    /// What the program gets back.
    pub data: u64,
}

impl Stock {
    /// The descriptors of a table, by number. Those whose open files are still to come are left out.
    #[must_use]
    pub fn places(&self, table: u32) -> Vec<Place> {
        let slots = self.image.tables.get(&table).map(|table| &table.slots);
        let slots = slots.into_iter().flatten();
        let place = |(number, slot): (&u32, &crate::process::files::image::Slot)| {
            let fd = self.files.get(&slot.file)?;
            let version = self.versions.get(&slot.file).copied().unwrap_or(0);
            Some(Place {
                number: *number,
                close_on_exec: slot.close_on_exec,
                from: fd.as_raw_fd() as u32,
                identity: (slot.file, version),
            })
        };
        slots.filter_map(place).collect()
    }

    /// Entries of epoll sets that a process with this table must make again itself.
    #[must_use]
    pub fn own_watches(&self, table: u32) -> Vec<OwnWatch> {
        let mut found = Vec::new();
        let Some(slots) = self.image.tables.get(&table).map(|table| &table.slots) else {
            return found;
        };
        let mut files = self.image.files.values();
        if !files.any(|file| matches!(file.kind, Kind::Signal { .. })) {
            return found;
        }
        let is_signals = |file| matches!(self.kind(file), Some(Kind::Signal { .. }));
        for (set, slot) in slots {
            let Some(Kind::Epoll { watches }) = self.kind(slot.file) else {
                continue;
            };
            let at_hand = |fd, file| slots.get(&fd).is_some_and(|slot| slot.file == file);
            let mine = watches
                .iter()
                .filter(|watch| is_signals(watch.file) && at_hand(watch.fd, watch.file));
            found.extend(mine.map(|watch| OwnWatch {
                set: *set,
                fd: watch.fd,
                events: watch.events,
                data: watch.data,
            }));
        }
        found
    }

    /// An open file of the image.
    #[must_use]
    pub fn file(&self, id: FileId) -> Option<BorrowedFd<'_>> {
        self.get(id).ok()
    }

    fn kind(&self, id: FileId) -> Option<&Kind> {
        self.image.files.get(&id).map(|file| &file.kind)
    }
}
