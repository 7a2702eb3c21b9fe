//! Counts the round trips between two hosts at the beginning of an SCTP association, from a capture.

use std::net::IpAddr;
use std::path::Path;

/// Chunk types and lengths of headers (RFC 9260 section 3).
const DATA: u8 = 0;
const INIT: u8 = 1;
/// SACK, HEARTBEAT, HEARTBEAT ACK: chunks that the stacks send by timers, and that delay nothing.
const CONTROL_CHUNKS: std::ops::RangeInclusive<u8> = 3..=5;
const COMMON_HEADER: usize = 12;

/// An SCTP packet, represented by the first chunk outside [`CONTROL_CHUNKS`]. A packet without such a chunk is left out.
struct Packet {
    from: IpAddr,
    to: IpAddr,
    chunk: u8,
    /// Payload protocol identifier, if the chunk is DATA.
    ppid: Option<u32>,
}

/// Returns the number of round trips from the first packet of `own` to `other` (the INIT) until `own` sends data of its
/// program: by then the association is up and the other end has its state. A round trip is one or more packets of
/// `own`, followed by an answer.
pub fn round_trips(file: &Path, own: IpAddr, other: IpAddr) -> usize {
    let packets = read_capture(file);
    let packets_between = packets.iter().filter(|packet| {
        (packet.from, packet.to) == (own, other) || (packet.from, packet.to) == (other, own)
    });
    let from_init = packets_between.skip_while(|packet| packet.chunk != INIT || packet.from != own);
    let (mut trips, mut is_waiting) = (0, false);
    for packet in from_init {
        if packet.from == own && packet.chunk == DATA && packet.ppid == Some(0) {
            return trips;
        }
        match packet.from == own {
            true => is_waiting = true,
            false => {
                trips += usize::from(is_waiting);
                is_waiting = false;
            }
        }
    }
    panic!("no data of the program in {}", file.display());
}

/// Reads a classic pcap file: a file header of 24 bytes, and a header of 16 bytes before each packet.
fn read_capture(file: &Path) -> Vec<Packet> {
    let bytes = std::fs::read(file).expect("the capture");
    let mut rest = &bytes[24..];
    let mut packets = Vec::new();
    while rest.len() >= 16 {
        let length = u32::from_le_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        packets.extend(parse_packet(&rest[16..16 + length]));
        rest = &rest[16 + length..];
    }
    packets
}

/// Parses Ethernet, IPv4, optional UDP, and SCTP. The snapshot length truncates only the end of a packet.
fn parse_packet(frame: &[u8]) -> Option<Packet> {
    const UDP: u8 = 17;
    const SCTP: u8 = 132;
    let ip = frame.get(14..)?;
    let header = ip.get(..20).filter(|header| header[0] >> 4 == 4)?;
    let address = |at: usize| IpAddr::from([0, 1, 2, 3].map(|index| header[at + index]));
    let mut sctp = ip.get(usize::from(header[0] & 15) * 4..)?;
    match header[9] {
        SCTP => {}
        UDP => sctp = sctp.get(8..)?,
        _ => return None,
    }
    let mut offset = COMMON_HEADER;
    while CONTROL_CHUNKS.contains(sctp.get(offset)?) {
        let length = sctp.get(offset + 2..offset + 4)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        offset += length.max(4).next_multiple_of(4);
    }
    let chunk = *sctp.get(offset)?;
    let ppid = sctp.get(offset + 12..offset + 16).filter(|_| chunk == DATA);
    Some(Packet {
        from: address(12),
        to: address(16),
        chunk,
        ppid: ppid.map(|bytes| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    })
}
