//! Announcements that a host has taken over an address: gratuitous ARP (RFC 5227 section 3) and unsolicited neighbour
//! advertisements (RFC 4861 section 7.2.6). Hosts that know the address replace its link address at once.

use crate::net::Interface;
use crate::packet::{send_frame, transport_checksum};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const BROADCAST_LINK: [u8; 6] = [0xff; 6];
/// Link address of the group of all IPv6 nodes (RFC 2464 section 7).
const ALL_NODES_LINK: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// The group of all IPv6 nodes on a link (RFC 4291 section 2.7.1).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// Flag of an advertisement that replaces what the receiver knows (RFC 4861 section 4.4).
const ADVERTISEMENT_OVERRIDE: u8 = 0x20;

/// Announces on the link of `interface` that `address` is at the interface's link address.
///
/// # Errors
/// Errors of `socket(2)` and `sendto(2)`.
pub fn announce(interface: &Interface, address: IpAddr) -> io::Result<()> {
    let frame = match address {
        IpAddr::V4(v4) => arp_announcement(interface.mac, v4),
        IpAddr::V6(v6) => neighbour_advertisement(interface.mac, v6),
    };
    send_frame(interface.index, &frame)
}

/// Builds an ARP request for `address` by `address` itself, to everybody.
fn arp_announcement(link: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(42);
    frame.extend_from_slice(&BROADCAST_LINK);
    frame.extend_from_slice(&link);
    frame.extend_from_slice(&ETHERTYPE_ARP);
    // Ethernet, IPv4, lengths of their addresses, a request.
    frame.extend_from_slice(&[0, 1, 0x08, 0, 6, 4, 0, 1]);
    frame.extend_from_slice(&link);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&[0; 6]);
    frame.extend_from_slice(&address.octets());
    frame
}

/// Builds an unsolicited neighbour advertisement for `address`, to all nodes.
fn neighbour_advertisement(link: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    let mut message = vec![136, 0, 0, 0, ADVERTISEMENT_OVERRIDE, 0, 0, 0];
    message.extend_from_slice(&address.octets());
    // Option: the target's link address, 8 bytes.
    message.extend_from_slice(&[2, 1]);
    message.extend_from_slice(&link);
    let source = SocketAddr::new(address.into(), 0);
    let destination = SocketAddr::new(ALL_NODES.into(), 0);
    let sum = transport_checksum(source, destination, libc::IPPROTO_ICMPV6, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = Vec::with_capacity(14 + 40 + message.len());
    frame.extend_from_slice(&ALL_NODES_LINK);
    frame.extend_from_slice(&link);
    frame.extend_from_slice(&ETHERTYPE_IPV6);
    frame.extend_from_slice(&[0x60, 0, 0, 0, 0, message.len() as u8]);
    // Receivers check the hop limit of 255, which no router lets pass.
    frame.extend_from_slice(&[libc::IPPROTO_ICMPV6 as u8, 255]);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&ALL_NODES.octets());
    frame.extend_from_slice(&message);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: [u8; 6] = [2, 0, 0, 0, 0, 9];

    #[test]
    fn arp_announcement_names_address_twice() {
        let frame = arp_announcement(LINK, Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(frame.len(), 42);
        assert_eq!(frame[6..12], LINK);
        assert_eq!(frame[28..32], [10, 0, 0, 1]);
        assert_eq!(frame[28..32], frame[38..42]);
    }

    #[test]
    fn advertisement_has_valid_checksum() {
        let address: Ipv6Addr = "fd00::9".parse().expect("an address");
        let frame = neighbour_advertisement(LINK, address);
        assert_eq!(frame.len(), 14 + 40 + 32);
        let message = &frame[54..];
        let source = SocketAddr::new(address.into(), 0);
        let destination = SocketAddr::new(ALL_NODES.into(), 0);
        // The sum over a message with its own checksum is all ones, the complement of which is zero.
        let sum = transport_checksum(source, destination, libc::IPPROTO_ICMPV6, message);
        assert_eq!(sum, 0);
        assert_eq!(message[message.len() - 6..], LINK);
    }
}
