//! Structures of the socket API (RFC 6458) with the same layout in Linux and usrsctp, and packed address lists.

use holdfast_sys::address::RawAddress;
use std::net::SocketAddr;

/// `struct sctp_rtoinfo`, milliseconds.
#[repr(C)]
pub struct RtoInfo {
    pub assoc: u32,
    pub initial: u32,
    pub max: u32,
    pub min: u32,
}

/// `struct sctp_initmsg`.
#[repr(C)]
pub struct Initmsg {
    pub outbound_streams: u16,
    pub inbound_streams_max: u16,
    pub attempts_max: u16,
    pub timeout_ms_max: u16,
}

/// Packs addresses without gaps, each as long as its family needs, as bindx and connectx read them.
pub fn pack_addresses(addresses: &[SocketAddr]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(addresses.len() * 28);
    for &address in addresses {
        bytes.extend_from_slice(RawAddress::for_family(address, false).as_bytes());
    }
    bytes
}

/// Returns the addresses in a packed list of `count`; stops at another family than IPv4 and IPv6.
pub fn unpack_addresses(mut bytes: &[u8], count: usize) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    while addresses.len() < count {
        let Some((address, rest)) = RawAddress::split_from(bytes) else {
            break;
        };
        addresses.extend(address.to_socket_addr().map(without_scope));
        bytes = rest;
    }
    addresses
}

/// Clears the scope ID of an address that does not need one: Linux sets the interface for any IPv6 peer, but only
/// link-local addresses depend on it.
fn without_scope(mut address: SocketAddr) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address
        && !v6.ip().is_unicast_link_local()
    {
        v6.set_scope_id(0);
    }
    address
}

/// Reads a `u16` in host order.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Reads a `u32` in host order.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        let addresses: Vec<SocketAddr> = ["192.0.2.1:3863", "[2001:db8::1]:9901", "127.0.0.1:1"]
            .iter()
            .map(|text| text.parse().expect("an address"))
            .collect();
        let bytes = pack_addresses(&addresses);
        assert_eq!(bytes.len(), 16 + 28 + 16);
        assert_eq!(unpack_addresses(&bytes, 3), addresses);
        assert_eq!(unpack_addresses(&bytes[..20], 3), addresses[..1]);
        assert_eq!(unpack_addresses(&bytes, 2), addresses[..2]);
        // `sin6_scope_id` is the last word.
        let parse = |text: &str| text.parse().expect("an address");
        for (address, scope) in [("[2001:db8::1]:80", ""), ("[fe80::1]:80", "%7")] {
            let mut bytes = pack_addresses(&[parse(address)]);
            bytes[24] = 7;
            let text = unpack_addresses(&bytes, 1)[0].to_string();
            assert_eq!(text, address.replace(']', &format!("{scope}]")));
        }
    }
}
