//! A TCP connection whose whole exchange has one time limit, and messages on it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection that fails with [`io::ErrorKind::TimedOut`] once its time is over, however slowly data arrives.
#[derive(Debug)]
pub struct TimedStream {
    socket: TcpStream,
    end: Instant,
}

impl TimedStream {
    /// Gives the connection `limit` from this moment on.
    pub fn new(socket: TcpStream, limit: Duration) -> TimedStream {
        TimedStream {
            socket,
            end: Instant::now() + limit,
        }
    }

    /// Returns the time that is left.
    ///
    /// # Errors
    /// The time is over.
    pub fn time_left(&self) -> io::Result<Duration> {
        match self.end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }

    /// Returns the TCP socket of the connection.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

/// The error of a socket whose time limit has passed is the one of an exchange that took too long.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Read for TimedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(self.time_left()?))?;
        self.socket.read(buffer).map_err(timed_out)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(self.time_left()?))?;
        self.socket.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

/// Writes a message with its length in front (32 bits, big endian).
///
/// # Errors
/// Errors of the stream.
pub fn write_message(stream: &mut impl Write, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_all(&length.to_be_bytes())?;
    stream.write_all(message)?;
    stream.flush()
}

/// Reads a message of at most `bytes_max` bytes. Memory grows with the bytes that arrive.
///
/// # Errors
/// Errors of the stream; [`io::ErrorKind::InvalidData`] for a longer message.
pub fn read_message(stream: &mut impl Read, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut field = [0; 4];
    stream.read_exact(&mut field)?;
    let length = u32::from_be_bytes(field) as usize;
    if length > bytes_max {
        let problem = format!("a message of {length} bytes is longer than {bytes_max}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut message = Vec::new();
    stream.take(length as u64).read_to_end(&mut message)?;
    match message.len() == length {
        true => Ok(message),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_bounded_and_complete() {
        let mut bytes = Vec::new();
        write_message(&mut bytes, b"message").unwrap();
        assert_eq!(read_message(&mut &bytes[..], 7).unwrap(), b"message");
        let kind =
            |bytes: &[u8], bytes_max| read_message(&mut &*bytes, bytes_max).unwrap_err().kind();
        assert_eq!(kind(&bytes, 6), io::ErrorKind::InvalidData);
        assert_eq!(kind(&bytes[..9], 7), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(&bytes[..3], 7), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(&[0xff; 9], 7), io::ErrorKind::InvalidData);
    }
}
