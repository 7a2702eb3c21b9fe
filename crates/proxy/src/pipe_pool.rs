//! Pipes for splice(2). A connection has a pipe only while data moves, so that idle connections need none.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Maximum number of pipes kept for reuse.
pub(crate) const IDLE_PIPES_MAX: usize = 64;

/// Wanted capacity of a pipe, in bytes. The kernel counts pages (64 of 4 KiB), each of which may refer to a larger
/// part of a received packet.
const PIPE_BYTES: usize = 256 * 1024;
/// Maximum number of bytes that one splice(2) takes from a socket.
const SPLICE_BYTES_MAX: usize = 1 << 20;

const SPLICE_FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

/// The empty pipes.
#[derive(Debug, Default)]
pub(crate) struct PipePool {
    idle: Mutex<Vec<PipeEnds>>,
}

#[derive(Debug)]
struct PipeEnds {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// A pipe in use. An empty one returns to its pool when dropped; one with data is closed.
#[derive(Debug)]
pub(crate) struct Pipe<'a> {
    /// `None` only while the pipe is dropped.
    ends: Option<PipeEnds>,
    pool: &'a PipePool,
    /// Number of bytes in the pipe.
    filled_bytes: usize,
}

impl PipePool {
    /// Returns an empty pipe.
    ///
    /// # Errors
    /// Same as pipe(2): too many open descriptors, or too much memory in pipes.
    pub(crate) fn take(&self) -> io::Result<Pipe<'_>> {
        let idle = self.lock().pop();
        let ends = match idle {
            Some(ends) => ends,
            None => new_pipe()?,
        };
        Ok(Pipe {
            ends: Some(ends),
            pool: self,
            filled_bytes: 0,
        })
    }

    /// Returns the number of pipes kept for reuse.
    #[cfg(test)]
    pub(crate) fn idle_count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PipeEnds>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn new_pipe() -> io::Result<PipeEnds> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Refused when the user's pipes have too much memory (pipe-user-pages-soft, pipe(7)); a smaller pipe works too.
    let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
    Ok(PipeEnds { reader, writer })
}

impl Pipe<'_> {
    /// Moves received bytes of a socket into the empty pipe. Returns their number, 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if the socket has no bytes; otherwise the socket's error.
    pub(crate) fn fill_from(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let Some(ends) = &self.ends else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let writer = &ends.writer;
        let move_bytes = || {
            Ok(splice(
                socket,
                None,
                writer,
                None,
                SPLICE_BYTES_MAX,
                SPLICE_FLAGS,
            )?)
        };
        self.filled_bytes = socket.try_io(Interest::READABLE, move_bytes)?;
        Ok(self.filled_bytes)
    }

    /// Moves bytes of the pipe into a socket's send queue. Returns their number.
    ///
    /// # Errors
    /// `WouldBlock` if the send queue is full; otherwise the socket's error.
    pub(crate) fn empty_into(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let Some(ends) = &self.ends else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        // A length beyond the content would make the kernel wait for more before it sends a short segment.
        let (reader, length) = (&ends.reader, self.filled_bytes);
        let move_bytes = || Ok(splice(reader, None, socket, None, length, SPLICE_FLAGS)?);
        let moved = socket.try_io(Interest::WRITABLE, move_bytes)?;
        self.filled_bytes -= moved;
        Ok(moved)
    }

    /// Returns true if the pipe has no bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.filled_bytes == 0
    }
}

impl Drop for Pipe<'_> {
    fn drop(&mut self) {
        let Some(ends) = self.ends.take().filter(|_| self.filled_bytes == 0) else {
            return;
        };
        let mut idle = self.pool.lock();
        if idle.len() < IDLE_PIPES_MAX {
            idle.push(ends);
        }
    }
}
