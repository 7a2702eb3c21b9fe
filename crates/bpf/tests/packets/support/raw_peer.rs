//! Hand-made packets: a peer without a network stack, at an address that no host answers for, behind a client's `eth0`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::lab::HostPosition;
use super::pool::{Pool, TCP, service};

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;
pub const ICMP_V6: u8 = 58;

/// A received TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    pub mss: Option<u16>,
    /// Link address of the frame's sender.
    pub link: [u8; 6],
}

/// Sends and receives frames on a client's `eth0`.
pub struct RawPeer {
    socket: OwnedFd,
    own_link: [u8; 6],
    hop_link: [u8; 6],
    pub position: HostPosition,
    pub v6: bool,
    pub seq: u32,
    pub ack: u32,
}

impl RawPeer {
    /// Creates a peer at `number` on the segment of `client`, with `hop_link` as its next hop towards the service.
    pub fn new(pool: &Pool, client: &str, number: u8, v6: bool, hop_link: [u8; 6]) -> Self {
        let client_position = pool.lab.position(client);
        let position = HostPosition {
            number,
            ..client_position
        };
        pool.add_neighbour(position, client_position.link());
        let ifindex = pool.lab.host(client).ifindex("eth0");
        let socket = pool.lab.host(client).run(|| packet_socket(ifindex));
        Self {
            socket,
            own_link: client_position.link(),
            hop_link,
            position,
            v6,
            seq: 1_000_000,
            ack: 0,
        }
    }

    pub fn ip(&self) -> IpAddr {
        self.position.address(self.v6)
    }

    pub fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(), port)
    }

    /// Sends an IP packet in a frame.
    pub fn send(&self, packet: &[u8]) {
        let ethertype: u16 = if packet[0] >> 4 == 6 { 0x86dd } else { 0x0800 };
        let frame = [
            &self.hop_link[..],
            &self.own_link,
            &ethertype.to_be_bytes(),
            packet,
        ]
        .concat();
        self.send_frame(&frame);
    }

    pub fn send_frame(&self, frame: &[u8]) {
        // SAFETY: the buffer is readable for its length.
        let sent = unsafe {
            libc::send(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
            )
        };
        assert_eq!(
            sent,
            isize::try_from(frame.len()).expect("small"),
            "{}",
            std::io::Error::last_os_error()
        );
    }

    /// Returns the next received frame; `None` if none arrives within `wait_ms`.
    pub fn receive(&self, wait_ms: i32) -> Option<Vec<u8>> {
        let mut poll = libc::pollfd {
            fd: self.socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, wait_ms) } != 1 {
            return None;
        }
        let mut frame = vec![0u8; 70_000];
        // SAFETY: the buffer is writable for its length.
        let length = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                frame.as_mut_ptr().cast(),
                frame.len(),
                0,
            )
        };
        frame.truncate(usize::try_from(length).expect("a frame"));
        Some(frame)
    }

    /// Sends a TCP segment from `port` with the peer's sequence numbers.
    pub fn send_segment(&self, port: u16, flags: u8, offset: u32, payload: &[u8]) {
        let to = service(self.v6);
        let tcp = tcp(
            port,
            to.port(),
            self.seq.wrapping_add(offset),
            self.ack,
            flags,
            payload,
        );
        self.send(&packet(self.ip(), to.ip(), TCP, &tcp));
    }

    /// Returns the next TCP segment from the service to `port` of this peer.
    pub fn next_segment(&self, port: u16, wait_ms: i32) -> Option<Segment> {
        while let Some(frame) = self.receive(wait_ms) {
            if let Some(segment) = self.parse_segment(&frame, port) {
                return Some(segment);
            }
        }
        None
    }

    fn parse_segment(&self, frame: &[u8], port: u16) -> Option<Segment> {
        let (kind, header) = if self.v6 {
            ([0x86, 0xdd], 40)
        } else {
            ([8, 0], 20)
        };
        let l4 = frame.get(14 + header..)?;
        let protocol = frame[14 + if self.v6 { 6 } else { 9 }];
        if frame[..6] != self.own_link || frame[12..14] != kind || protocol != TCP || l4.len() < 20
        {
            return None;
        }
        // Other peers of the client receive retransmissions at the same link address.
        let is_for_peer = match self.ip() {
            IpAddr::V4(ip) => frame[30..34] == ip.octets(),
            IpAddr::V6(ip) => frame[38..54] == ip.octets(),
        };
        if !is_for_peer || l4[2..4] != port.to_be_bytes() {
            return None;
        }
        let read_u32 = |at: usize| u32::from_be_bytes([l4[at], l4[at + 1], l4[at + 2], l4[at + 3]]);
        let mss = (l4.len() >= 24 && l4[12] >> 4 > 5 && l4[20] == 2)
            .then(|| u16::from_be_bytes([l4[22], l4[23]]));
        let link = frame[6..12].try_into().expect("six bytes");
        Some(Segment {
            flags: l4[13],
            seq: read_u32(4),
            ack: read_u32(8),
            mss,
            link,
        })
    }

    /// Performs a handshake (SYN, SYN-ACK, ACK); returns the SYN-ACK.
    pub fn handshake(&mut self, port: u16) -> Segment {
        self.send_segment(port, SYN, 0, &[]);
        let answer = self.next_segment(port, 60_000).expect("a SYN-ACK");
        assert_eq!(answer.flags & (SYN | ACK | RST), SYN | ACK);
        self.seq = self.seq.wrapping_add(1);
        self.ack = answer.seq.wrapping_add(1);
        self.send_segment(port, ACK, 0, &[]);
        answer
    }
}

fn packet_socket(ifindex: u32) -> OwnedFd {
    let all = u16::try_from(libc::ETH_P_ALL).expect("small").to_be();
    // SAFETY: no pointers.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            i32::from(all),
        )
    };
    assert!(
        fd >= 0,
        "packet socket: {}",
        std::io::Error::last_os_error()
    );
    // SAFETY: the kernel has just returned this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an all-zero sockaddr_ll is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = all;
    address.sll_ifindex = ifindex.cast_signed();
    let size = u32::try_from(size_of::<libc::sockaddr_ll>()).expect("small");
    // SAFETY: the address is valid for its size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) };
    assert_eq!(bound, 0, "bind: {}", std::io::Error::last_os_error());
    socket
}

/// Builds a TCP header without options (a SYN offers an MSS of 1460) and its payload; [`packet`] fills in the checksum.
pub fn tcp(
    source: u16,
    destination: u16,
    seq: u32,
    ack: u32,
    flags: u8,
    payload: &[u8],
) -> Vec<u8> {
    let options: &[u8] = if flags & SYN != 0 {
        &[2, 4, 5, 0xb4]
    } else {
        &[]
    };
    let offset = u8::try_from(5 + options.len() / 4).expect("small") << 4;
    let mut tcp = [source.to_be_bytes(), destination.to_be_bytes()].concat();
    tcp.extend(seq.to_be_bytes());
    tcp.extend(ack.to_be_bytes());
    tcp.extend([offset, flags, 0xff, 0xff, 0, 0, 0, 0]);
    tcp.extend(options);
    tcp.extend(payload);
    tcp
}

/// Builds a UDP datagram; [`packet`] fills in the checksum.
pub fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).expect("small");
    let header = [
        source.to_be_bytes(),
        destination.to_be_bytes(),
        length.to_be_bytes(),
        [0, 0],
    ]
    .concat();
    [&header, payload].concat()
}

/// Builds an IP packet around a transport header, and fills in the transport checksum.
pub fn packet(from: IpAddr, to: IpAddr, protocol: u8, transport: &[u8]) -> Vec<u8> {
    let mut transport = transport.to_vec();
    let checksum_offset = match protocol {
        TCP => 16,
        ICMP_V6 => 2,
        _ => 6,
    };
    let pseudo = pseudo_sum(from, to, protocol, transport.len());
    let sum = checksum(&transport, pseudo);
    transport[checksum_offset..checksum_offset + 2].copy_from_slice(&sum);
    ip_packet(from, to, protocol, 0, &transport)
}

/// Builds an IP header and its payload. `fragment` is the flags and offset field of IPv4.
pub fn ip_packet(from: IpAddr, to: IpAddr, protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).expect("small");
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0];
            header.extend((length + 20).to_be_bytes());
            header.extend([0x12, 0x34]);
            header.extend(fragment.to_be_bytes());
            header.extend([64, protocol, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
            let sum = checksum(&header, 0);
            header[10..12].copy_from_slice(&sum);
            [&header, payload].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(length.to_be_bytes());
            header.extend([protocol, 64]);
            header.extend(from.octets());
            header.extend(to.octets());
            [&header, payload].concat()
        }
        _ => panic!("two families"),
    }
}

/// Changes the TTL of an IPv4 packet, and its header checksum, which bridges verify.
pub fn set_ttl(packet: &mut [u8], ttl: u8) {
    packet[8] = ttl;
    packet[10..12].fill(0);
    let sum = checksum(&packet[..20], 0);
    packet[10..12].copy_from_slice(&sum);
}

/// Builds one fragment of a transport message: the bytes from `offset`, at most `size` (both multiples of 8).
pub fn fragment(
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    message: &[u8],
    offset: usize,
    size: usize,
) -> Vec<u8> {
    let end = message.len().min(offset + size);
    let more = u16::from(end < message.len());
    let flags_and_offset = u16::try_from(offset).expect("small");
    if from.is_ipv4() {
        return ip_packet(
            from,
            to,
            protocol,
            (more << 13) | (flags_and_offset / 8),
            &message[offset..end],
        );
    }
    let mut payload = vec![protocol, 0];
    payload.extend((flags_and_offset | more).to_be_bytes());
    payload.extend([0, 0, 0x12, 0x34]);
    payload.extend(&message[offset..end]);
    ip_packet(from, to, 44, 0, &payload)
}

fn pseudo_sum(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> u32 {
    let octets = |ip| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = [octets(from), octets(to)].concat();
    let length = u32::try_from(length).expect("small");
    words
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]))
        .sum::<u32>()
        + u32::from(protocol)
        + length
}

fn checksum(bytes: &[u8], start: u32) -> [u8; 2] {
    let mut sum = start;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// Builds a whole UDP message with its checksum, to be cut into fragments.
pub fn udp_message(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let datagram_packet = packet(
        from.ip(),
        to.ip(),
        super::pool::UDP,
        &udp(from.port(), to.port(), payload),
    );
    datagram_packet[if from.is_ipv4() { 20 } else { 40 }..].to_vec()
}
