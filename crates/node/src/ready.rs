//! Waiting for a descriptor that tokio has no type for, without unsafe code.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;

use tokio::io::Interest;
use tokio::net::UnixStream;

/// A socket in non-blocking mode, and a duplicate of its descriptor that tokio waits on.
///
/// The duplicate has the type of a stream whatever the socket is: only its registration is used, never its reads.
pub(crate) struct Ready<T> {
    socket: T,
    registration: UnixStream,
}

impl<T: AsFd> Ready<T> {
    /// `socket` must be in non-blocking mode.
    pub(crate) fn new(socket: T) -> io::Result<Ready<T>> {
        let duplicate = socket.as_fd().try_clone_to_owned()?;
        let registration = UnixStream::from_std(StdStream::from(duplicate))?;
        Ok(Ready {
            socket,
            registration,
        })
    }

    pub(crate) fn get(&self) -> &T {
        &self.socket
    }

    /// The result of `read` as soon as it is not `WouldBlock`.
    pub(crate) async fn read<R>(&self, read: impl Fn(&T) -> io::Result<R>) -> io::Result<R> {
        self.registration
            .async_io(Interest::READABLE, || read(&self.socket))
            .await
    }

    /// The result of `write` as soon as it is not `WouldBlock`.
    pub(crate) async fn write<R>(&self, write: impl Fn(&T) -> io::Result<R>) -> io::Result<R> {
        self.registration
            .async_io(Interest::WRITABLE, || write(&self.socket))
            .await
    }
}
