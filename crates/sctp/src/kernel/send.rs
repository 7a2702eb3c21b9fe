//! Sending of messages to the kernel, many per system call.

use super::abi;
use crate::{AssocId, MessageToSend};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most messages in one call.
pub const BATCH_MAX: usize = 64;

/// A message with its send flags.
pub struct QueuedMessage {
    pub assoc: AssocId,
    pub flags: u16,
    pub message: MessageToSend,
    /// True if another message follows that may share a packet with this one.
    pub more_follows: bool,
}

/// A `struct cmsghdr` with a `struct sctp_sndinfo`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 32]);

/// Outcome of a send call.
pub enum SendOutcome {
    /// The kernel accepted this number of messages.
    Sent(usize),
    /// The kernel has no buffer space for the first message.
    Full,
    /// The kernel refused the first message.
    Refused,
}

/// Sends the first `count` messages of `queue` to the socket. All of them have the same `more_follows` flag.
pub fn send(fd: BorrowedFd<'_>, queue: &VecDeque<QueuedMessage>, count: usize) -> SendOutcome {
    let mut vectors: Vec<libc::iovec> = queue
        .iter()
        .take(count)
        .map(|queued| libc::iovec {
            iov_base: queued.message.data.as_ptr().cast_mut().cast(),
            iov_len: queued.message.data.len(),
        })
        .collect();
    let mut controls: Vec<Control> = queue.iter().take(count).map(control_message).collect();
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
    let more_flag = match queue.front() {
        Some(first) if first.more_follows => libc::MSG_MORE,
        _ => 0,
    };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | more_flag;
    // SAFETY: the headers point into the vectors above, and the vectors to messages of `queue`, which is borrowed.
    let sent = unsafe {
        let count = headers.len() as libc::c_uint;
        libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, flags)
    };
    if let Ok(sent) = usize::try_from(sent) {
        return SendOutcome::Sent(sent);
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => SendOutcome::Full,
        Some(libc::EINTR) => SendOutcome::Sent(0),
        _ => SendOutcome::Refused,
    }
}

/// Aborts an association at once; its queued messages are not sent.
pub fn abort(fd: BorrowedFd<'_>, assoc: AssocId) -> io::Result<()> {
    let abort_message = QueuedMessage {
        assoc,
        flags: abi::ABORT,
        message: MessageToSend::new(0, Bytes::new()),
        more_follows: false,
    };
    match send(fd, &VecDeque::from([abort_message]), 1) {
        SendOutcome::Sent(_) => Ok(()),
        SendOutcome::Full => Err(io::ErrorKind::WouldBlock.into()),
        SendOutcome::Refused => Err(io::ErrorKind::NotConnected.into()),
    }
}

fn control_message(queued: &QueuedMessage) -> Control {
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
