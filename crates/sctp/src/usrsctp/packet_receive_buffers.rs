//! Received packets, read in batches: `recvmmsg(2)`, and UDP receive offload, which delivers packets of one length from
//! one peer as one datagram.

use holdfast_sys::address::RawAddress;
use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// Most datagrams read in one call.
const BATCH_MAX: usize = 16;
/// Most calls before other descriptors get their turn.
pub const CALLS_MAX: usize = 8;
/// Number of packets in a batch above which the next has fewer datagrams, so that answers to the first packet do not
/// wait for the last.
pub const PACKETS_WANTED: usize = 128;
const BUFFER_LEN: usize = 65_536;
/// Distance between buffers: not a power of two, with which their first lines would evict each other from the cache.
const STRIDE: usize = BUFFER_LEN + 17 * 64;
const CONTROL_LEN: usize = 128;

/// Length of the shortest IPv4 header, bytes.
const IPV4_HEADER_LEN: usize = 20;

/// An SCTP packet with its addresses.
#[derive(Debug, PartialEq, Eq)]
pub struct ReceivedPacket<'a> {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// Source UDP port, if encapsulated.
    pub encapsulation: Option<u16>,
    pub ecn: u8,
    pub bytes: &'a [u8],
}

/// Type of the stack's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    Raw4,
    Raw6,
    Udp,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_LEN]);

/// Buffers for one batch. Heap-allocated, because headers point into them.
pub struct PacketReceiveBuffers {
    buffers: Vec<u8>,
    addresses: Vec<RawAddress>,
    controls: Vec<Control>,
    lengths: Vec<(usize, usize)>,
    /// Number of datagrams to read next time.
    next_batch_len: Cell<usize>,
}

impl Default for PacketReceiveBuffers {
    fn default() -> Self {
        Self {
            buffers: vec![0; BATCH_MAX * STRIDE],
            addresses: vec![RawAddress::empty(); BATCH_MAX],
            controls: vec![Control([0; CONTROL_LEN]); BATCH_MAX],
            lengths: Vec::with_capacity(BATCH_MAX),
            next_batch_len: Cell::new(BATCH_MAX),
        }
    }
}

impl PacketReceiveBuffers {
    /// Reads up to a batch of datagrams; returns true if none is left.
    pub fn fill(&mut self, fd: RawFd) -> io::Result<bool> {
        self.lengths.clear();
        let mut vectors: [libc::iovec; BATCH_MAX] = std::array::from_fn(|index| libc::iovec {
            iov_base: self.buffers[index * STRIDE..].as_mut_ptr().cast(),
            iov_len: BUFFER_LEN,
        });
        let mut headers: [libc::mmsghdr; BATCH_MAX] = std::array::from_fn(|index| {
            self.addresses[index] = RawAddress::empty();
            // SAFETY: all-zero bytes are a valid `mmsghdr`.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            let (name, length) = self.addresses[index].as_raw_mut();
            header.msg_hdr.msg_name = name.cast();
            header.msg_hdr.msg_namelen = *length;
            header.msg_hdr.msg_iov = &raw mut vectors[index];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = self.controls[index].0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = CONTROL_LEN;
            header
        });
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: headers, vectors and the memory that they point to outlive the call.
        let count = unsafe {
            libc::recvmmsg(
                fd,
                headers.as_mut_ptr(),
                self.next_batch_len.get() as libc::c_uint,
                flags as _,
                std::ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        let filled = headers[..count].iter();
        self.lengths.extend(filled.map(|header| {
            let length = (header.msg_len as usize).min(BUFFER_LEN);
            (length, header.msg_hdr.msg_controllen.min(CONTROL_LEN))
        }));
        Ok(count < self.next_batch_len.get())
    }

    /// Returns the packets of the batch.
    pub fn packets(&self, kind: SocketKind) -> Vec<ReceivedPacket<'_>> {
        let mut packets = Vec::new();
        self.for_each_packet(kind, |packet| packets.push(packet));
        let wanted = self.next_batch_len.get();
        self.next_batch_len.set(if packets.len() > PACKETS_WANTED {
            (wanted / 2).max(1)
        } else {
            (wanted * 2).min(BATCH_MAX)
        });
        packets
    }

    fn for_each_packet<'a>(&'a self, kind: SocketKind, mut take: impl FnMut(ReceivedPacket<'a>)) {
        for (index, &(length, control_len)) in self.lengths.iter().enumerate() {
            let bytes = &self.buffers[index * STRIDE..][..length];
            let info = DatagramInfo::read(&self.controls[index].0[..control_len]);
            let Some(from) = self.addresses[index].to_socket_addr() else {
                continue;
            };
            if kind == SocketKind::Raw4 {
                if let Some(packet) = parse_ipv4(bytes) {
                    take(packet);
                }
                continue;
            }
            let Some(destination) = info.destination else {
                continue;
            };
            let segment = info.segment.unwrap_or(length).max(1);
            for bytes in bytes.chunks(segment) {
                take(ReceivedPacket {
                    source: from.ip(),
                    destination,
                    encapsulation: (kind == SocketKind::Udp).then_some(from.port()),
                    ecn: 0,
                    bytes,
                });
            }
        }
    }
}

/// Metadata of a datagram from control messages.
#[derive(Debug, Default, PartialEq, Eq)]
struct DatagramInfo {
    destination: Option<IpAddr>,
    segment: Option<usize>,
}

impl DatagramInfo {
    /// Parses control messages (`struct cmsghdr` of a 64-bit Linux).
    fn read(mut bytes: &[u8]) -> Self {
        const HEADER_LEN: usize = size_of::<libc::cmsghdr>();
        let mut info = Self::default();
        let word = |at: usize, bytes: &[u8]| super::super::socket_api_layout::u32_at(bytes, at);
        while let (Some(len), Some(level), Some(kind)) =
            (word(0, bytes), word(8, bytes), word(12, bytes))
        {
            let len = len as usize;
            let Some(data) = bytes.get(HEADER_LEN..len) else {
                break;
            };
            match (level as i32, kind as i32) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    info.segment = word(0, data).map(|segment| segment as usize);
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    // The last of three words is `ipi_addr`, the destination in the header.
                    let octets = data.get(8..12).and_then(|o| <[u8; 4]>::try_from(o).ok());
                    info.destination = octets.map(|octets| Ipv4Addr::from(octets).into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let octets = data.get(..16).and_then(|o| <[u8; 16]>::try_from(o).ok());
                    info.destination = octets.map(|octets| Ipv6Addr::from(octets).into());
                }
                _ => {}
            }
            match bytes.get(len.next_multiple_of(8)..) {
                Some(rest) => bytes = rest,
                None => break,
            }
        }
        info
    }
}

/// Parses a packet of protocol 132 from an IPv4 raw socket, which includes the IP header.
fn parse_ipv4(bytes: &[u8]) -> Option<ReceivedPacket<'_>> {
    let header = bytes.get(..IPV4_HEADER_LEN)?;
    let header_len = usize::from(header[0] & 0xf) * 4;
    let octets =
        |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    (header_len >= IPV4_HEADER_LEN).then_some(())?;
    Some(ReceivedPacket {
        source: octets(12).into(),
        destination: octets(16).into(),
        encapsulation: None,
        ecn: header[1] & 3,
        bytes: bytes.get(header_len..)?,
    })
}

/// Returns the socket address of a packet's end, in the stack's format.
pub fn raw_address(ip: IpAddr, port: u16) -> RawAddress {
    RawAddress::for_family(SocketAddr::new(ip, port), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn control_messages_are_read() {
        let mut bytes = Vec::new();
        for (level, kind, data) in [
            (libc::SOL_UDP, libc::UDP_GRO, vec![100, 0, 0, 0]),
            (
                libc::IPPROTO_IP,
                libc::IP_PKTINFO,
                vec![1, 0, 0, 0, 9, 9, 9, 9, 192, 0, 2, 1],
            ),
        ] {
            bytes.extend_from_slice(&(16 + data.len()).to_ne_bytes());
            bytes.extend_from_slice(&level.to_ne_bytes());
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(&data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let info = DatagramInfo {
            destination: Some("192.0.2.1".parse().expect("an address")),
            segment: Some(100),
        };
        assert_eq!(DatagramInfo::read(&bytes), info);
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(bytes: Vec<u8>) {
            DatagramInfo::read(&bytes);
            if let Some(packet) = parse_ipv4(&bytes) {
                prop_assert!(packet.bytes.len() + IPV4_HEADER_LEN <= bytes.len());
            }
        }
    }
}
