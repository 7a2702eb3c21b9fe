//! Where the sockets of a moving process are.
//!
//! A socket can move if packets find it at the other node: at a service address, which all nodes have, or within the tree.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::image::Descriptors;
use holdfast_sys::process::sockets::SocketStatic;
use holdfast_wire::{Flow, Protocol};

/// A socket of a process, as far as flows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) protocol: Protocol,
    pub(crate) local: SocketAddr,
    /// Of a connection.
    pub(crate) remote: Option<SocketAddr>,
}

impl Place {
    /// The flow of a connection.
    pub(crate) fn flow(&self) -> Option<Flow> {
        let plain = |address: SocketAddr| SocketAddr::new(canonical(address.ip()), address.port());
        Flow::new(self.protocol, plain(self.local), plain(self.remote?)).ok()
    }

    /// Whether packets of a flow come to this socket.
    pub(crate) fn has(&self, flow: &Flow) -> bool {
        let wildcard = self.local.ip().is_unspecified();
        self.protocol == flow.protocol
            && self.local.port() == flow.local.port()
            && (wildcard || canonical(self.local.ip()) == flow.local.ip())
            && match self.remote {
                Some(remote) => {
                    SocketAddr::new(canonical(remote.ip()), remote.port()) == flow.remote
                }
                // Connections have sockets of their own.
                None => flow.protocol == Protocol::Udp,
            }
    }
}

/// IPv4 as such, also where a socket of IPv6 has it.
fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The sockets of a tree, as rounds told.
#[derive(Debug, Default)]
pub(super) struct Places(BTreeMap<FileId, Place>);

impl Places {
    /// Takes what a look found.
    pub(super) fn follow(&mut self, found: &Descriptors) {
        for id in &found.gone {
            self.0.remove(id);
        }
        for (id, socket) in &found.sockets {
            match place(socket) {
                Some(place) => self.0.insert(*id, place),
                None => self.0.remove(id),
            };
        }
    }

    pub(super) fn list(&self) -> Vec<Place> {
        self.0.values().copied().collect()
    }
}

/// None of a socket that is not bound.
fn place(socket: &SocketStatic) -> Option<Place> {
    let place = match socket {
        SocketStatic::Connection(fixed) => Place {
            protocol: Protocol::Tcp,
            local: fixed.local,
            remote: Some(fixed.remote),
        },
        SocketStatic::Unconnected(fixed) => Place {
            protocol: Protocol::Tcp,
            local: fixed.local?,
            remote: None,
        },
        SocketStatic::Datagrams(fixed) => Place {
            protocol: Protocol::Udp,
            local: fixed.local,
            remote: fixed.remote,
        },
    };
    Some(place)
}

/// The addresses that sockets may have.
#[derive(Debug, Clone)]
pub(super) struct Services(BTreeSet<IpAddr>);

impl Services {
    pub(super) fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Services {
        Services(addresses.into_iter().collect())
    }

    /// Whether these sockets can be at another node.
    pub(super) fn check(&self, found: &Descriptors) -> Result<(), String> {
        for place in found.sockets.values().filter_map(place) {
            let address = canonical(place.local.ip());
            let nowhere = address.is_unspecified() && place.remote.is_none();
            if !(nowhere || address.is_loopback() || self.0.contains(&address)) {
                return Err(format!(
                    "its socket at {} is at an address that only this host has: let it serve at the group's",
                    place.local
                ));
            }
        }
        Ok(())
    }

    /// The connections of clients among these sockets.
    pub(super) fn connections(&self, places: &Places) -> BTreeSet<Flow> {
        let flows = places.0.values().filter_map(Place::flow);
        let of_clients =
            |flow: &Flow| flow.protocol == Protocol::Tcp && self.0.contains(&flow.local.ip());
        flows.filter(of_clients).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_find_the_socket_that_they_are_for() {
        let flow = |text: &str| text.parse::<Flow>().expect("a flow");
        let place = |protocol, local: &str, remote: Option<&str>| Place {
            protocol,
            local: local.parse().expect("an address"),
            remote: remote.map(|remote| remote.parse().expect("an address")),
        };
        let udp = flow("udp:10.0.0.1:27960-10.0.1.2:4242");
        assert!(place(Protocol::Udp, "10.0.0.1:27960", None).has(&udp));
        assert!(place(Protocol::Udp, "0.0.0.0:27960", None).has(&udp));
        assert!(place(Protocol::Udp, "[::]:27960", None).has(&udp));
        assert!(!place(Protocol::Udp, "0.0.0.0:27961", None).has(&udp));
        assert!(!place(Protocol::Udp, "10.0.0.2:27960", None).has(&udp));
        let tcp = flow("tcp:10.0.0.1:80-10.0.1.2:4242");
        let remote = Some("10.0.1.2:4242");
        assert!(place(Protocol::Tcp, "10.0.0.1:80", remote).has(&tcp));
        assert!(
            place(
                Protocol::Tcp,
                "[::ffff:10.0.0.1]:80",
                Some("[::ffff:10.0.1.2]:4242")
            )
            .has(&tcp)
        );
        assert!(!place(Protocol::Tcp, "10.0.0.1:80", Some("10.0.1.3:4242")).has(&tcp));
        assert!(
            !place(Protocol::Tcp, "10.0.0.1:80", None).has(&tcp),
            "it listens"
        );
    }
}
