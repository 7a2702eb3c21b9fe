//! Socket pair over which the restorer passes open files to stub processes. All of them inherit the other end. The
//! restorer sends the files, so that no stub process needs access to the restorer: a process that could trace the
//! restorer, or open entries of its `/proc/1/fd`, could take any of the restorer's files.

use crate::error::{Context, Result};
use crate::files::FdStore;
use holdfast_sys::fd_passing::{self, send_with_fds};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Both ends of the socket pair.
#[derive(Debug)]
pub(super) struct FdChannel {
    sender: OwnedFd,
    receiver: OwnedFd,
}

impl FdChannel {
    /// Creates the pair under numbers out of the way of the tree's descriptors.
    pub fn new() -> Result<Self> {
        let making = || "creating a socket pair for descriptors".to_owned();
        let (ours, theirs) = fd_passing::seqpacket_pair().context(making)?;
        // Non-blocking: a stub process takes the sent files before the socket is full.
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(std::io::Error::from)
            .context(making)?;
        Ok(Self {
            sender: FdStore::move_caller_fd_up(ours)?,
            receiver: FdStore::move_caller_fd_up(theirs)?,
        })
    }

    /// Returns the number of the stub processes' end in a copy of the restorer.
    pub fn receiver_number(&self) -> u32 {
        self.receiver.as_raw_fd().cast_unsigned()
    }

    /// Sends an open file to the stub process that receives next.
    pub fn send_fd(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let sent = send_with_fds(self.sender.as_fd(), &[0], &[fd]);
        sent.context(|| "passing a descriptor".to_owned())
    }
}
