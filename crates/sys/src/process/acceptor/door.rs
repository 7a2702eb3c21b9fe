//! Socket pair over which the restorer passes open files to empty processes. All of them inherit the other end. The
//! restorer sends the files, so that no empty process needs access to the restorer: a process that could trace the
//! restorer, or open entries of its `/proc/1/fd`, could take any of the restorer's files.

use crate::fd::{self, send_with_fds};
use crate::process::error::{Context, Result};
use crate::process::files::Stock;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Both ends of the socket pair.
#[derive(Debug)]
pub(super) struct Door {
    ours: OwnedFd,
    theirs: OwnedFd,
}

impl Door {
    /// Creates the pair under numbers out of the way of the tree's descriptors.
    pub fn new() -> Result<Self> {
        let making = || "a socket for descriptors".to_owned();
        let (ours, theirs) = fd::seqpacket_pair().context(making)?;
        // Non-blocking: an empty process takes the sent files before the socket is full.
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(std::io::Error::from)
            .context(making)?;
        Ok(Self {
            ours: Stock::lift_own(ours)?,
            theirs: Stock::lift_own(theirs)?,
        })
    }

    /// Returns the number of the empty processes' end in a copy of the restorer.
    pub fn number(&self) -> u32 {
        self.theirs.as_raw_fd().cast_unsigned()
    }

    /// Sends an open file to the empty process that receives next.
    pub fn send(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let sent = send_with_fds(self.ours.as_fd(), &[0], &[fd]);
        sent.context(|| "handing over a descriptor".to_owned())
    }
}
