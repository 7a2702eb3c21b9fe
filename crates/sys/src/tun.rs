//! TUN devices that carry whole IP packets, segmentation offload included, so that held packets are read and written
//! back unchanged.
//!
//! Every packet has a `virtio_net_hdr` in front (`linux/virtio_net.h`), which says if its checksum is complete and
//! how it is to be segmented. [`VnetHeader::for_reinjection`] makes the header to write a packet back with.

use crate::net::{Interface, set_mtu, set_queue_length, set_up};
use crate::packet::{fold, pseudo_header_sum, sum_words};
use crate::sockopt::{check, check_length};
use crate::sysctl;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Length of the header in front of each packet, bytes.
pub const VNET_HEADER_LEN: usize = 10;
/// Length of the largest packet with its header, bytes.
pub const PACKET_LEN_MAX: usize = 65_535 + VNET_HEADER_LEN;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the checksum field holds the sum of the pseudo header only.
pub const NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_F_DATA_VALID`: the checksum was verified by an earlier hop.
pub const DATA_VALID: u8 = 2;

/// `TUN_F_*` (`linux/if_tun.h`): checksum, TSO for IPv4, IPv6 and with ECN, USO for IPv4 and IPv6.
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x08 | 0x20 | 0x40;
/// Number of packets that the device queues for a reader.
const QUEUE_LENGTH: i32 = 50_000;

/// `struct virtio_net_hdr`, in the host's byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// [`NEEDS_CSUM`], [`DATA_VALID`] or neither.
    pub flags: u8,
    /// Type of segmentation, 0 for none.
    pub gso_type: u8,
    /// Length of all headers, bytes.
    pub header_length: u16,
    /// Payload of a segment, bytes.
    pub gso_size: u16,
    /// Offset of the checksummed data from the packet's first byte.
    pub checksum_start: u16,
    /// Offset of the checksum field from `checksum_start`.
    pub checksum_offset: u16,
}

impl VnetHeader {
    /// Parses the bytes in front of a packet; `None` for too few bytes.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let raw: &[u8; VNET_HEADER_LEN] = bytes.get(..VNET_HEADER_LEN)?.try_into().ok()?;
        let word = |at: usize| u16::from_ne_bytes([raw[at], raw[at + 1]]);
        Some(Self {
            flags: raw[0],
            gso_type: raw[1],
            header_length: word(2),
            gso_size: word(4),
            checksum_start: word(6),
            checksum_offset: word(8),
        })
    }

    /// Returns the bytes to put in front of a packet.
    #[must_use]
    pub fn to_bytes(self) -> [u8; VNET_HEADER_LEN] {
        let mut raw = [0; VNET_HEADER_LEN];
        raw[0] = self.flags;
        raw[1] = self.gso_type;
        let words = [
            self.header_length,
            self.gso_size,
            self.checksum_start,
            self.checksum_offset,
        ];
        for (slot, word) in raw[2..].chunks_exact_mut(2).zip(words) {
            slot.copy_from_slice(&word.to_ne_bytes());
        }
        raw
    }

    /// Returns the header to write `packet` back with, after `packet` was read with `self`. May change the packet's
    /// checksum field.
    ///
    /// - `NEEDS_CSUM`: unchanged. The stack then trusts the checksum.
    /// - Neither flag: unchanged. The stack verifies the checksum, which is complete.
    /// - `DATA_VALID`: a TUN ignores this flag on input and verifies the checksum field, which need not be complete
    ///   (the packet would be lost). The packet was verified before, so it becomes a `NEEDS_CSUM` packet with the
    ///   pseudo header sum in the field. A packet that is neither TCP nor UDP, or a fragment, keeps its field and loses
    ///   the flag.
    #[must_use]
    pub fn for_reinjection(mut self, packet: &mut [u8]) -> Self {
        if self.flags & NEEDS_CSUM != 0 {
            self.flags = NEEDS_CSUM;
            return self;
        }
        let verified = self.flags & DATA_VALID != 0;
        self.flags = 0;
        if !verified && self.gso_type == 0 {
            return self;
        }
        let Some(transport) = TransportHeader::find(packet) else {
            return self;
        };
        let sum = fold(transport.pseudo_sum);
        let field = transport.start + transport.checksum_offset;
        if let Some(slot) = packet.get_mut(field..field + 2) {
            slot.copy_from_slice(&sum.to_be_bytes());
            self.flags = NEEDS_CSUM;
            self.checksum_start = transport.start as u16;
            self.checksum_offset = transport.checksum_offset as u16;
        }
        self
    }
}

impl VnetHeader {
    /// Completes the checksum of a packet that was read with this header, for a way on which nobody else would.
    pub fn complete_checksum(self, packet: &mut [u8]) {
        let start = usize::from(self.checksum_start);
        let field = start + usize::from(self.checksum_offset);
        if self.flags & NEEDS_CSUM == 0 || packet.len() < field + 2 {
            return;
        }
        // The field has the sum of the pseudo header.
        let sum = !fold(sum_words(&packet[start..]));
        packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Position of a packet's TCP or UDP header.
struct TransportHeader {
    start: usize,
    checksum_offset: usize,
    pseudo_sum: u64,
}

impl TransportHeader {
    fn find(packet: &[u8]) -> Option<Self> {
        let first = *packet.first()?;
        let (start, protocol, from, to): (usize, u8, IpAddr, IpAddr) = match first >> 4 {
            4 => {
                let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff;
                if fragment != 0 {
                    return None;
                }
                let from: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
                let to: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
                (
                    usize::from(first & 15) * 4,
                    packet[9],
                    from.into(),
                    to.into(),
                )
            }
            6 => {
                let from: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
                let to: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
                (40, packet[6], from.into(), to.into())
            }
            _ => return None,
        };
        let (checksum_offset, shortest) = match i32::from(protocol) {
            libc::IPPROTO_TCP => (16, 20),
            libc::IPPROTO_UDP => (6, 8),
            _ => return None,
        };
        let length = packet
            .len()
            .checked_sub(start)
            .filter(|length| *length >= shortest)?;
        Some(Self {
            start,
            checksum_offset,
            pseudo_sum: pseudo_header_sum(from, to, i32::from(protocol), length),
        })
    }
}

/// A TUN device, open and up. The kernel removes the device with its last descriptor.
#[derive(Debug)]
pub struct Tun {
    fd: OwnedFd,
    interface: Interface,
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Tun {
    /// Makes the device `name` in this network namespace: non-blocking, with offloads, a long queue, the largest MTU, a
    /// reverse path filter that passes injected packets, no address and no router solicitations.
    ///
    /// # Errors
    /// The kernel's error; `InvalidInput` for a name longer than 15 bytes.
    pub fn open(name: &str) -> io::Result<Self> {
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
        // SAFETY: the path is a terminated string that outlives the call.
        let fd = unsafe { libc::open(c"/dev/net/tun".as_ptr(), flags) };
        check(fd)?;
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut request = crate::net::request(name)?;
        let kind = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = kind as libc::c_short;
        // SAFETY: TUNSETIFF reads and writes an `ifreq`, which outlives the call.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
        // SAFETY: TUNSETOFFLOAD takes an integer and touches no memory.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, OFFLOADS) })?;
        silence_device(name)?;
        set_queue_length(name, QUEUE_LENGTH)?;
        set_mtu(name, 65_535)?;
        set_up(name)?;
        Ok(Self {
            fd,
            interface: Interface::find(name)?,
        })
    }

    /// Returns the device's index, name, link address and MTU.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Reads the next packet into `buffer` (of [`PACKET_LEN_MAX`] bytes). Returns the header and the packet's bytes.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; otherwise errors of `read(2)`.
    pub fn read<'a>(&self, buffer: &'a mut [u8]) -> io::Result<(VnetHeader, &'a mut [u8])> {
        // SAFETY: `buffer` is writable for its length and outlives the call.
        let outcome = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        let length = check_length(outcome)?;
        let header = VnetHeader::parse(&buffer[..length]).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "a packet without a complete header",
            )
        })?;
        Ok((header, &mut buffer[VNET_HEADER_LEN..length]))
    }

    /// Passes a packet to this host's stack as if it had arrived on the device. When this function returns, the packet
    /// has gone through the stack (up to a socket's queue or backlog).
    ///
    /// # Errors
    /// Errors of `writev(2)`: `EIO` while the device is down, `EINVAL` for a malformed packet or header.
    pub fn write(&self, header: VnetHeader, packet: &[u8]) -> io::Result<()> {
        let header_bytes = header.to_bytes();
        let parts = [
            libc::iovec {
                iov_base: header_bytes.as_ptr().cast_mut().cast(),
                iov_len: header_bytes.len(),
            },
            libc::iovec {
                iov_base: packet.as_ptr().cast_mut().cast(),
                iov_len: packet.len(),
            },
        ];
        // SAFETY: both parts are readable for their lengths and outlive the call, which only reads.
        let outcome = unsafe { libc::writev(self.fd.as_raw_fd(), parts.as_ptr(), 2) };
        check_length(outcome).map(|_| ())
    }
}

/// Keeps the device from sending IPv6 packets of its own, and this host from dropping injected packets: reverse path
/// filters are loose, and packets from this host's own addresses are accepted.
fn silence_device(name: &str) -> io::Result<()> {
    for (setting, value) in [
        ("accept_ra", "0"),
        ("autoconf", "0"),
        ("addr_gen_mode", "1"),
    ] {
        let path = format!("net/ipv6/conf/{name}/{setting}");
        match sysctl::write(&path, value) {
            // A host without IPv6 has no such settings and sends no solicitations.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            outcome => outcome?,
        }
    }
    sysctl::write(&format!("net/ipv4/conf/{name}/accept_local"), "1")?;
    // The kernel uses the larger of the two settings, so 2 (loose) for this device overrides a strict filter for all.
    let global = sysctl::read("net/ipv4/conf/all/rp_filter")?;
    let filter = if global == "0" { "0" } else { "2" };
    sysctl::write(&format!("net/ipv4/conf/{name}/rp_filter"), filter)
}
