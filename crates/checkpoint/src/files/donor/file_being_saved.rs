//! An open file that is being saved.

use crate::files::fdinfo::FdInfo;
use crate::files::image::{FilePath, OpenFile};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// An open file that is being saved, and its known properties.
#[derive(Debug)]
pub struct FileBeingSaved {
    /// Private copy of the descriptor, closed when this value is dropped.
    pub copy: OwnedFd,
    /// Target of the link `/proc/PID/fd/N`, as text.
    pub link: String,
    /// The same target as raw bytes.
    pub path: FilePath,
    /// Fields of `fdinfo`.
    pub info: FdInfo,
    /// Index of the file among the open files of the tree.
    pub open_file_index: usize,
    /// State of the file in the files snapshot.
    pub previous: Option<OpenFile>,
}

impl FileBeingSaved {
    /// Returns the private copy of the descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.copy.as_fd()
    }

    /// Returns the path by which the copy can be reopened.
    pub fn reopen_path(&self) -> String {
        format!("/proc/self/fd/{}", self.copy.as_raw_fd())
    }
}
