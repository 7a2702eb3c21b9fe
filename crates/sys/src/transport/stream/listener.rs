//! Sockets that others connect to, and how many of them each host may have.

use super::{StreamLimits, socket};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Connections taken in one turn.
const ACCEPT_MAX: usize = 32;
/// Until connections are taken again, where there were no descriptors.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// Bits of an IPv6 address that one host has.
const IPV6_HOST_BITS: u32 = 64;

pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    pub(super) address: SocketAddr,
    /// Whether TLS is spoken.
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

    /// Some of those who wait, and what is missing if there is nothing to take more in with.
    pub(super) fn accept(&self) -> (Vec<(TcpStream, SocketAddr)>, Option<io::Error>) {
        let mut came = Vec::new();
        for _ in 0..ACCEPT_MAX {
            match socket::accept(&self.socket) {
                Ok(Some(one)) => came.push(one),
                Ok(None) => break,
                Err(error) => return (came, Some(error)),
            }
        }
        (came, None)
    }
}

/// What a host has.
#[derive(Default)]
struct Host {
    all: usize,
    /// Of those, the ones that are being made.
    coming: usize,
}

/// Connections that others made, by host.
#[derive(Default)]
pub(super) struct Hosts(HashMap<IpAddr, Host>);

impl Hosts {
    /// A host has one connection more, which is being made.
    pub(super) fn admit(
        &mut self,
        address: IpAddr,
        total: usize,
        limits: &StreamLimits,
    ) -> Result<(), &'static str> {
        if total >= limits.connections {
            return Err("there are too many connections");
        }
        let has = self.0.get(&host(address));
        let (all, coming) = has.map_or((0, 0), |has| (has.all, has.coming));
        if all >= limits.connections_per_host {
            return Err("its host has too many connections");
        }
        if coming >= limits.handshakes_per_host {
            return Err("its host begins too many connections at once");
        }
        let has = self.0.entry(host(address)).or_default();
        has.all += 1;
        has.coming += 1;
        Ok(())
    }

    /// One of a host's connections is made.
    pub(super) fn came_up(&mut self, address: IpAddr) {
        if let Some(has) = self.0.get_mut(&host(address)) {
            has.coming -= 1;
        }
    }

    /// One of a host's connections is no more.
    pub(super) fn left(&mut self, address: IpAddr, was_up: bool) {
        let host = host(address);
        if let Some(has) = self.0.get_mut(&host) {
            has.all -= 1;
            has.coming -= usize::from(!was_up);
            if has.all == 0 {
                self.0.remove(&host);
            }
        }
    }
}

/// The host that an address counts for.
fn host(address: IpAddr) -> IpAddr {
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
    fn a_host_has_its_share_and_no_more() {
        let limits = StreamLimits {
            connections: 5,
            connections_per_host: 3,
            handshakes_per_host: 2,
        };
        let mut hosts = Hosts::default();
        let [one, same, other] =
            ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        assert!(hosts.admit(one, 0, &limits).is_ok() && hosts.admit(same, 1, &limits).is_ok());
        assert!(hosts.admit(one, 2, &limits).is_err(), "two are being made");
        hosts.came_up(one);
        assert!(hosts.admit(one, 2, &limits).is_ok());
        hosts.came_up(one);
        assert!(hosts.admit(one, 3, &limits).is_err(), "three are there");
        assert!(hosts.admit(other, 3, &limits).is_ok());
        assert!(hosts.admit(other, 5, &limits).is_err(), "five in all");
        for (address, was_up) in [(one, true), (same, true), (one, false), (other, false)] {
            hosts.left(address, was_up);
        }
        assert!(hosts.0.is_empty());
    }
}
