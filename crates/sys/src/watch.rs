//! Waiting for a descriptor in an async program.

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Tells when a descriptor can be read.
#[derive(Debug)]
pub struct Watch {
    fd: AsyncFd<OwnedFd>,
}

impl Watch {
    /// Watches `fd`, a duplicate of the descriptor that is read. Call within a tokio runtime with IO.
    ///
    /// # Errors
    /// What `epoll_ctl(2)` gives.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` gives the same open descriptor from its creation until it is dropped, which `AsyncFd`
        // does after deregistering it.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        Ok(Self {
            fd: fd.map_err(|error| error.into_parts().1)?,
        })
    }

    /// Waits until there is something to read. Whoever is told must read until nothing is left: it is told once.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        self.fd.readable().await?.clear_ready();
        Ok(())
    }
}
