//! Giving a process its descriptors at their numbers.

use super::stock::Stock;
use crate::process::files::error::{At, FilesError};
use crate::process::files::image::{FileId, Image, Lock, LockHolder, ObjectId};
use crate::process::files::kinds::locks;
use crate::process::files::raw;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// A step on the way from the stock to a process's own table. The process must have a copy of the stock's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// `dup3`, or `F_SETFD` where both numbers are the same.
    Place {
        /// This one …
        from: u32,
        /// … at this number, whatever is there.
        to: u32,
        /// `FD_CLOEXEC`.
        close_on_exec: bool,
    },
    /// `close_range`.
    Close {
        /// First …
        first: u32,
        /// … and last number.
        last: u32,
    },
}

impl Step {
    /// Does it in the calling process.
    ///
    /// # Errors
    /// [`FilesError::Kernel`].
    pub fn run(self) -> Result<(), FilesError> {
        match self {
            Self::Place {
                from,
                to,
                close_on_exec,
            } => raw::place(from as RawFd, to, close_on_exec).at("dup3"),
            Self::Close { first, last } => raw::close_range(first, last).at("close_range"),
        }
    }
}

impl Stock {
    /// What turns a copy of the stock's table into the table `table` of the tree: every number below
    /// [`Stock::callers_floor`] is as it was at the donor, or closed. Processes that share the stock's table while it is
    /// filled (`CLONE_FILES`) make it their own first (`unshare(2)`).
    ///
    /// # Errors
    /// [`FilesError::Refused`] for a file that was not made, or numbers that are too high.
    pub fn arrangement(&self, table: u32) -> Result<Vec<Step>, FilesError> {
        let top = Self::callers_floor()?;
        let nothing = BTreeMap::new();
        let slots = self
            .image
            .tables
            .get(&table)
            .map_or(&nothing, |table| &table.slots);
        let mut now: BTreeMap<FileId, u32> = BTreeMap::new();
        for (id, fd) in &self.files {
            now.insert(*id, fd.as_raw_fd() as u32);
        }
        let used = slots.keys().chain(now.values());
        let mut free = used.max().map_or(0, |last| last + 1);
        let mut steps = Vec::new();
        // What stands where another file belongs steps aside.
        for (id, number) in &mut now {
            if slots.get(number).is_some_and(|slot| slot.file != *id) {
                steps.push(Step::Place {
                    from: *number,
                    to: free,
                    close_on_exec: true,
                });
                *number = free;
                free += 1;
            }
        }
        let too_many = || super::super::error::Refusal::TooMany(u64::from(free));
        if free > top {
            return Err(too_many().into());
        }
        for (number, slot) in slots {
            let from = *now.get(&slot.file).ok_or_else(too_many)?;
            if from != *number || !slot.close_on_exec {
                steps.push(Step::Place {
                    from,
                    to: *number,
                    close_on_exec: slot.close_on_exec,
                });
            }
        }
        let mut first = 0;
        for number in slots.keys().copied().chain([top]) {
            if number > first {
                let last = number - 1;
                steps.push(Step::Close { first, last });
            }
            first = number + 1;
        }
        Ok(steps)
    }

    /// Turns the calling process's table into the table `table` of the tree.
    ///
    /// # Errors
    /// As [`Self::arrangement`]; [`FilesError::Kernel`], after which the table is of no use.
    pub fn arrange(mut self, table: u32) -> Result<Image, FilesError> {
        let steps = self.arrangement(table)?;
        self.forget();
        steps.into_iter().try_for_each(Step::run)?;
        Ok(std::mem::take(&mut self.image))
    }
}

impl Image {
    /// Locks that a process with this table must take, by descriptor. Those of open files that several tables have are
    /// taken by the first.
    #[must_use]
    pub fn locks(&self, table: u32) -> Vec<(u32, Lock)> {
        let mut found = Vec::new();
        for (id, file) in self.files.iter().filter(|(_, file)| !file.locks.is_empty()) {
            let slot_in = |table: u32| {
                let slots = &self.tables.get(&table)?.slots;
                let slot = slots.iter().find(|(_, slot)| slot.file == *id);
                slot.map(|(fd, _)| *fd)
            };
            let first = self.tables.keys().find(|table| slot_in(**table).is_some());
            for lock in &file.locks {
                let takes = match lock.holder {
                    LockHolder::Table(holder) => holder == table,
                    LockHolder::Flock | LockHolder::OpenFile => first == Some(&table),
                };
                if let (true, Some(fd)) = (takes, slot_in(table)) {
                    found.push((fd, *lock));
                }
            }
        }
        found
    }

    /// Takes all locks that a process with this table had, from that process, when the donor has given them up.
    ///
    /// # Errors
    /// [`FilesError::Kernel`] when somebody else has taken one meanwhile.
    pub fn take_locks(&self, table: u32) -> Result<(), FilesError> {
        for (fd, lock) in self.locks(table) {
            // SAFETY: the number belongs to the tree, whose table this process has, and is used only here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd as RawFd) };
            locks::take(fd, &lock)?;
        }
        Ok(())
    }

    /// The terminal by which the session that `pid` leads is controlled, and its foreground group. The process takes it with
    /// `TIOCSCTTY` and `TIOCSPGRP`, by any descriptor of its slave.
    #[must_use]
    pub fn controlling_terminal(&self, pid: i32) -> Option<(ObjectId, i32)> {
        self.terminals.iter().find_map(|(number, terminal)| {
            let (session, group) = terminal.session?;
            (session == pid).then_some((*number, group))
        })
    }
}
