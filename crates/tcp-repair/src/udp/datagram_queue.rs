//! Queue of datagrams that a UDP socket has received and the program has not read.

use super::{StepContext, UdpError};
use holdfast_sys::address::{RawAddress, canonical};
use holdfast_sys::packet::{MAX_UDP_PAYLOAD, udp_packet};
use holdfast_sys::sockopt::{check_length, get_int, set_int};
use libc::SOL_SOCKET;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A received datagram.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// Sender's address.
    pub source: SocketAddr,
    /// Destination address, if the socket was bound to all addresses and requested it (`IP_PKTINFO`,
    /// `IPV6_RECVPKTINFO`).
    pub destination: Option<IpAddr>,
    /// Payload of the datagram.
    #[serde(with = "serde_bytes")]
    pub payload: Vec<u8>,
}

/// Removes all datagrams from the queue and returns them, oldest first. Datagrams that the kernel had coalesced
/// (`UDP_GRO`) are split again.
///
/// # Errors
/// The kernel's error. Datagrams removed before the error are lost, so this function is only for a socket that is being
/// given up.
pub fn drain(socket: BorrowedFd<'_>) -> Result<Vec<Datagram>, UdpError> {
    let mut found = Vec::new();
    while let Some(batch) = receive(socket, 0)? {
        found.extend(batch);
    }
    Ok(found)
}

/// Copies all datagrams and leaves them in the queue, by means of `SO_PEEK_OFF`, which is restored. The kernel shows a
/// datagram without payload only to the first such read.
///
/// # Errors
/// The kernel's error.
pub fn peek(socket: BorrowedFd<'_>) -> Result<Vec<Datagram>, UdpError> {
    let before = get_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF).at_step("SO_PEEK_OFF")?;
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, 0).at_step("SO_PEEK_OFF")?;
    let mut found = Vec::new();
    let mut outcome = Ok(());
    loop {
        match receive(socket, libc::MSG_PEEK) {
            Ok(Some(batch)) => found.extend(batch),
            Ok(None) => break,
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    set_int(socket, SOL_SOCKET, libc::SO_PEEK_OFF, before).at_step("SO_PEEK_OFF")?;
    outcome.map(|()| found)
}

/// Does the same as [`peek`], and includes each datagram's destination address even if the program did not request it.
///
/// # Errors
/// The kernel's error.
pub fn peek_with_destinations(
    socket: BorrowedFd<'_>,
    v6_socket: bool,
) -> Result<Vec<Datagram>, UdpError> {
    let families = [
        (libc::IPPROTO_IP, libc::IP_PKTINFO),
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    ];
    let mut enabled = Vec::new();
    for (level, name) in families.into_iter().take(1 + usize::from(v6_socket)) {
        if get_int(socket, level, name).at_step("reading a socket option")? == 0 {
            set_int(socket, level, name, 1).at_step("setting a socket option")?;
            enabled.push((level, name));
        }
    }
    let found = peek(socket);
    for (level, name) in enabled {
        set_int(socket, level, name, 0).at_step("setting a socket option")?;
    }
    found
}

/// Builds the packet that delivers a datagram again when it is written to a TUN device. `local` is the socket's bound
/// address. Returns `None` if the destination address is unknown.
#[must_use]
pub fn replay_packet(datagram: &Datagram, local: SocketAddr) -> Option<Vec<u8>> {
    let to = datagram.destination.unwrap_or(local.ip());
    if to.is_unspecified() {
        return None;
    }
    let to = canonical(SocketAddr::new(to, local.port()));
    udp_packet(canonical(datagram.source), to, &datagram.payload)
}

/// Size of the buffer for one datagram's control messages, in 8-byte words for alignment.
const CONTROL_WORDS: usize = 64;
/// `UDP_GRO` (`linux/udp.h`).
const UDP_GRO: i32 = 104;

/// Makes one `recvmsg` call. Returns `None` when the queue is empty.
fn receive(socket: BorrowedFd<'_>, flags: i32) -> Result<Option<Vec<Datagram>>, UdpError> {
    let mut payload = vec![0u8; MAX_UDP_PAYLOAD + 20];
    let mut control = [0u64; CONTROL_WORDS];
    let mut from = RawAddress::empty();
    let mut part = libc::iovec {
        iov_base: payload.as_mut_ptr().cast(),
        iov_len: payload.len(),
    };
    // SAFETY: all-zero bytes are a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    let (name, length) = from.as_raw_mut();
    message.msg_name = name.cast();
    message.msg_namelen = *length;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = flags | libc::MSG_DONTWAIT;
    // SAFETY: `message` points to `from`, `part` (over `payload`) and `control`, all writable and outliving the call.
    let outcome = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let length = match check_length(outcome) {
        Ok(length) => length,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(error).at_step("recvmsg"),
    };
    payload.truncate(length);
    let Some(source) = from.to_socket_addr() else {
        return Ok(Some(Vec::new()));
    };
    let (destination, segment) = parse_control_messages(&message);
    Ok(Some(split_coalesced(source, destination, segment, payload)))
}

/// Splits a payload that the kernel coalesced.
fn split_coalesced(
    source: SocketAddr,
    destination: Option<IpAddr>,
    segment: usize,
    payload: Vec<u8>,
) -> Vec<Datagram> {
    let datagram = |payload| Datagram {
        source,
        destination,
        payload,
    };
    if segment == 0 || payload.len() <= segment {
        return vec![datagram(payload)];
    }
    payload
        .chunks(segment)
        .map(|part| datagram(part.to_vec()))
        .collect()
}

/// Extracts the destination address and the segment size from the control messages.
fn parse_control_messages(message: &libc::msghdr) -> (Option<IpAddr>, usize) {
    let (mut destination, mut segment) = (None, 0);
    // SAFETY: the kernel filled the control part, so headers and lengths are right, and each kind of message holds the
    // structure that is read.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    destination = Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes()));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    destination = Some(IpAddr::from(info.ipi6_addr.s6_addr));
                }
                (libc::IPPROTO_UDP, UDP_GRO) => {
                    segment = data.cast::<libc::c_int>().read_unaligned() as usize;
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    (destination, segment)
}
