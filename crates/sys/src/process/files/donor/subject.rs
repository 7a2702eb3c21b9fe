//! An open file and what is known of it.

use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{FilePath, OpenFile};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// An open file that is being saved.
#[derive(Debug)]
pub struct Subject {
    /// A copy of our own; gone when this is.
    pub copy: OwnedFd,
    /// What `/proc/PID/fd` shows, as text.
    pub link: String,
    /// The same as it is.
    pub path: FilePath,
    /// `fdinfo`.
    pub info: FdInfo,
    /// Which, in the pool.
    pub class: usize,
    /// As it was in the draft.
    pub before: Option<OpenFile>,
}

impl Subject {
    /// The copy.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.copy.as_fd()
    }

    /// The path by which the copy can be opened anew.
    pub fn reopen_path(&self) -> String {
        format!("/proc/self/fd/{}", self.copy.as_raw_fd())
    }
}
