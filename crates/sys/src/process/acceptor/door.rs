//! How open files get from the restorer to husks: over a socket whose other end all husks inherit. No husk may ask for what is the
//! restorer's, as one could that traces it or opens what is in its `/proc/1/fd`.

use crate::fd::{self, send_with_fds};
use crate::process::error::{Context, Result};
use crate::process::files::Stock;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Both ends.
#[derive(Debug)]
pub(super) struct Door {
    ours: OwnedFd,
    theirs: OwnedFd,
}

impl Door {
    /// Out of the way of the tree's descriptors.
    pub fn new() -> Result<Self> {
        let making = || "a socket for descriptors".to_owned();
        let (ours, theirs) = fd::seqpacket_pair().context(making)?;
        // A husk takes what was sent before more is sent than fits.
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(std::io::Error::from)
            .context(making)?;
        Ok(Self {
            ours: Stock::lift_own(ours)?,
            theirs: Stock::lift_own(theirs)?,
        })
    }

    /// The number under which a copy of the restorer has the husks' end.
    pub fn number(&self) -> u32 {
        self.theirs.as_raw_fd().cast_unsigned()
    }

    /// Sends an open file to the husk that receives next.
    pub fn send(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let sent = send_with_fds(self.ours.as_fd(), &[0], &[fd]);
        sent.context(|| "handing over a descriptor".to_owned())
    }
}
