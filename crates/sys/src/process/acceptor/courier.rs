//! The daemon's way to a restorer whose tree runs while memory follows it.

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
    /// Says which memory is missing, and follows the tree when it runs; after all other memory. Whoever touches a page of it will
    /// wait.
    ///
    /// # Errors
    /// What the restorer says.
    pub fn missing(&mut self, missing: &Missing) -> Result<()> {
        self.ask(Kind::Missing, &encode(missing)?).map(drop)
    }

    /// What serves the memory that follows the tree, if any does; before [`Restorer::go`].
    ///
    /// # Errors
    /// What the restorer says.
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

/// Dropping it before all is there ends the restorer, and waits until the last of its tree has gone.
#[derive(Debug)]
pub(crate) struct Courier {
    channel: UnixStream,
    restorer: OwnedFd,
    is_done: bool,
}

impl Courier {
    /// By copies of a restorer's channel and of what stands for it.
    pub(super) fn new(channel: &UnixStream, restorer: &OwnedFd) -> io::Result<Self> {
        Ok(Self {
            channel: channel.try_clone()?,
            restorer: restorer.try_clone()?,
            is_done: false,
        })
    }

    /// What stands for the restorer: readable when it has ended.
    pub fn restorer(&self) -> BorrowedFd<'_> {
        self.restorer.as_fd()
    }

    /// Whether it has ended, and the last of its tree with it.
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

    /// Has the restorer keep what watches a child.
    pub fn keep(&mut self, userfault: BorrowedFd<'_>) -> Result<()> {
        let telling = || "telling a restorer of a child".to_owned();
        channel::send::<&[u8]>(&mut self.channel, Kind::Keep, &[]).context(telling)?;
        channel::hand_over(&self.channel, &[userfault]).context(telling)
    }

    /// Nothing is missing any more where this watches, or nobody is there.
    pub fn drop_one(&mut self, number: u64) -> Result<()> {
        let telling = || "telling a restorer what is there".to_owned();
        let number = [number.to_le_bytes()];
        channel::send(&mut self.channel, Kind::Drop, &number).context(telling)
    }

    /// Nothing is missing any more.
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
