//! Listening sockets, and the limits on connections per host.

use super::{TcpLimits, socket};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Most connections accepted in one turn.
const ACCEPT_MAX: usize = 32;
/// Pause before connections are accepted again after the system had no free descriptor.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Prefix length that identifies one host's IPv6 addresses.
const IPV6_HOST_BITS: u32 = 64;

pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    pub(super) address: SocketAddr,
    /// True if connections use TLS.
    pub(super) secure: bool,
}

impl Listener {
    pub(super) fn open(at: SocketAddr, secure: bool) -> io::Result<Self> {
        let name = |error: io::Error| io::Error::new(error.kind(), format!("TCP at {at}: {error}"));
        let (socket, address) = socket::listen(at).map_err(name)?;
        Ok(Self {
            socket,
            address,
            secure,
        })
    }

    /// Accepts a limited number of waiting connections; also returns the error if the system lacks resources for more.
    pub(super) fn accept(&self) -> (Vec<(TcpStream, SocketAddr)>, Option<io::Error>) {
        let mut accepted = Vec::new();
        for _ in 0..ACCEPT_MAX {
            match socket::accept(&self.socket) {
                Ok(Some(one)) => accepted.push(one),
                Ok(None) => break,
                Err(error) => return (accepted, Some(error)),
            }
        }
        (accepted, None)
    }
}

/// Number of a host's connections.
#[derive(Default)]
struct HostCounts {
    connections: usize,
    /// Number of its handshakes in progress.
    handshakes: usize,
}

/// Numbers of incoming connections, by host.
#[derive(Default)]
pub(super) struct ConnectionCounts(HashMap<IpAddr, HostCounts>);

impl ConnectionCounts {
    /// Counts one more connection of a host, with its handshake in progress, or returns the reason to refuse it.
    pub(super) fn admit(
        &mut self,
        address: IpAddr,
        total: usize,
        limits: &TcpLimits,
    ) -> Result<(), &'static str> {
        if total >= limits.connections {
            return Err("there are too many connections");
        }
        let counts = self.0.get(&host_key(address));
        let (connections, handshakes) =
            counts.map_or((0, 0), |has| (has.connections, has.handshakes));
        if connections >= limits.connections_per_host {
            return Err("its host has too many connections");
        }
        if handshakes >= limits.handshakes_per_host {
            return Err("its host has too many handshakes in progress");
        }
        let counts = self.0.entry(host_key(address)).or_default();
        counts.connections += 1;
        counts.handshakes += 1;
        Ok(())
    }

    /// Records the end of a handshake of a host.
    pub(super) fn on_established(&mut self, address: IpAddr) {
        if let Some(counts) = self.0.get_mut(&host_key(address)) {
            counts.handshakes -= 1;
        }
    }

    /// Records the end of a host's connection.
    pub(super) fn on_closed(&mut self, address: IpAddr, was_up: bool) {
        let host = host_key(address);
        if let Some(counts) = self.0.get_mut(&host) {
            counts.connections -= 1;
            counts.handshakes -= usize::from(!was_up);
            if counts.connections == 0 {
                self.0.remove(&host);
            }
        }
    }
}

/// Returns the address that stands for the whole host.
fn host_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (128 - IPV6_HOST_BITS);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_per_host_are_limited() {
        let limits = TcpLimits {
            connections: 5,
            connections_per_host: 3,
            handshakes_per_host: 2,
        };
        let mut hosts = ConnectionCounts::default();
        let [one, same_host, other_host] =
            ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        assert!(hosts.admit(one, 0, &limits).is_ok() && hosts.admit(same_host, 1, &limits).is_ok());
        assert!(hosts.admit(one, 2, &limits).is_err(), "two are being made");
        hosts.on_established(one);
        assert!(hosts.admit(one, 2, &limits).is_ok());
        hosts.on_established(one);
        assert!(hosts.admit(one, 3, &limits).is_err(), "three are there");
        assert!(hosts.admit(other_host, 3, &limits).is_ok());
        assert!(hosts.admit(other_host, 5, &limits).is_err(), "five in all");
        for (address, was_up) in [
            (one, true),
            (same_host, true),
            (one, false),
            (other_host, false),
        ] {
            hosts.on_closed(address, was_up);
        }
        assert!(hosts.0.is_empty());
    }
}
