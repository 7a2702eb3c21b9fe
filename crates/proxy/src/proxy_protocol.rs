//! The header of the PROXY protocol, version 2, binary
//! (<https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>, section 2.2).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// First bytes of every header.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY: the connection is relayed for a client.
const VERSION_AND_COMMAND: u8 = 0x21;
/// TCP over IPv4 and over IPv6.
const TCP_OVER_IPV4: u8 = 0x11;
const TCP_OVER_IPV6: u8 = 0x21;

/// Returns the header of a client's TCP connection: 28 bytes with IPv4 addresses, 52 bytes with IPv6 addresses.
/// `service` is the address that the client connected to.
///
/// IPv4 addresses mapped into IPv6 (RFC 4291, section 2.5.5.2) count as IPv4. An IPv4 address beside an IPv6 address is
/// written as a mapped one.
pub fn header(client: SocketAddr, service: SocketAddr) -> Vec<u8> {
    let mut header = Vec::from(SIGNATURE);
    header.push(VERSION_AND_COMMAND);
    match (client.ip().to_canonical(), service.ip().to_canonical()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            header.push(TCP_OVER_IPV4);
            push_addresses(&mut header, &source.octets(), &destination.octets());
        }
        (source, destination) => {
            header.push(TCP_OVER_IPV6);
            let [source, destination] = [source, destination].map(|ip| to_ipv6(ip).octets());
            push_addresses(&mut header, &source, &destination);
        }
    }
    header.extend(client.port().to_be_bytes());
    header.extend(service.port().to_be_bytes());
    header
}

/// Adds the length of addresses and ports, and the two addresses.
fn push_addresses(header: &mut Vec<u8>, source: &[u8], destination: &[u8]) {
    let length = (source.len() + destination.len() + 2 * size_of::<u16>()) as u16;
    header.extend(length.to_be_bytes());
    header.extend(source);
    header.extend(destination);
}

fn to_ipv6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(client: &str, service: &str) -> Vec<u8> {
        header(client.parse().unwrap(), service.parse().unwrap())
    }

    #[test]
    fn ipv4_header_has_the_bytes_of_the_specification() {
        let expected = [
            // Signature, version and command, TCP over IPv4, length 12.
            0x0d, 0x0a, 0x0d, 0x0a, 0x00, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a, 0x21, 0x11, 0,
            12, // Addresses and ports 4242 and 80.
            10, 0, 1, 2, 10, 80, 255, 1, 0x10, 0x92, 0, 80,
        ];
        assert_eq!(header_of("10.0.1.2:4242", "10.80.255.1:80"), expected);
    }

    #[test]
    fn ipv6_header_has_the_bytes_of_the_specification() {
        let header = header_of("[fd00::1:2]:65535", "[fd00::ff]:443");
        assert_eq!(header.len(), 52);
        assert_eq!(header[..12], SIGNATURE);
        assert_eq!(header[12..16], [0x21, 0x21, 0, 36]);
        let source: Ipv6Addr = "fd00::1:2".parse().unwrap();
        assert_eq!(header[16..32], source.octets());
        let destination: Ipv6Addr = "fd00::ff".parse().unwrap();
        assert_eq!(header[32..48], destination.octets());
        assert_eq!(header[48..], [0xff, 0xff, 0x01, 0xbb]);
    }

    #[test]
    fn mapped_addresses_are_written_as_ipv4() {
        assert_eq!(
            header_of("[::ffff:10.0.1.2]:4242", "[::ffff:10.80.255.1]:80"),
            header_of("10.0.1.2:4242", "10.80.255.1:80")
        );
    }

    #[test]
    fn mixed_families_are_written_as_ipv6() {
        let header = header_of("10.0.1.2:4242", "[fd00::ff]:80");
        assert_eq!(header[12..16], [0x21, 0x21, 0, 36]);
        assert_eq!(header[26..32], [0xff, 0xff, 10, 0, 1, 2]);
    }
}
