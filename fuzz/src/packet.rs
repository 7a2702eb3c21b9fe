//! Parser of packets that the hold reads.

use holdfast_wire::InboundPacket;

/// Parses any bytes to a packet of a flow, or to none.
pub fn run(data: &[u8]) -> bool {
    InboundPacket::parse(data).is_some()
}
