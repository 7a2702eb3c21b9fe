//! Order in which held packets are replayed.

use holdfast_sys::tun::{VNET_HEADER_LEN, VnetHeader};
use holdfast_wire::SegmentPosition;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// A held packet as read from the TUN device.
#[derive(Clone, Debug)]
pub struct HeldPacket {
    /// The whole packet, with the header that the TUN device expects for a replay.
    pub bytes: Vec<u8>,
    /// For TCP, the packet's position in the stream.
    pub segment: Option<SegmentPosition>,
}

impl HeldPacket {
    /// Returns true if the packet is the first of a TCP connection.
    pub fn begins_connection(&self) -> bool {
        self.segment
            .is_some_and(|segment| segment.begins_connection)
    }

    /// Returns the packet as a frame with complete checksums and a link header without addresses; `None` if the bytes are
    /// no packet.
    pub fn to_frame(&self) -> Option<Vec<u8>> {
        let header = VnetHeader::parse(&self.bytes)?;
        let mut packet = self.bytes[VNET_HEADER_LEN..].to_vec();
        header.complete_checksum(&mut packet);
        let protocol = match packet.first()? >> 4 {
            4 => ETHERTYPE_IPV4,
            6 => ETHERTYPE_IPV6,
            _ => return None,
        };
        Some([&[0; 12], &protocol[..], &packet].concat())
    }
}

/// Sorts a flow's packets into stream order and drops duplicate data, because stragglers come by way of the donor and
/// may arrive after younger packets. Acknowledgements without data are all kept, since a duplicate acknowledgement has
/// a meaning. Datagrams keep their order.
pub fn sort_for_replay(packets: &mut Vec<HeldPacket>) {
    let Some(first) = packets.iter().find_map(|packet| packet.segment) else {
        return;
    };
    // Sequence numbers wrap, so distances from one of them are compared (RFC 9293, section 3.4).
    let distance = |sequence: u32, base: u32| sequence.wrapping_sub(base).cast_signed();
    packets.sort_by_key(|packet| {
        packet.segment.map(|segment| {
            (
                distance(segment.sequence, first.sequence),
                distance(segment.acknowledgement, first.acknowledgement),
            )
        })
    });
    packets.dedup_by(|later, earlier| match (later.segment, earlier.segment) {
        (Some(b), Some(a)) => b.length > 0 && b.sequence == a.sequence && b.length == a.length,
        _ => false,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(sequence: u32, acknowledgement: u32, length: u32) -> HeldPacket {
        HeldPacket {
            bytes: Vec::new(),
            segment: Some(SegmentPosition {
                sequence,
                acknowledgement,
                length,
                begins_connection: false,
            }),
        }
    }

    fn positions(packets: &[HeldPacket]) -> Vec<(u32, u32)> {
        packets
            .iter()
            .filter_map(|p| p.segment)
            .map(|s| (s.sequence, s.acknowledgement))
            .collect()
    }

    #[test]
    fn straggler_is_sorted_first_across_sequence_wrap() {
        let mut packets = vec![
            packet(5, 1, 10),
            packet(u32::MAX - 4, 1, 10),
            packet(15, 1, 10),
        ];
        sort_for_replay(&mut packets);
        assert_eq!(positions(&packets), [(u32::MAX - 4, 1), (5, 1), (15, 1)]);
    }

    #[test]
    fn duplicate_data_is_dropped_and_duplicate_acknowledgements_stay() {
        let mut packets = vec![
            packet(7, 1, 10),
            packet(7, 1, 10),
            packet(17, 3, 0),
            packet(17, 3, 0),
            packet(17, 2, 0),
        ];
        sort_for_replay(&mut packets);
        assert_eq!(positions(&packets), [(7, 1), (17, 2), (17, 3), (17, 3)]);
    }

    #[test]
    fn datagrams_keep_their_order() {
        let datagram = |byte| HeldPacket {
            bytes: vec![byte],
            segment: None,
        };
        let mut packets = vec![datagram(3), datagram(1), datagram(1)];
        sort_for_replay(&mut packets);
        assert_eq!(
            packets.iter().map(|p| p.bytes[0]).collect::<Vec<_>>(),
            [3, 1, 1]
        );
    }
}
