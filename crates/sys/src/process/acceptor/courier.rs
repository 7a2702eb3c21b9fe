//! The daemon's connection to a restorer during post-copy.

use super::channel::{self, Kind, Reply};
use super::remote::Restorer;
use crate::process::error::{Context, Result};
use crate::process::following::Following;
use crate::process::image::{Missing, encode};
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
    pub fn missing(&mut self, missing: &Missing) -> Result<()> {
        self.ask(Kind::Missing, &encode(missing)?).map(drop)
    }

    /// Returns the server for the tree's lazy pages, if there are any. Call this before [`Restorer::go`].
    ///
    /// # Errors
    /// The restorer's error.
    pub fn follow(&mut self) -> Result<Option<Following>> {
        let Reply::Following(missing) = self.ask(Kind::Follow, &[])? else {
            return Ok(None);
        };
        let talking = || format!("talking to restorer {}", self.pid());
        let count = missing.processes.len();
        if count == 0 {
            return Ok(None);
        }
        let userfaults = channel::take_over(&self.channel, count).context(talking)?;
        let courier = Courier::new(&self.channel, &self.process).context(talking)?;
        Following::new(&missing, userfaults, courier).map(Some)
    }
}

/// Connection to a restorer. Dropping it before all pages are present kills the restorer and waits until its tree has
/// ended.
#[derive(Debug)]
pub(crate) struct Courier {
    channel: UnixStream,
    restorer: OwnedFd,
    is_done: bool,
}

impl Courier {
    /// Creates a connection from copies of a restorer's channel and PID file descriptor.
    pub(super) fn new(channel: &UnixStream, restorer: &OwnedFd) -> io::Result<Self> {
        Ok(Self {
            channel: channel.try_clone()?,
            restorer: restorer.try_clone()?,
            is_done: false,
        })
    }

    /// Returns the restorer's PID file descriptor, which is readable when the restorer has ended.
    pub fn restorer(&self) -> BorrowedFd<'_> {
        self.restorer.as_fd()
    }

    /// Returns true if the restorer and all processes of its tree have ended.
    pub fn has_ended(&self) -> bool {
        self.poll(0)
    }

    fn poll(&self, limit_ms: i32) -> bool {
        let mut poll = libc::pollfd {
            fd: self.restorer.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure, writable for the call.
        unsafe { libc::poll(&raw mut poll, 1, limit_ms) == 1 }
    }

    /// Gives the restorer a copy of the descriptor that watches a child.
    pub fn keep(&mut self, userfault: BorrowedFd<'_>) -> Result<()> {
        let telling = || "telling a restorer of a child".to_owned();
        channel::send::<&[u8]>(&mut self.channel, Kind::Keep, &[]).context(telling)?;
        channel::hand_over(&self.channel, &[userfault]).context(telling)
    }

    /// Lets the restorer close its copy of a descriptor: no page is missing there, or the process has ended.
    pub fn drop_one(&mut self, number: u64) -> Result<()> {
        let telling = || "telling a restorer what is there".to_owned();
        let number = [number.to_le_bytes()];
        channel::send(&mut self.channel, Kind::Drop, &number).context(telling)
    }

    /// Tells the restorer that no page is missing.
    pub fn complete(&mut self) -> Result<()> {
        self.is_done = true;
        let telling = || "telling a restorer that all is there".to_owned();
        channel::send::<&[u8]>(&mut self.channel, Kind::Complete, &[]).context(telling)
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        if self.is_done || self.has_ended() {
            return;
        }
        let _ = pidfd_send_signal(&self.restorer, Signal::KILL);
        while !self.poll(-1) {}
    }
}
