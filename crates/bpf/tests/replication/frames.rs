//! Hand-made TCP frames with options, and their reading.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;
pub const ECE: u8 = 64;
pub const CWR: u8 = 128;

const LINK_BYTES: usize = 14;

/// A TCP segment; options are in their wire form, padded by the builder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    pub sequence: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub options: Vec<u8>,
    pub payload: Vec<u8>,
}

/// Option "timestamps".
pub fn timestamps(value: u32, echo: u32) -> Vec<u8> {
    [
        &[1, 1, 8, 10][..],
        &value.to_be_bytes(),
        &echo.to_be_bytes(),
    ]
    .concat()
}

/// Option SACK with one block.
pub fn sack(left: u32, right: u32) -> Vec<u8> {
    [
        &[1, 1, 5, 10][..],
        &left.to_be_bytes(),
        &right.to_be_bytes(),
    ]
    .concat()
}

/// Builds a frame with right checksums.
pub fn build(from: SocketAddr, to: SocketAddr, segment: &Segment) -> Vec<u8> {
    let mut options = segment.options.clone();
    options.resize(options.len().next_multiple_of(4), 1);
    let mut tcp = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    tcp.extend(segment.sequence.to_be_bytes());
    tcp.extend(segment.ack.to_be_bytes());
    let words = u8::try_from(5 + options.len() / 4).expect("small");
    tcp.extend([words << 4, segment.flags]);
    tcp.extend(segment.window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend(options);
    tcp.extend(&segment.payload);
    let sum = checksum(&tcp, pseudo_sum(from.ip(), to.ip(), tcp.len()));
    tcp[16..18].copy_from_slice(&sum);
    let length = u16::try_from(tcp.len()).expect("small");
    let mut frame = vec![2; 12];
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((length + 20).to_be_bytes());
            frame.extend([0x12, 0x34, 0x40, 0, 64, 6, 0, 0]);
            frame.extend(from.octets());
            frame.extend(to.octets());
            let sum = checksum(&frame[LINK_BYTES..], 0);
            frame[LINK_BYTES + 10..LINK_BYTES + 12].copy_from_slice(&sum);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([6, 64]);
            frame.extend(from.octets());
            frame.extend(to.octets());
        }
        _ => panic!("two families"),
    }
    frame.extend(tcp);
    frame
}

/// Reads a frame, and checks its checksums.
pub fn read(frame: &[u8]) -> (SocketAddr, SocketAddr, Segment) {
    let network = &frame[LINK_BYTES..];
    let (from, to, tcp): (IpAddr, IpAddr, &[u8]) = if frame[12..14] == [8, 0] {
        assert_eq!(checksum(&network[..20], 0), [0, 0], "IP checksum");
        let length = usize::from(u16::from_be_bytes([network[2], network[3]]));
        let address = |at: usize| -> Ipv4Addr {
            let octets: [u8; 4] = network[at..at + 4].try_into().expect("four bytes");
            octets.into()
        };
        (address(12).into(), address(16).into(), &network[20..length])
    } else {
        let length = usize::from(u16::from_be_bytes([network[4], network[5]]));
        let address = |at: usize| -> Ipv6Addr {
            let octets: [u8; 16] = network[at..at + 16].try_into().expect("sixteen bytes");
            octets.into()
        };
        (
            address(8).into(),
            address(24).into(),
            &network[40..40 + length],
        )
    };
    let sum = checksum(tcp, pseudo_sum(from, to, tcp.len()));
    assert_eq!(sum, [0, 0], "TCP checksum");
    let number = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().expect("four bytes"));
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    let header = usize::from(tcp[12] >> 4) * 4;
    let segment = Segment {
        sequence: number(4),
        ack: number(8),
        flags: tcp[13],
        window: port(14),
        options: tcp[20..header].to_vec(),
        payload: tcp[header..].to_vec(),
    };
    (
        SocketAddr::new(from, port(0)),
        SocketAddr::new(to, port(2)),
        segment,
    )
}

fn pseudo_sum(from: IpAddr, to: IpAddr, length: usize) -> u32 {
    let octets = |address| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let addresses = [octets(from), octets(to)].concat();
    let words = addresses
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
    words.sum::<u32>() + 6 + u32::try_from(length).expect("small")
}

fn checksum(bytes: &[u8], start: u32) -> [u8; 2] {
    let word = |w: &[u8]| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0));
    let mut sum = start + bytes.chunks(2).map(word).sum::<u32>();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}
