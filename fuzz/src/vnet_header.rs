//! Packets with the header of a TUN, written back to the stack.

use holdfast_sys::tun::{DATA_VALID, NEEDS_CSUM, VNET_HEADER_LEN, VnetHeader};

/// Checks the header made for writing a packet back: the header has no flag that the kernel ignores, changes at most
/// two bytes of the packet, and survives writing and parsing.
pub fn run(data: &[u8]) -> bool {
    let Some(header) = VnetHeader::parse(data) else {
        return false;
    };
    assert_eq!(header.to_bytes(), data[..VNET_HEADER_LEN]);
    let mut packet = data[VNET_HEADER_LEN..].to_vec();
    let rewritten_header = header.for_reinjection(&mut packet);
    assert_eq!(rewritten_header.flags & !NEEDS_CSUM, 0);
    assert_eq!(
        VnetHeader::parse(&rewritten_header.to_bytes()),
        Some(rewritten_header)
    );
    let pairs = packet.iter().zip(&data[VNET_HEADER_LEN..]);
    assert!(pairs.filter(|(now, then)| now != then).count() <= 2);
    header.flags & DATA_VALID != 0 && rewritten_header.flags == NEEDS_CSUM
}
