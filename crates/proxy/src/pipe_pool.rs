//! Pipes for splice(2). A connection has a pipe only while data moves, so that idle connections need none.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
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
/// Number of bytes in all pipes from which on a pipe takes [`CROWDED_SPLICE_BYTES_MAX`] at most: the kernel counts bytes in
/// pipes neither for the sockets nor, if the user is root, for the user.
const POOL_BYTES_MAX: usize = 256 << 20;
/// Maximum number of bytes that a pipe takes once [`POOL_BYTES_MAX`] is reached: streams go on, more slowly.
const CROWDED_SPLICE_BYTES_MAX: usize = 16 * 1024;

const SPLICE_FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

/// The empty pipes, and the number of bytes in the others.
#[derive(Debug, Default)]
pub(crate) struct PipePool {
    idle: Mutex<Vec<PipeEnds>>,
    filled_bytes: AtomicUsize,
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

    /// Returns the maximum number of bytes that a pipe may take.
    fn splice_bytes_max(&self) -> usize {
        match self.filled_bytes.load(Ordering::Relaxed) < POOL_BYTES_MAX {
            true => SPLICE_BYTES_MAX,
            false => CROWDED_SPLICE_BYTES_MAX,
        }
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
        let (writer, length) = (&ends.writer, self.pool.splice_bytes_max());
        let move_bytes = || Ok(splice(socket, None, writer, None, length, SPLICE_FLAGS)?);
        self.filled_bytes = socket.try_io(Interest::READABLE, move_bytes)?;
        let total = &self.pool.filled_bytes;
        total.fetch_add(self.filled_bytes, Ordering::Relaxed);
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
        self.pool.filled_bytes.fetch_sub(moved, Ordering::Relaxed);
        Ok(moved)
    }

    /// Returns true if the pipe has no bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.filled_bytes == 0
    }
}

impl Drop for Pipe<'_> {
    fn drop(&mut self) {
        let rest = self.filled_bytes;
        self.pool.filled_bytes.fetch_sub(rest, Ordering::Relaxed);
        let Some(ends) = self.ends.take().filter(|_| self.filled_bytes == 0) else {
            return;
        };
        let mut idle = self.pool.lock();
        if idle.len() < IDLE_PIPES_MAX {
            idle.push(ends);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    /// Fills a pipe from a socket that has received more than a crowded pipe takes.
    async fn fill<'a>(pool: &'a PipePool, near: &TcpStream) -> (Pipe<'a>, usize) {
        let mut pipe = pool.take().unwrap();
        loop {
            near.readable().await.unwrap();
            match pipe.fill_from(near) {
                Ok(length) => return (pipe, length),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }

    #[tokio::test]
    async fn crowded_pipes_take_few_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (far, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut far, near) = (far.unwrap(), accepted.unwrap().0);
        far.write_all(&[7; 3 * CROWDED_SPLICE_BYTES_MAX])
            .await
            .unwrap();
        let mut received = vec![0; 3 * CROWDED_SPLICE_BYTES_MAX];
        while near.peek(&mut received).await.unwrap() < received.len() {}
        let pool = PipePool::default();
        pool.filled_bytes.store(POOL_BYTES_MAX, Ordering::Relaxed);
        let (crowded, length) = fill(&pool, &near).await;
        assert!((1..=CROWDED_SPLICE_BYTES_MAX).contains(&length), "{length}");
        let total = || pool.filled_bytes.load(Ordering::Relaxed);
        assert_eq!(total(), POOL_BYTES_MAX + length);
        drop(crowded);
        assert_eq!(total(), POOL_BYTES_MAX);
        pool.filled_bytes.store(0, Ordering::Relaxed);
        let (mut pipe, length) = fill(&pool, &near).await;
        assert!(length > CROWDED_SPLICE_BYTES_MAX, "{length}");
        near.writable().await.unwrap();
        let moved = pipe.empty_into(&near).unwrap();
        assert_eq!(total(), length - moved);
    }
}
