//! The daemon's listening socket for programs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use super::Channel;

/// Accepts sessions at a path. Calls block, unless the descriptor is set non-blocking.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

/// Programs that may wait to be accepted: after a restart of the daemon all of them connect at once.
const LISTEN_BACKLOG: i32 = 1024;

impl Listener {
    /// Listens at `path`, which must not exist: the daemon removes the socket of a dead predecessor, after
    /// checking that the predecessor is dead.
    ///
    /// # Errors
    /// Same as bind(2): `AddrInUse` when the path exists.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path.as_ref())?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        bind(&socket, &address)?;
        listen(&socket, LISTEN_BACKLOG)?;
        Ok(Self { socket })
    }

    /// Accepts the next session. Its channel blocks, even if the listener does not.
    ///
    /// # Errors
    /// Same as accept(2).
    pub fn accept(&self) -> io::Result<Channel> {
        let socket = rustix::io::retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC))?;
        Ok(Channel::from(socket))
    }

    /// Makes [`Listener::accept`] return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Same as ioctl(2).
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.socket, nonblocking)?)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
