//! The parts of an IP packet that the hold needs: its flow, and the position of a TCP segment in the stream.

use std::net::SocketAddr;

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};

use crate::{Flow, Protocol};

/// An inbound packet of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboundPacket {
    /// The packet's flow: the destination is the service's side.
    pub flow: Flow,
    /// The TCP segment; none for UDP.
    pub segment: Option<SegmentPosition>,
}

/// Position of a TCP segment in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentPosition {
    /// Sequence number of its first byte.
    pub sequence: u32,
    /// The acknowledgement number.
    pub acknowledgement: u32,
    /// Length in sequence space: payload bytes, SYN and FIN.
    pub length: u32,
    /// True for the first segment of a connection: a SYN without ACK.
    pub begins_connection: bool,
}

impl InboundPacket {
    /// Parses an IP packet without link header. A GSO packet may be longer than its header says; a fragment belongs to
    /// no flow. `None` for anything other than TCP or UDP.
    #[must_use]
    pub fn parse(packet: &[u8]) -> Option<InboundPacket> {
        let sliced = LaxSlicedPacket::from_ip(packet).ok()?;
        let (source, destination) = match sliced.net? {
            LaxNetSlice::Ipv4(ip) => (
                ip.header().source_addr().into(),
                ip.header().destination_addr().into(),
            ),
            LaxNetSlice::Ipv6(ip) => (
                ip.header().source_addr().into(),
                ip.header().destination_addr().into(),
            ),
            LaxNetSlice::Arp(_) => return None,
        };
        let flow = |protocol, local, remote| Flow {
            protocol,
            local: SocketAddr::new(destination, local),
            remote: SocketAddr::new(source, remote),
        };
        match sliced.transport? {
            TransportSlice::Tcp(tcp) => Some(InboundPacket {
                flow: flow(Protocol::Tcp, tcp.destination_port(), tcp.source_port()),
                segment: Some(SegmentPosition {
                    sequence: tcp.sequence_number(),
                    acknowledgement: tcp.acknowledgment_number(),
                    length: u32::try_from(tcp.payload().len()).ok()?
                        + u32::from(tcp.fin())
                        + u32::from(tcp.syn()),
                    begins_connection: tcp.syn() && !tcp.ack(),
                }),
            }),
            TransportSlice::Udp(udp) => Some(InboundPacket {
                flow: flow(Protocol::Udp, udp.destination_port(), udp.source_port()),
                segment: None,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    #[test]
    fn segment_has_sequence_and_length() {
        let mut packet = Vec::new();
        PacketBuilder::ipv4([10, 0, 0, 2], [10, 0, 0, 1], 64)
            .tcp(4242, 80, 1000, 512)
            .ack(77)
            .fin()
            .write(&mut packet, b"hello")
            .expect("a packet of 45 bytes");
        let inbound = InboundPacket::parse(&packet).expect("TCP");
        assert_eq!(inbound.flow.to_string(), "tcp:10.0.0.1:80-10.0.0.2:4242");
        assert_eq!(
            inbound.segment,
            Some(SegmentPosition {
                sequence: 1000,
                acknowledgement: 77,
                length: 6,
                begins_connection: false,
            })
        );
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_give_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = InboundPacket::parse(&bytes);
        }
    }
}
