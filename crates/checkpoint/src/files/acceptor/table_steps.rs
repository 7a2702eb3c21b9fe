//! Arranging the descriptors of a process at their numbers.

use super::fd_store::FdStore;
use crate::files::error::{FilesError, StepContext};
use crate::files::image::{FileId, FileLock, FilesImage, LockHolder, ObjectId};
use crate::files::kinds::locks;
use crate::files::syscalls;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// A step that turns a copy of the store's table, which the process must have, into the process's own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DescriptorTableStep {
    /// Duplicates a descriptor (`dup3`), or sets its flag (`F_SETFD`) if both numbers are equal.
    Duplicate {
        /// Number to duplicate.
        from: u32,
        /// Target number; a descriptor there is replaced.
        to: u32,
        /// Close-on-exec flag (`FD_CLOEXEC`) of the target.
        close_on_exec: bool,
    },
    /// Closes a range of descriptors (`close_range`).
    Close {
        /// First number.
        first: u32,
        /// Last number.
        last: u32,
    },
}

impl DescriptorTableStep {
    /// Runs the step in the calling process.
    ///
    /// # Errors
    /// [`FilesError::Kernel`].
    pub fn run(self) -> Result<(), FilesError> {
        match self {
            Self::Duplicate {
                from,
                to,
                close_on_exec,
            } => syscalls::duplicate_to(from as RawFd, to, close_on_exec).with_step("dup3"),
            Self::Close { first, last } => {
                syscalls::close_range(first, last).with_step("close_range")
            }
        }
    }
}

impl FdStore {
    /// Returns the steps that turn a copy of the store's table into the table `table` of the tree: every number below
    /// [`FdStore::caller_fd_floor`] is then as at the donor, or closed. Processes that share the store's table while it is
    /// filled (`CLONE_FILES`) get a table of their own first (`unshare(2)`).
    ///
    /// # Errors
    /// [`FilesError::Refused`] for a file that was not made, or numbers that are too high.
    pub fn table_steps(&self, table: u32) -> Result<Vec<DescriptorTableStep>, FilesError> {
        let lowest_free = Self::caller_fd_floor()?;
        let empty = BTreeMap::new();
        let slots = self
            .image
            .tables
            .get(&table)
            .map_or(&empty, |table| &table.slots);
        let mut current: BTreeMap<FileId, u32> = BTreeMap::new();
        for (id, fd) in &self.files {
            current.insert(*id, fd.as_raw_fd() as u32);
        }
        let used = slots.keys().chain(current.values());
        let mut free = used.max().map_or(0, |last| last + 1);
        let mut steps = Vec::new();
        // A file at a number where another file belongs is moved aside.
        for (id, number) in &mut current {
            if slots.get(number).is_some_and(|slot| slot.file != *id) {
                steps.push(DescriptorTableStep::Duplicate {
                    from: *number,
                    to: free,
                    close_on_exec: true,
                });
                *number = free;
                free += 1;
            }
        }
        let too_many_error = || super::super::error::FilesRefusal::TooMany(u64::from(free));
        if free > lowest_free {
            return Err(too_many_error().into());
        }
        for (number, slot) in slots {
            let from = *current.get(&slot.file).ok_or_else(too_many_error)?;
            if from != *number || !slot.close_on_exec {
                steps.push(DescriptorTableStep::Duplicate {
                    from,
                    to: *number,
                    close_on_exec: slot.close_on_exec,
                });
            }
        }
        let mut first = 0;
        for number in slots.keys().copied().chain([lowest_free]) {
            if number > first {
                let last = number - 1;
                steps.push(DescriptorTableStep::Close { first, last });
            }
            first = number + 1;
        }
        Ok(steps)
    }

    /// Turns the calling process's table into the table `table` of the tree.
    ///
    /// # Errors
    /// Same as [`Self::table_steps`]; [`FilesError::Kernel`], after which the table is unusable.
    pub fn install_table(mut self, table: u32) -> Result<FilesImage, FilesError> {
        let steps = self.table_steps(table)?;
        self.leave_all_open();
        steps.into_iter().try_for_each(DescriptorTableStep::run)?;
        Ok(std::mem::take(&mut self.image))
    }
}

impl FilesImage {
    /// Returns the locks that a process with this table must take, by descriptor. A lock of an open file that is in
    /// several tables belongs to the first table.
    #[must_use]
    pub fn locks(&self, table: u32) -> Vec<(u32, FileLock)> {
        let mut locks_by_fd = Vec::new();
        for (id, file) in self.files.iter().filter(|(_, file)| !file.locks.is_empty()) {
            let slot_in = |table: u32| {
                let slots = &self.tables.get(&table)?.slots;
                let slot = slots.iter().find(|(_, slot)| slot.file == *id);
                slot.map(|(fd, _)| *fd)
            };
            let first = self.tables.keys().find(|table| slot_in(**table).is_some());
            for lock in &file.locks {
                let takes_lock = match lock.holder {
                    LockHolder::Table(holder) => holder == table,
                    LockHolder::Flock | LockHolder::OpenFile => first == Some(&table),
                };
                if let (true, Some(fd)) = (takes_lock, slot_in(table)) {
                    locks_by_fd.push((fd, *lock));
                }
            }
        }
        locks_by_fd
    }

    /// Takes all locks of this table in a process with this table, after the donor has released them.
    ///
    /// # Errors
    /// [`FilesError::Kernel`] if another process has taken a lock meanwhile.
    pub fn take_locks(&self, table: u32) -> Result<(), FilesError> {
        for (fd, lock) in self.locks(table) {
            // SAFETY: the number belongs to the tree's table, which this process has, and is used only here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd as RawFd) };
            locks::take(fd, &lock)?;
        }
        Ok(())
    }

    /// Returns the controlling terminal of the session that `pid` leads, and its foreground group. The process takes
    /// the terminal with `TIOCSCTTY` and `TIOCSPGRP`, through any descriptor of its slave.
    #[must_use]
    pub fn controlling_terminal(&self, pid: i32) -> Option<(ObjectId, i32)> {
        self.terminals.iter().find_map(|(number, terminal)| {
            let (session, group) = terminal.session?;
            (session == pid).then_some((*number, group))
        })
    }
}
