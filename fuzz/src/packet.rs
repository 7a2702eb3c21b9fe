//! Packets as the hold reads them.

use holdfast_wire::Inbound;

/// Any bytes are a packet of a flow or none.
pub fn run(data: &[u8]) -> bool {
    Inbound::parse(data).is_some()
}
