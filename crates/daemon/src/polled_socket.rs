//! Waiting for a descriptor that tokio has no type for, without unsafe code.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;

use tokio::io::Interest;
use tokio::net::UnixStream;

/// A socket in non-blocking mode, and a duplicate of its descriptor that tokio waits on.
///
/// The duplicate has a stream's type for any kind of socket, because only its registration is used, never its reads.
pub struct PolledSocket<T> {
    socket: T,
    registration: UnixStream,
}

impl<T: AsFd> PolledSocket<T> {
    /// Registers `socket`, which must be in non-blocking mode.
    pub fn new(socket: T) -> io::Result<PolledSocket<T>> {
        let duplicate = socket.as_fd().try_clone_to_owned()?;
        let registration = UnixStream::from_std(StdStream::from(duplicate))?;
        Ok(PolledSocket {
            socket,
            registration,
        })
    }

    /// Returns the socket whose readiness is awaited.
    pub fn get(&self) -> &T {
        &self.socket
    }

    /// Returns the first result of `read` that is not `WouldBlock`.
    pub async fn read<R>(&self, read: impl Fn(&T) -> io::Result<R>) -> io::Result<R> {
        self.registration
            .async_io(Interest::READABLE, || read(&self.socket))
            .await
    }

    /// Returns the first result of `write` that is not `WouldBlock`.
    pub async fn write<R>(&self, write: impl Fn(&T) -> io::Result<R>) -> io::Result<R> {
        self.registration
            .async_io(Interest::WRITABLE, || write(&self.socket))
            .await
    }
}
