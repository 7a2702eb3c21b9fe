//! Packets to send, sent in batches: `sendmmsg(2)`, and UDP segmentation offload for packets of one length to one
//! peer, which then pass the kernel's stack as one.

use super::packet_receive_buffers::SocketKind;
use holdfast_sys::address::RawAddress;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

/// Most segments in one datagram (`UDP_MAX_SEGMENTS` was 64 before Linux 6.9).
const SEGMENTS_MAX: usize = 64;
/// Length of the longest datagram before segmentation, bytes.
const DATAGRAM_LEN_MAX: usize = 63_000;
/// Number of packets at which all are sent without waiting for a flush, so that the peer has work meanwhile.
const OUTBOX_PACKETS_MAX: usize = 64;
/// Number of recent groups searched for one that a packet can join.
const GROUPS_SEARCHED: usize = 8;
const CONTROL_LEN: usize = 96;

/// Path of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketPath {
    pub fd: RawFd,
    pub to: SocketAddr,
    /// Source address; `None` leaves the choice to the kernel.
    pub source: Option<IpAddr>,
    /// Type of the socket: packets to a UDP socket can be segmented; packets to the IPv4 raw socket begin with their IP
    /// header.
    pub kind: SocketKind,
}

/// Packets of one route that are sent as one datagram: all have `segment` bytes, except that the last may be shorter.
struct PacketGroup {
    route: PacketPath,
    segment: usize,
    pieces: Vec<(usize, usize)>,
    total: usize,
    is_open: bool,
}

impl PacketGroup {
    fn accepts(&self, len: usize) -> bool {
        self.is_open
            && len <= self.segment
            && self.pieces.len() < SEGMENTS_MAX
            && self.total + len <= DATAGRAM_LEN_MAX
    }

    fn push(&mut self, start: usize, len: usize) {
        self.is_open &= len == self.segment;
        self.total += len;
        self.pieces.push((start, len));
    }
}

/// Packets that wait for a flush.
#[derive(Default)]
pub struct PacketSendQueue {
    bytes: Vec<u8>,
    packets: usize,
    groups: Vec<PacketGroup>,
    spare: Vec<Vec<(usize, usize)>>,
}

impl PacketSendQueue {
    /// Adds a packet given in pieces.
    pub fn push<'a>(&mut self, route: PacketPath, pieces: impl Iterator<Item = &'a [u8]>) {
        let start = self.bytes.len();
        pieces.for_each(|piece| self.bytes.extend_from_slice(piece));
        let len = self.bytes.len() - start;
        if let (SocketKind::Raw4, Some(IpAddr::V4(source))) = (route.kind, route.source)
            && let Some(field) = self.bytes.get_mut(start + 12..start + 16)
        {
            field.copy_from_slice(&source.octets());
        }
        let recent = self.groups.iter_mut().rev().take(GROUPS_SEARCHED);
        // The newest group of the route is the only candidate, so that packets of a route stay in order.
        match recent.into_iter().find(|group| group.route == route) {
            Some(group) if route.kind == SocketKind::Udp && group.accepts(len) => {
                group.push(start, len)
            }
            _ => self.open_group(route, start, len),
        }
        self.packets += 1;
        if self.packets >= OUTBOX_PACKETS_MAX {
            self.flush();
        }
    }

    fn open_group(&mut self, route: PacketPath, start: usize, len: usize) {
        let mut pieces = self.spare.pop().unwrap_or_default();
        pieces.push((start, len));
        self.groups.push(PacketGroup {
            route,
            segment: len,
            pieces,
            total: len,
            is_open: true,
        });
    }

    /// Sends all packets. A packet that the kernel refuses is lost, as on a wire: SCTP retransmits it.
    pub fn flush(&mut self) {
        let mut groups = std::mem::take(&mut self.groups);
        let mut rest = groups.as_slice();
        while let Some(first) = rest.first() {
            let same_socket = rest.iter().take_while(|g| g.route.fd == first.route.fd);
            let (current, later) = rest.split_at(same_socket.count());
            self.send(first.route.fd, current);
            rest = later;
        }
        for mut group in groups.drain(..) {
            group.pieces.clear();
            self.spare.push(group.pieces);
        }
        self.groups = groups;
        self.bytes.clear();
        self.packets = 0;
    }

    fn send(&self, fd: RawFd, groups: &[PacketGroup]) {
        let mut batch = Batch::new(&self.bytes, groups);
        let mut done = 0;
        while done < groups.len() {
            match batch.send_from(fd, done) {
                Ok(count) => done += count,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(_) => {
                    self.send_singly(fd, &groups[done]);
                    done += 1;
                }
            }
        }
    }

    /// Sends the packets of a group that the kernel refused as a whole, for example on a device without checksum
    /// offload.
    fn send_singly(&self, fd: RawFd, group: &PacketGroup) {
        for &piece in &group.pieces {
            let single = [PacketGroup {
                route: group.route,
                segment: piece.1,
                pieces: vec![piece],
                total: piece.1,
                is_open: false,
            }];
            // A refused packet is lost.
            let _ = Batch::new(&self.bytes, &single).send_from(fd, 0);
        }
    }
}

/// Arguments of a `sendmmsg` call. Vectors get their final size before pointers to their elements are taken.
struct Batch {
    headers: Vec<libc::mmsghdr>,
    _addresses: Vec<RawAddress>,
    _vectors: Vec<libc::iovec>,
    _controls: Vec<Control>,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_LEN]);

impl Batch {
    fn new(bytes: &[u8], groups: &[PacketGroup]) -> Self {
        let mut addresses: Vec<RawAddress> = groups
            .iter()
            .map(|group| RawAddress::for_family(group.route.to, false))
            .collect();
        let mut vectors: Vec<libc::iovec> = groups
            .iter()
            .flat_map(|group| &group.pieces)
            .map(|&(start, len)| libc::iovec {
                iov_base: bytes[start..start + len].as_ptr().cast_mut().cast(),
                iov_len: len,
            })
            .collect();
        let mut controls = vec![Control([0; CONTROL_LEN]); groups.len()];
        let mut headers = Vec::with_capacity(groups.len());
        let mut first = 0;
        for (index, group) in groups.iter().enumerate() {
            let (name, name_len) = addresses[index].as_raw_mut();
            // SAFETY: all-zero bytes are a valid `mmsghdr`.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_name = name.cast();
            header.msg_hdr.msg_namelen = *name_len;
            header.msg_hdr.msg_iov = vectors[first..].as_mut_ptr();
            header.msg_hdr.msg_iovlen = group.pieces.len();
            fill_control(&mut header.msg_hdr, &mut controls[index], group);
            headers.push(header);
            first += group.pieces.len();
        }
        Self {
            headers,
            _addresses: addresses,
            _vectors: vectors,
            _controls: controls,
        }
    }

    /// Sends the messages from `first` on; returns the number sent.
    fn send_from(&mut self, fd: RawFd, first: usize) -> std::io::Result<usize> {
        let rest = &mut self.headers[first..];
        // SAFETY: every header points into vectors that live in `self`, and to bytes that the caller borrows meanwhile.
        let count = unsafe {
            libc::sendmmsg(
                fd,
                rest.as_mut_ptr(),
                rest.len() as libc::c_uint,
                libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(count).map_err(|_| std::io::Error::last_os_error())
    }
}

/// Writes control messages for the segment length and the source address, as needed.
fn fill_control(header: &mut libc::msghdr, control: &mut Control, group: &PacketGroup) {
    let mut used = 0;
    let bytes = &mut control.0;
    if group.pieces.len() > 1 {
        let segment = (group.segment as u16).to_ne_bytes();
        used += put_control_message(
            &mut bytes[used..],
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            &segment,
        );
    }
    let source = group.route.source;
    match source.filter(|_| group.route.kind != SocketKind::Raw4) {
        Some(IpAddr::V4(source)) => {
            // The value is a `struct in_pktinfo`: interface, source, (unused).
            let mut info = [0; 12];
            info[4..8].copy_from_slice(&source.octets());
            used += put_control_message(
                &mut bytes[used..],
                libc::IPPROTO_IP,
                libc::IP_PKTINFO,
                &info,
            );
        }
        Some(IpAddr::V6(source)) => {
            // The value is a `struct in6_pktinfo`: source, interface.
            let mut info = [0; 20];
            info[..16].copy_from_slice(&source.octets());
            used += put_control_message(
                &mut bytes[used..],
                libc::IPPROTO_IPV6,
                libc::IPV6_PKTINFO,
                &info,
            );
        }
        None => {}
    }
    if used > 0 {
        header.msg_control = bytes.as_mut_ptr().cast();
        header.msg_controllen = used;
    }
}

/// Writes one control message (`struct cmsghdr` of a 64-bit Linux) and returns its aligned length.
fn put_control_message(bytes: &mut [u8], level: i32, kind: i32, data: &[u8]) -> usize {
    const HEADER_LEN: usize = size_of::<libc::cmsghdr>();
    let len = HEADER_LEN + data.len();
    bytes[..8].copy_from_slice(&len.to_ne_bytes());
    bytes[8..12].copy_from_slice(&level.to_ne_bytes());
    bytes[12..16].copy_from_slice(&kind.to_ne_bytes());
    bytes[HEADER_LEN..len].copy_from_slice(data);
    len.next_multiple_of(8)
}
