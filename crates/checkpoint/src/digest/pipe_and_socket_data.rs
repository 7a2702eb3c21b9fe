//! Checksums of the data in pipes and Unix sockets. All data stays there.

use crate::error::{Context, Result};
use crate::files::{pipe_content, unix_queue};
use crate::trace::{pidfd_getfd, pidfd_open};
use holdfast_sys::sockopt::get_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Reader for the descriptors of a process, by its PID as the caller sees it.
#[derive(Debug)]
pub(super) struct QueuedDataReader {
    pid: i32,
    process: OwnedFd,
}

impl QueuedDataReader {
    pub fn open(pid: i32) -> Result<Self> {
        let process = pidfd_open(pid)?;
        Ok(Self { pid, process })
    }

    /// Returns the checksum of the data that waits at a descriptor; `None` if no data can wait there, or if the data is
    /// compared elsewhere.
    pub fn checksum(&self, number: u32, link: &str, flags: u32) -> Result<Option<u32>> {
        let reading = || {
            format!(
                "reading queued data of descriptor {number} of process {}",
                self.pid
            )
        };
        let reads = flags as i32 & (libc::O_ACCMODE | libc::O_PATH) != libc::O_WRONLY;
        if link.starts_with("pipe:") && reads {
            let path = format!("/proc/{}/fd/{number}", self.pid);
            let chunks = pipe_content(&path).context(reading)?;
            let bytes = chunks.iter().map(|chunk| chunk.0.as_slice());
            return Ok(Some(bytes.fold(0, crc32c::crc32c_append)));
        }
        if !link.starts_with("socket:") {
            return Ok(None);
        }
        let socket = pidfd_getfd(self.process.as_fd(), number as i32)?;
        let is_unix = get_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_DOMAIN);
        if is_unix.context(reading)? != libc::AF_UNIX {
            return Ok(None);
        }
        checksum_socket_queue(&socket).context(reading).map(Some)
    }
}

/// Returns the checksum of a socket's queue. In a stream, bytes and descriptors count, but not the kernel's boundaries
/// between them; in other sockets, each message and its sender's name count.
fn checksum_socket_queue(socket: &OwnedFd) -> io::Result<u32> {
    let kind = get_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_TYPE)?;
    let stream = kind == libc::SOCK_STREAM;
    let messages = match unix_queue(socket.as_fd(), kind != libc::SOCK_DGRAM) {
        // The socket listens, or was never connected.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTCONN)) => {
            return Ok(0);
        }
        messages => messages?,
    };
    let (mut checksum, mut carried) = (0, Vec::new());
    for message in &messages {
        checksum = crc32c::crc32c_append(checksum, &message.bytes);
        for fd in &message.fds {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let link = std::fs::read_link(path)?;
            let name =
                super::descriptors::portable_name(&link.to_string_lossy()).map(str::to_owned);
            carried.extend(name.unwrap_or_default().into_bytes());
            carried.push(0);
        }
        if !stream {
            let length = (message.bytes.len() as u64).to_le_bytes();
            checksum = crc32c::crc32c_append(checksum, &length);
            checksum = crc32c::crc32c_append(checksum, &message.sender_name);
        }
    }
    Ok(crc32c::crc32c_append(checksum, &carried))
}
