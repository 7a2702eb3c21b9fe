//! Sending of messages to the kernel, many per system call.

use super::abi;
use crate::transport::{AssocId, Message};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most messages in one call.
pub const BATCH: usize = 64;

/// A message with its send flags.
pub struct Queued {
    pub assoc: AssocId,
    pub flags: u16,
    pub message: Message,
    /// True if another message follows that may share a packet with this one.
    pub more: bool,
}

/// A `struct cmsghdr` with a `struct sctp_sndinfo`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 32]);

/// Outcome of a send call.
pub enum Progress {
    /// The kernel accepted this number of messages.
    Sent(usize),
    /// The kernel has no buffer space for the first message.
    Full,
    /// The kernel refused the first message.
    Refused,
}

/// Sends the first `count` messages of `queue` to the socket. All of them have the same `more` flag.
pub fn send(fd: BorrowedFd<'_>, queue: &VecDeque<Queued>, count: usize) -> Progress {
    let mut vectors: Vec<libc::iovec> = queue
        .iter()
        .take(count)
        .map(|queued| libc::iovec {
            iov_base: queued.message.data.as_ptr().cast_mut().cast(),
            iov_len: queued.message.data.len(),
        })
        .collect();
    let mut controls: Vec<Control> = queue.iter().take(count).map(control).collect();
    let mut headers: Vec<libc::mmsghdr> = vectors
        .iter_mut()
        .zip(&mut controls)
        .map(|(vector, control)| {
            // SAFETY: all-zero bytes are a valid `mmsghdr`.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = control.0.len();
            header
        })
        .collect();
    let more = match queue.front() {
        Some(first) if first.more => libc::MSG_MORE,
        _ => 0,
    };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | more;
    // SAFETY: the headers point into the vectors above, and the vectors to messages of `queue`, which is borrowed.
    let sent = unsafe {
        let count = headers.len() as libc::c_uint;
        libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, flags)
    };
    if let Ok(sent) = usize::try_from(sent) {
        return Progress::Sent(sent);
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Progress::Full,
        Some(libc::EINTR) => Progress::Sent(0),
        _ => Progress::Refused,
    }
}

/// Aborts an association at once; its queued messages are not sent.
pub fn abort(fd: BorrowedFd<'_>, assoc: AssocId) -> io::Result<()> {
    let last = Queued {
        assoc,
        flags: abi::ABORT,
        message: Message::new(0, Bytes::new()),
        more: false,
    };
    match send(fd, &VecDeque::from([last]), 1) {
        Progress::Sent(_) => Ok(()),
        Progress::Full => Err(io::ErrorKind::WouldBlock.into()),
        Progress::Refused => Err(io::ErrorKind::NotConnected.into()),
    }
}

fn control(queued: &Queued) -> Control {
    let message = &queued.message;
    let unordered = if message.unordered { abi::UNORDERED } else { 0 };
    let flags = queued.flags | unordered;
    let info = abi::sndinfo(queued.assoc.id(), message.stream, flags, message.ppid);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&32usize.to_ne_bytes());
    bytes[8..12].copy_from_slice(&libc::IPPROTO_SCTP.to_ne_bytes());
    bytes[12..16].copy_from_slice(&abi::CMSG_SNDINFO.to_ne_bytes());
    bytes[16..].copy_from_slice(&info);
    Control(bytes)
}
