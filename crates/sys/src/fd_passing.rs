//! Messages with descriptors over `SOCK_SEQPACKET` Unix sockets (`SCM_RIGHTS`, `unix(7)`).

use crate::sockopt::{check, check_length};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most descriptors that one message of this crate carries; the kernel's own limit is 253 (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 64;

/// Size of a control message with [`MAX_FDS`] descriptors: header (16 bytes) and descriptors, in 8-byte words for
/// alignment.
const CONTROL_WORDS: usize = (16 + MAX_FDS * size_of::<RawFd>()).div_ceil(8);

/// A received message.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// Number of bytes written to the buffer.
    pub length: usize,
    /// Descriptors, in the sender's order, all close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Makes two connected `SOCK_SEQPACKET` sockets, close-on-exec.
///
/// # Errors
/// Errors of `socketpair(2)`.
pub fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `pair` is writable for two descriptors and outlives the call.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so both are new descriptors that nothing else owns.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

/// Sends one message with descriptors, as a whole or not at all.
///
/// # Errors
/// `InvalidInput` for more than [`MAX_FDS`] descriptors, or descriptors without a byte of data; otherwise errors of
/// `sendmsg(2)` (`WouldBlock` on a full non-blocking socket).
pub fn send_with_fds(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if fds.len() > MAX_FDS || bytes.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a message needs data and takes at most 64 descriptors",
        ));
    }
    let mut control = [0u64; CONTROL_WORDS];
    let mut vector = io_slice(bytes.as_ptr().cast_mut(), bytes.len());
    let mut message = message_header(&mut vector, &mut control);
    if fds.is_empty() {
        message.msg_control = std::ptr::null_mut();
        message.msg_controllen = 0;
    } else {
        let payload = size_of_val(fds);
        // SAFETY: pure arithmetic on a length.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(payload as u32) } as usize;
        // SAFETY: `control` holds up to MAX_FDS descriptors and is aligned as a `cmsghdr`, so the first header and its
        // data lie inside it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload as u32) as usize;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (at, fd) in fds.iter().enumerate() {
                data.add(at).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `message` points to `vector` and `control`, which outlive the call.
    let sent = retry_interrupted(|| unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    });
    sent.map(|_| ())
}

/// Repeats a call that was interrupted. A socket call with a timeout returns `EINTR` when its process is stopped and
/// continued (`signal(7)`).
fn retry_interrupted(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        match check_length(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Receives one message into `buffer`; zero bytes mean that the other side has closed.
///
/// # Errors
/// `InvalidData` when the message was longer than `buffer` or carried more than [`MAX_FDS`] descriptors; `EMFILE`
/// when this process had too few free descriptors (the received ones are closed); otherwise errors of `recvmsg(2)`.
pub fn recv_with_fds(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<ReceivedMessage> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut vector = io_slice(buffer.as_mut_ptr(), buffer.len());
    let mut message = message_header(&mut vector, &mut control);
    let flags = libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to `vector` (over `buffer`) and `control`, which are writable and outlive the call.
    let length = retry_interrupted(|| unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags)
    })?;
    let fds = take_fds(&message);
    let is_truncated = message.msg_flags & libc::MSG_CTRUNC != 0;
    if message.msg_flags & libc::MSG_TRUNC != 0 || (is_truncated && fds.len() >= MAX_FDS) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "received a message longer than allowed",
        ));
    }
    // The kernel also truncates the list when the process has no free descriptor.
    if is_truncated {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(ReceivedMessage { length, fds })
}

/// Takes ownership of every descriptor in the control part and skips other control messages.
fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control part, so the headers and their lengths are right, and each descriptor is
    // new and owned by nothing else.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..bytes / size_of::<RawFd>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    fds
}

fn io_slice(start: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: length,
    }
}

fn message_header(vector: &mut libc::iovec, control: &mut [u64; CONTROL_WORDS]) -> libc::msghdr {
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(control);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::os::unix::thread::JoinHandleExt;
    use std::time::Duration;

    #[test]
    fn descriptors_arrive_in_order_and_close_on_exec() {
        let (left, right) = seqpacket_pair().expect("a pair");
        let streams: Vec<_> = (0..MAX_FDS)
            .map(|_| UnixStream::pair().expect("pair"))
            .collect();
        let fds: Vec<_> = streams.iter().map(|(end, _)| end.as_fd()).collect();
        send_with_fds(left.as_fd(), b"hello", &fds).expect("sent");
        let mut buffer = [0; 16];
        let received = recv_with_fds(right.as_fd(), &mut buffer).expect("received");
        assert_eq!((received.length, received.fds.len()), (5, MAX_FDS));
        for (at, fd) in received.fds.into_iter().enumerate() {
            // SAFETY: F_GETFD takes no argument and touches no memory.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
            UnixStream::from(fd).write_all(&[at as u8]).expect("write");
            let mut byte = [0];
            (&streams[at].1).read_exact(&mut byte).expect("read");
            assert_eq!(usize::from(byte[0]), at);
        }
    }

    extern "C" fn ignore_signal(_: libc::c_int) {}

    #[test]
    fn interrupted_receive_is_retried() {
        let (left, right) = UnixStream::pair().expect("a pair");
        right
            .set_read_timeout(Some(Duration::from_secs(60)))
            .expect("a timeout");
        // SAFETY: the handler does nothing, and no other test uses this signal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore_signal as *const () as libc::sighandler_t;
            libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
        }
        let waiting = std::thread::spawn(move || recv_with_fds(right.as_fd(), &mut [0; 4]));
        for _ in 0..20 {
            // SAFETY: the thread is not joined yet.
            unsafe { libc::pthread_kill(waiting.as_pthread_t(), libc::SIGUSR2) };
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!waiting.is_finished(), "the read returned on the signal");
        send_with_fds(left.as_fd(), b"now", &[]).expect("sent");
        let received = waiting.join().expect("ended").expect("received");
        assert_eq!(received.length, 3);
    }

    #[test]
    fn oversized_messages_are_refused() {
        let (left, right) = seqpacket_pair().expect("a pair");
        let too_many = vec![left.as_fd(); MAX_FDS + 1];
        assert!(send_with_fds(left.as_fd(), b"x", &too_many).is_err());
        assert!(send_with_fds(left.as_fd(), b"", &[left.as_fd()]).is_err());
        send_with_fds(left.as_fd(), b"longer than four", &[left.as_fd()]).expect("sent");
        let error = recv_with_fds(right.as_fd(), &mut [0; 4]).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(left);
        let end = recv_with_fds(right.as_fd(), &mut [0; 4]).expect("end");
        assert_eq!((end.length, end.fds.len()), (0, 0));
    }
}
