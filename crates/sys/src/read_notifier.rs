//! Readiness of a descriptor in an async program.

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Notifier for a descriptor that becomes readable.
#[derive(Debug)]
pub struct ReadNotifier {
    fd: AsyncFd<OwnedFd>,
}

impl ReadNotifier {
    /// Watches `fd`, a duplicate of the descriptor that is read. Must be called within a tokio runtime with IO.
    ///
    /// # Errors
    /// Errors of `epoll_ctl(2)`.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` gives the same open descriptor from its creation until it is dropped, which `AsyncFd`
        // does after deregistering it.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        Ok(Self {
            fd: fd.map_err(|error| error.into_parts().1)?,
        })
    }

    /// Waits until there is something to read. The caller must then read until nothing is left, because the
    /// notification is edge-triggered.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        self.fd.readable().await?.clear_ready();
        Ok(())
    }
}
