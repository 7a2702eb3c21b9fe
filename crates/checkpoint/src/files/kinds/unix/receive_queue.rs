//! Messages in the queues of Unix sockets: copied out of one queue, and sent into another.

use super::address;
use holdfast_sys::sockopt::{check_length, get_int, set_int};
use libc::SOL_SOCKET;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Space for a message's descriptors and its other control data, in 64-bit words.
const CONTROL_WORDS: usize = 512;
/// Bytes of a stream that are copied at once, and size of the longest datagram that can move.
const PART_BYTES: usize = 256 * 1024;

/// A message, with this process's own copies of its descriptors.
#[derive(Debug)]
pub struct PeekedMessage {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    pub credentials: Option<(i32, u32, u32)>,
    pub sender_name: Vec<u8>,
}

/// Copies all messages and leaves them in the queue. In a stream, the kernel does not show the boundary between bytes
/// sent without descriptors and bytes sent just after them with descriptors: the descriptors are then assigned to the
/// first of these bytes.
pub fn peek(socket: BorrowedFd<'_>, stream: bool) -> io::Result<Vec<PeekedMessage>> {
    let offset = get_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let pass = get_int(socket, SOL_SOCKET, libc::SO_PASSCRED)?;
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, 0)?;
    set_int(socket, SOL_SOCKET, libc::SO_PASSCRED, 1)?;
    let outcome = peek_all(socket, stream);
    set_int(socket, SOL_SOCKET, libc::SO_PASSCRED, pass)?;
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, offset)?;
    outcome
}

fn peek_all(socket: BorrowedFd<'_>, stream: bool) -> io::Result<Vec<PeekedMessage>> {
    let mut found = Vec::new();
    loop {
        match receive(socket) {
            Ok(message) if message.bytes.is_empty() && stream => return Ok(found),
            Ok(message) => found.push(message),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(found),
            Err(error) => return Err(error),
        }
    }
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<PeekedMessage> {
    let mut bytes = vec![0u8; PART_BYTES];
    let mut control = [0u64; CONTROL_WORDS];
    let (mut from, _) = address::to_sockaddr(&[])?;
    let mut iovec = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all-zero bytes are a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    message.msg_iov = &raw mut iovec;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to `from`, `iovec` (over `bytes`) and `control`, all writable and outliving the call.
    let length =
        check_length(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let mut peeked = PeekedMessage {
        bytes: Vec::new(),
        fds: Vec::new(),
        credentials: None,
        sender_name: address::name(&from, message.msg_namelen),
    };
    parse_control(&message, &mut peeked);
    if message.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    // The buffer has space for every message that can be sent, so the list of descriptors is truncated only if no more
    // can be opened.
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    bytes.truncate(length);
    peeked.bytes = bytes;
    Ok(peeked)
}

/// `SCM_PIDFD` (`linux/socket.h`).
const SCM_PIDFD: i32 = 4;

fn parse_control(message: &libc::msghdr, peeked: &mut PeekedMessage) {
    // SAFETY: the kernel filled the control part, so headers and lengths are right; each descriptor in the part is new
    // and owned by nothing else.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            let length = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
            let fd =
                |at: usize| OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned());
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (SOL_SOCKET, libc::SCM_RIGHTS) => {
                    peeked.fds.extend((0..length / size_of::<RawFd>()).map(fd));
                }
                (SOL_SOCKET, SCM_PIDFD) => drop(fd(0)),
                (SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    let credentials = data.cast::<libc::ucred>().read_unaligned();
                    // A PID of 0 means that the kernel kept no credentials.
                    peeked.credentials = (credentials.pid != 0).then_some((
                        credentials.pid,
                        credentials.uid,
                        credentials.gid,
                    ));
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Sends a message again: to `to`, or to the connected peer.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[RawFd],
    credentials: Option<(i32, u32, u32)>,
    to: Option<&[u8]>,
) -> io::Result<usize> {
    let mut control = [0u64; CONTROL_WORDS];
    let (mut address, length) = address::to_sockaddr(to.unwrap_or_default())?;
    let mut iovec = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all-zero bytes are a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    if to.is_some() {
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = length;
    }
    message.msg_iov = &raw mut iovec;
    message.msg_iovlen = 1;
    let mut parts: Vec<(i32, Vec<u8>)> = Vec::new();
    if !fds.is_empty() {
        let raw = fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
        parts.push((libc::SCM_RIGHTS, raw));
    }
    if let Some((pid, uid, gid)) = credentials {
        let raw = [pid as u32, uid, gid].map(u32::to_ne_bytes).concat();
        parts.push((libc::SCM_CREDENTIALS, raw));
    }
    // SAFETY: pure arithmetic on lengths.
    let space = |length: usize| unsafe { libc::CMSG_SPACE(length as u32) } as usize;
    let needed: usize = parts.iter().map(|(_, raw)| space(raw.len())).sum();
    if needed > size_of_val(&control) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    if needed > 0 {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = needed;
        write_control(&message, &parts);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `address`, `iovec` and `control`, which outlive the call.
    check_length(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

fn write_control(message: &libc::msghdr, parts: &[(i32, Vec<u8>)]) {
    // SAFETY: the control part has space for these parts and is aligned for headers.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        for (kind, raw) in parts {
            (*header).cmsg_level = SOL_SOCKET;
            (*header).cmsg_type = *kind;
            (*header).cmsg_len = libc::CMSG_LEN(raw.len() as u32) as usize;
            std::ptr::copy_nonoverlapping(raw.as_ptr(), libc::CMSG_DATA(header), raw.len());
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}
