//! Whole IP packets with correct checksums, built for injection at a TUN device or for a raw socket.

use crate::address::RawAddress;
use crate::sockopt::{check, check_length};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// TCP flag bits (RFC 9293 section 3.1).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;
}

/// Largest UDP payload of an IPv4 packet, bytes.
pub const MAX_UDP_PAYLOAD: usize = 65_535 - 20 - 8;

/// Length of a TCP header without options, bytes.
const TCP_HEADER_LEN: usize = 20;
/// Length of a padded timestamp option, bytes.
pub const TIMESTAMP_OPTION_LEN: usize = 12;
/// Length of a UDP header, bytes (RFC 768).
const UDP_HEADER_LEN: usize = 8;
/// Hop limit of the packets (RFC 1700's default).
const HOP_LIMIT: u8 = 64;

/// The header fields of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSegmentHeader {
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Flag bits, see [`tcp_flags`].
    pub flags: u8,
    /// Window field of the header, already scaled down.
    pub window: u16,
    /// TSval of a timestamp option (RFC 7323 section 3.2) whose echo field is zero; `None`: no options.
    pub timestamp: Option<u32>,
}

/// Builds a TCP packet. Returns `None` when the families differ or the payload is too long for one packet.
#[must_use]
pub fn tcp_packet(
    source: SocketAddr,
    destination: SocketAddr,
    segment: &TcpSegmentHeader,
    payload: &[u8],
) -> Option<Vec<u8>> {
    let header = TCP_HEADER_LEN + segment.timestamp.map_or(0, |_| TIMESTAMP_OPTION_LEN);
    let length = header + payload.len();
    let mut packet = ip_header(source, destination, libc::IPPROTO_TCP, length)?;
    let start = packet.len();
    packet.extend_from_slice(&source.port().to_be_bytes());
    packet.extend_from_slice(&destination.port().to_be_bytes());
    packet.extend_from_slice(&segment.sequence.to_be_bytes());
    packet.extend_from_slice(&segment.acknowledgement.to_be_bytes());
    packet.extend_from_slice(&[(header as u8 / 4) << 4, segment.flags]);
    packet.extend_from_slice(&segment.window.to_be_bytes());
    packet.extend_from_slice(&[0; 4]);
    if let Some(value) = segment.timestamp {
        // Two no-operation options, then kind and length (RFC 7323 appendix A).
        packet.extend_from_slice(&[1, 1, 8, 10]);
        packet.extend_from_slice(&value.to_be_bytes());
        packet.extend_from_slice(&[0; 4]);
    }
    packet.extend_from_slice(payload);
    let sum = transport_checksum(source, destination, libc::IPPROTO_TCP, &packet[start..]);
    packet[start + 16..start + 18].copy_from_slice(&sum.to_be_bytes());
    Some(packet)
}

/// Builds a UDP packet. Returns `None` when the families differ or the payload is longer than [`MAX_UDP_PAYLOAD`].
#[must_use]
pub fn udp_packet(source: SocketAddr, destination: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    if payload.len() > MAX_UDP_PAYLOAD {
        return None;
    }
    let length = UDP_HEADER_LEN + payload.len();
    let mut packet = ip_header(source, destination, libc::IPPROTO_UDP, length)?;
    let start = packet.len();
    packet.extend_from_slice(&source.port().to_be_bytes());
    packet.extend_from_slice(&destination.port().to_be_bytes());
    packet.extend_from_slice(&u16::try_from(length).ok()?.to_be_bytes());
    packet.extend_from_slice(&[0; 2]);
    packet.extend_from_slice(payload);
    let sum = transport_checksum(source, destination, libc::IPPROTO_UDP, &packet[start..]);
    // A zero checksum would mean "none" (RFC 768), so zero is sent as its other form, all ones.
    let sum = if sum == 0 { u16::MAX } else { sum };
    packet[start + 6..start + 8].copy_from_slice(&sum.to_be_bytes());
    Some(packet)
}

/// Sends a packet, which includes its IP header, along the host's routes. A packet for an address of this host has been
/// received when this function returns.
///
/// # Errors
/// The kernel's error; `InvalidInput` for bytes that are not a packet.
pub fn send(packet: &[u8]) -> io::Result<()> {
    let to = destination(packet).ok_or(io::ErrorKind::InvalidInput)?;
    let family = match to {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_RAW) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = RawAddress::for_family(SocketAddr::new(to, 0), to.is_ipv6());
    let (to, length) = to.as_raw();
    let (bytes, count) = (packet.as_ptr().cast(), packet.len());
    // SAFETY: `packet` is readable for its length, `to` is an address of that length; both outlive the call.
    let sent = unsafe { libc::sendto(socket.as_raw_fd(), bytes, count, 0, to, length) };
    check_length(sent).map(drop)
}

/// Sends a frame with its link header from the interface with this index.
///
/// # Errors
/// Errors of `socket(2)` and `sendto(2)`.
pub fn send_frame(interface: u32, frame: &[u8]) -> io::Result<()> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are passed. Protocol 0: the socket receives nothing.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all-zero bytes are a valid `sockaddr_ll`.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_ifindex = interface.cast_signed();
    let length = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: `frame` is readable for its length, `to` is an address of that length; both outlive the call.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            length,
        )
    };
    check_length(sent).map(drop)
}

/// Returns the destination address of an IP packet.
pub fn destination(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?)),
        6 => Some(IpAddr::from(
            <[u8; 16]>::try_from(packet.get(24..40)?).ok()?,
        )),
        _ => None,
    }
}

/// Builds the IPv4 (RFC 791) or IPv6 (RFC 8200) header for `length` bytes of `protocol`.
fn ip_header(
    source: SocketAddr,
    destination: SocketAddr,
    protocol: i32,
    length: usize,
) -> Option<Vec<u8>> {
    let protocol = u8::try_from(protocol).ok()?;
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let total = u16::try_from(length + 20).ok()?;
            let mut packet = Vec::with_capacity(usize::from(total));
            packet.extend_from_slice(&[0x45, 0]);
            packet.extend_from_slice(&total.to_be_bytes());
            // No fragmentation, hence no identification.
            packet.extend_from_slice(&[0, 0, 0x40, 0, HOP_LIMIT, protocol, 0, 0]);
            packet.extend_from_slice(&from.octets());
            packet.extend_from_slice(&to.octets());
            let sum = !fold(sum_words(&packet));
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            Some(packet)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let payload = u16::try_from(length).ok()?;
            let mut packet = Vec::with_capacity(40 + length);
            packet.extend_from_slice(&[0x60, 0, 0, 0]);
            packet.extend_from_slice(&payload.to_be_bytes());
            packet.extend_from_slice(&[protocol, HOP_LIMIT]);
            packet.extend_from_slice(&from.octets());
            packet.extend_from_slice(&to.octets());
            Some(packet)
        }
        _ => None,
    }
}

/// Computes the checksum over the pseudo header (RFC 9293 section 3.1, RFC 8200 section 8.1) and `segment`, in which
/// the checksum field is zero.
pub(crate) fn transport_checksum(
    source: SocketAddr,
    destination: SocketAddr,
    protocol: i32,
    segment: &[u8],
) -> u16 {
    !fold(
        pseudo_header_sum(source.ip(), destination.ip(), protocol, segment.len())
            + sum_words(segment),
    )
}

/// Returns the sum of the pseudo header's words, not folded.
pub fn pseudo_header_sum(from: IpAddr, to: IpAddr, protocol: i32, length: usize) -> u64 {
    let addresses = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => sum_words(&v4.octets()),
        IpAddr::V6(v6) => sum_words(&v6.octets()),
    };
    let length = length as u64;
    addresses(from) + addresses(to) + protocol as u64 + (length >> 16) + (length & 0xffff)
}

/// Returns the sum of big-endian 16-bit words; an odd last byte counts as a high half (RFC 1071).
pub(crate) fn sum_words(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(2);
    let mut sum = 0u64;
    for word in words.by_ref() {
        sum += u64::from(u16::from_be_bytes([word[0], word[1]]));
    }
    match words.remainder() {
        [last] => sum + (u64::from(*last) << 8),
        _ => sum,
    }
}

/// Folds carries into 16 bits.
pub fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    /// Checks as a receiver does: the sum over pseudo header and segment, checksum included, is all ones.
    fn has_valid_checksum(
        packet: &[u8],
        header: usize,
        from: &str,
        to: &str,
        protocol: i32,
    ) -> bool {
        let (from, to) = (address(from).ip(), address(to).ip());
        let segment = &packet[header..];
        fold(pseudo_header_sum(from, to, protocol, segment.len()) + sum_words(segment)) == 0xffff
    }

    #[test]
    fn checksums_are_valid() {
        let segment = TcpSegmentHeader {
            sequence: 0xfeed_beef,
            acknowledgement: 7,
            flags: tcp_flags::FIN | tcp_flags::ACK,
            window: 501,
            timestamp: None,
        };
        let (a, b) = ("10.1.2.3:80", "192.168.255.254:65535");
        let packet = tcp_packet(address(a), address(b), &segment, b"odd").expect("a packet");
        assert_eq!(packet.len(), 43);
        assert_eq!(fold(sum_words(&packet[..20])), 0xffff);
        assert!(has_valid_checksum(&packet, 20, a, b, libc::IPPROTO_TCP));
        let (a, b) = ("[fd00::1]:80", "[2001:db8::ffff]:65535");
        let packet = tcp_packet(address(a), address(b), &segment, b"").expect("a packet");
        assert_eq!(packet.len(), 60);
        assert!(has_valid_checksum(&packet, 40, a, b, libc::IPPROTO_TCP));
        let timed = TcpSegmentHeader {
            timestamp: Some(0xfeed_beef),
            ..segment
        };
        let packet = tcp_packet(address(a), address(b), &timed, b"odd").expect("a packet");
        assert_eq!((packet.len(), packet[52] >> 4), (40 + 32 + 3, 8));
        assert!(has_valid_checksum(&packet, 40, a, b, libc::IPPROTO_TCP));
        let packet = udp_packet(address(a), address(b), b"hello").expect("a packet");
        assert!(has_valid_checksum(&packet, 40, a, b, libc::IPPROTO_UDP));
    }

    #[test]
    fn mixed_families_and_long_payloads_are_refused() {
        let (v4, v6) = (address("10.0.0.1:1"), address("[fd00::1]:1"));
        assert!(udp_packet(v4, v6, b"").is_none());
        assert!(udp_packet(v4, v4, &vec![0; MAX_UDP_PAYLOAD]).is_some());
        assert!(udp_packet(v4, v4, &vec![0; MAX_UDP_PAYLOAD + 1]).is_none());
    }
}
