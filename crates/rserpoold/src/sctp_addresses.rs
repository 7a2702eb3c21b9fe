//! Addresses of SCTP endpoints.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use holdfast_sctp::TransportEndpoint;
use holdfast_wire::rserpool::{Addresses, SctpTransport, TransportUse};

/// Returns the addresses at which others reach an endpoint; loopback addresses only if there is no other.
///
/// # Errors
/// The stack's error; `AddrNotAvailable` if the host has no address.
pub(crate) fn reachable_addresses(endpoint: &dyn TransportEndpoint) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = endpoint.local_addresses()?;
    if addresses.iter().any(|address| !address.ip().is_loopback()) {
        addresses.retain(|address| !address.ip().is_loopback());
    }
    if addresses.is_empty() {
        let text = "this host has no address";
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
    }
    Ok(addresses)
}

/// Returns a transport with these addresses, the port of the first, and no control channel.
pub(crate) fn data_transport(addresses: &[SocketAddr]) -> SctpTransport {
    SctpTransport {
        port: addresses.first().map_or(0, SocketAddr::port),
        usage: TransportUse::DataOnly,
        addresses: addresses.iter().map(SocketAddr::ip).collect::<Addresses>(),
    }
}

/// Returns the source address of packets to `to`, from the kernel's routes. Sends nothing.
///
/// # Errors
/// There is no route.
pub(crate) fn source_towards(to: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0; 16], 0).into(),
    };
    let probe = UdpSocket::bind(any)?;
    probe.connect(to)?;
    Ok(probe.local_addr()?.ip())
}
