//! The daemon's connection to a restorer during post-copy.

use super::restorer::Restorer;
use super::restorer_channel::{self, RestorerMessageKind, RestorerReply};
use crate::error::{Context, Result};
use crate::image::{MissingPages, encode};
use crate::postcopy::LazyPages;
use rustix::process::{Signal, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

impl Restorer {
    /// Announces the memory that post-copy will deliver after the tree resumed, behind all other memory. A
    /// thread that touches a missing page waits for it.
    ///
    /// # Errors
    /// The restorer's error.
    pub fn announce_missing(&mut self, missing: &MissingPages) -> Result<()> {
        self.request(RestorerMessageKind::MissingPages, &encode(missing)?)
            .map(drop)
    }

    /// Returns the server for the tree's lazy pages, if there are any. Call this before [`Restorer::resume`].
    ///
    /// # Errors
    /// The restorer's error.
    pub fn open_lazy_pages(&mut self) -> Result<Option<LazyPages>> {
        let RestorerReply::MissingPages(missing) =
            self.request(RestorerMessageKind::GetUserfaults, &[])?
        else {
            return Ok(None);
        };
        let talking = || format!("communicating with restorer {}", self.pid());
        let count = missing.processes.len();
        if count == 0 {
            return Ok(None);
        }
        let userfaults =
            restorer_channel::receive_descriptors(&self.channel, count).context(talking)?;
        let courier = RestorerLink::new(&self.channel, &self.process).context(talking)?;
        LazyPages::new(&missing, userfaults, courier).map(Some)
    }
}

/// Connection to a restorer. Dropping it before all pages are present kills the restorer and waits until its tree has
/// ended.
#[derive(Debug)]
pub(crate) struct RestorerLink {
    channel: UnixStream,
    pidfd: OwnedFd,
    is_complete: bool,
}

impl RestorerLink {
    /// Creates a connection from copies of a restorer's channel and PID file descriptor.
    pub(super) fn new(channel: &UnixStream, pidfd: &OwnedFd) -> io::Result<Self> {
        Ok(Self {
            channel: channel.try_clone()?,
            pidfd: pidfd.try_clone()?,
            is_complete: false,
        })
    }

    /// Returns the restorer's PID file descriptor, which is readable when the restorer has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns true if the restorer and all processes of its tree have ended.
    pub fn has_ended(&self) -> bool {
        self.poll(0)
    }

    fn poll(&self, limit_ms: i32) -> bool {
        let mut poll = libc::pollfd {
            fd: self.pidfd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure, writable for the call.
        unsafe { libc::poll(&raw mut poll, 1, limit_ms) == 1 }
    }

    /// Gives the restorer a copy of the descriptor that watches a child.
    pub fn send_userfault(&mut self, userfault: BorrowedFd<'_>) -> Result<()> {
        let telling = || "passing a child's userfaultfd to the restorer".to_owned();
        restorer_channel::send::<&[u8]>(&mut self.channel, RestorerMessageKind::KeepUserfault, &[])
            .context(telling)?;
        restorer_channel::send_descriptors(&self.channel, &[userfault]).context(telling)
    }

    /// Lets the restorer close its copy of a descriptor: no page is missing there, or the process has ended.
    pub fn release_userfault(&mut self, number: u64) -> Result<()> {
        let telling = || "releasing a userfaultfd in the restorer".to_owned();
        let number = [number.to_le_bytes()];
        restorer_channel::send(
            &mut self.channel,
            RestorerMessageKind::DropUserfault,
            &number,
        )
        .context(telling)
    }

    /// Tells the restorer that no page is missing.
    pub fn report_complete(&mut self) -> Result<()> {
        self.is_complete = true;
        let telling = || "reporting the end of post-copy to the restorer".to_owned();
        restorer_channel::send::<&[u8]>(
            &mut self.channel,
            RestorerMessageKind::PostcopyComplete,
            &[],
        )
        .context(telling)
    }
}

impl Drop for RestorerLink {
    fn drop(&mut self) {
        if self.is_complete || self.has_ended() {
            return;
        }
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        while !self.poll(-1) {}
    }
}
