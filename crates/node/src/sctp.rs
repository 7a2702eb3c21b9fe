//! Addresses of SCTP endpoints.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use holdfast_sys::transport::Endpoint;
use holdfast_wire::rserpool::{Addresses, SctpTransport, TransportUse};

/// Where others reach an endpoint: on loopback only if it has no other address.
///
/// # Errors
/// What the stack says; `AddrNotAvailable` if the host has no address.
pub(crate) fn reached_at(endpoint: &dyn Endpoint) -> io::Result<Vec<SocketAddr>> {
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

/// These addresses, with the port of the first, without a control channel.
pub(crate) fn data_transport(addresses: &[SocketAddr]) -> SctpTransport {
    SctpTransport {
        port: addresses.first().map_or(0, SocketAddr::port),
        usage: TransportUse::DataOnly,
        addresses: addresses.iter().map(SocketAddr::ip).collect::<Addresses>(),
    }
}

/// The address that packets to `to` leave from, as the kernel's routes say. Nothing is sent.
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
