//! Socket endpoints of moving processes.
//!
//! A socket can move if its packets reach the other node. So it must have a service address, which all nodes have; or
//! have its other end in the same tree; or be a connection at a node's own address, whose packets that node continues
//! to forward.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::image::Descriptors;
use holdfast_sys::process::sockets::{Ends, SocketStatic, Sockets, halved};
use holdfast_wire::{Flow, NodeId, Protocol};

/// Endpoints of a process's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) protocol: Protocol,
    pub(crate) local: SocketAddr,
    /// Remote address of a connection.
    pub(crate) remote: Option<SocketAddr>,
}

impl Place {
    fn ends(&self) -> Ends {
        Ends::new(self.protocol == Protocol::Tcp, self.local, self.remote)
    }

    /// Returns the flow of a connection.
    pub(crate) fn flow(&self) -> Option<Flow> {
        let plain = |address: SocketAddr| SocketAddr::new(canonical(address.ip()), address.port());
        Flow::new(self.protocol, plain(self.local), plain(self.remote?)).ok()
    }

    /// Returns true if the first packet of a flow to this address reaches this socket.
    pub(crate) fn begins(&self, protocol: Protocol, address: SocketAddr) -> bool {
        let ip = self.local.ip();
        self.remote.is_none()
            && (self.protocol, self.local.port()) == (protocol, address.port())
            && (ip.is_unspecified() || canonical(ip) == address.ip())
    }

    /// Returns true if packets of a flow reach this socket.
    pub(crate) fn has(&self, flow: &Flow) -> bool {
        let wildcard = self.local.ip().is_unspecified();
        self.protocol == flow.protocol
            && self.local.port() == flow.local.port()
            && (wildcard || canonical(self.local.ip()) == flow.local.ip())
            && match self.remote {
                Some(remote) => {
                    SocketAddr::new(canonical(remote.ip()), remote.port()) == flow.remote
                }
                // A TCP connection has a socket of its own.
                None => flow.protocol == Protocol::Udp,
            }
    }
}

/// Returns an IPv4-mapped IPv6 address as IPv4.
fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Sockets of a tree, as of the last round.
#[derive(Debug, Default)]
pub(super) struct Places {
    all: BTreeMap<FileId, Place>,
    /// Sockets of the tree that are connected over the loopback device.
    near: BTreeSet<FileId>,
}

impl Places {
    /// Returns the TCP connections that were closed since the previous round.
    pub(super) fn closed_by(&self, found: &Descriptors) -> Vec<Flow> {
        let flow = |place: Option<&Place>| {
            let connection = place.filter(|place| place.protocol == Protocol::Tcp);
            connection.and_then(Place::flow)
        };
        let gone = found.gone.iter().map(|id| (id, None));
        let others = found.sockets.iter();
        let others = others.map(|(id, socket)| (id, place(socket)));
        let were = gone.chain(others).filter_map(|(id, now)| {
            let was = flow(self.all.get(id))?;
            (flow(now.as_ref()) != Some(was)).then_some(was)
        });
        were.collect()
    }

    /// Records the sockets found in a round. Returns true if any changed socket is not a connection.
    pub(super) fn follow(&mut self, found: &Descriptors) -> bool {
        let mut any = false;
        let begins = |place: Option<Place>| place.is_some_and(|place| place.remote.is_none());
        for id in &found.gone {
            any |= begins(self.put(*id, None));
        }
        for (id, socket) in &found.sockets {
            let place = place(socket);
            any |= begins(place);
            any |= begins(self.put(*id, place));
        }
        any
    }

    /// Replaces an entry. Returns the previous one.
    fn put(&mut self, id: FileId, place: Option<Place>) -> Option<Place> {
        if place.is_some_and(|place| place.ends().over_loopback().is_some()) {
            self.near.insert(id);
        } else {
            self.near.remove(&id);
        }
        match place {
            Some(place) => self.all.insert(id, place),
            None => self.all.remove(&id),
        }
    }

    /// Checks that all loopback connections of the stopped tree have both ends in the tree. Must be called by a thread
    /// in the tree's network namespace.
    pub(super) fn are_whole(&self) -> Result<(), String> {
        if self.near.is_empty() {
            return Ok(());
        }
        let ends: Vec<Ends> = self.all.values().map(Place::ends).collect();
        let found = halved(&ends).map_err(|error| format!("connections of this host: {error}"))?;
        let first = found.first();
        first.map_or(Ok(()), |(ends, why)| Err(why.text(ends, None)))
    }

    /// Returns true if packets of a flow reach one of these sockets.
    pub(super) fn has(&self, flow: &Flow) -> bool {
        self.all.values().any(|place| place.has(flow))
    }

    pub(super) fn list(&self) -> Vec<Place> {
        self.all.values().copied().collect()
    }
}

/// Returns the endpoints of the sockets that are not connections.
pub(super) fn servers(sockets: Option<&Sockets>) -> Vec<Place> {
    let sockets = sockets.into_iter().flat_map(Sockets::iter);
    let places = sockets.filter_map(|(.., fixed)| place(fixed));
    places.filter(|place| place.remote.is_none()).collect()
}

/// Returns the flows of the connections among sockets.
pub(super) fn connections(sockets: &[Arc<SocketStatic>]) -> Vec<Flow> {
    let places = sockets.iter().filter_map(|socket| place(socket));
    places.filter_map(|place| place.flow()).collect()
}

/// Returns a socket's endpoints; `None` if it is not bound or its connection was reset.
pub(super) fn place(socket: &SocketStatic) -> Option<Place> {
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
        SocketStatic::Ended { .. } | SocketStatic::Closed(_) => return None,
    };
    Some(place)
}

/// Addresses that movable sockets may have: service addresses, and for connections also node addresses.
#[derive(Debug, Clone, Default)]
pub(crate) struct Addresses {
    services: BTreeSet<IpAddr>,
    nodes: BTreeMap<IpAddr, NodeId>,
}

impl Addresses {
    pub(crate) fn new(
        services: impl IntoIterator<Item = IpAddr>,
        nodes: impl IntoIterator<Item = (IpAddr, NodeId)>,
    ) -> Addresses {
        Addresses {
            services: services.into_iter().collect(),
            nodes: nodes.into_iter().collect(),
        }
    }

    /// Returns the node with this address.
    pub(crate) fn node_at(&self, address: IpAddr) -> Option<NodeId> {
        self.nodes.get(&address).copied()
    }

    /// Checks that unaccepted connections at these addresses can be handed off after their program. Connections at
    /// service addresses can; the program must accept the others first.
    pub(super) fn may_follow(&self, waiting: &[SocketAddr]) -> Result<(), String> {
        let follows = |at: &SocketAddr| {
            let ip = canonical(at.ip());
            ip.is_unspecified() || self.services.contains(&ip)
        };
        match waiting.iter().find(|at| !follows(at)) {
            None => Ok(()),
            Some(at) => Err(format!(
                "connections wait at {at} to be accepted: try again when the program has taken them"
            )),
        }
    }

    /// Returns true if the address is a service address.
    pub(super) fn is_service(&self, address: IpAddr) -> bool {
        self.services.contains(&address)
    }

    /// Returns true if the flow is a connection at a node's own address.
    pub(crate) fn is_private(&self, flow: &Flow) -> bool {
        flow.protocol == Protocol::Tcp
            && self.nodes.contains_key(&flow.local.ip())
            && !self.services.contains(&flow.local.ip())
    }

    /// Checks that this socket can exist at another node.
    pub(super) fn check_socket(&self, socket: &SocketStatic) -> Result<(), String> {
        place(socket).map_or(Ok(()), |place| self.check_place(&place))
    }

    /// Checks all sockets among these descriptors.
    pub(super) fn check(&self, found: &Descriptors) -> Result<(), String> {
        let mut sockets = found.sockets.values();
        sockets.try_for_each(|socket| self.check_socket(socket))
    }

    fn check_place(&self, place: &Place) -> Result<(), String> {
        let address = canonical(place.local.ip());
        let nowhere = address.is_unspecified() && place.remote.is_none();
        if nowhere || address.is_loopback() || self.services.contains(&address) {
            return Ok(());
        }
        let flow = place.flow().filter(|flow| self.is_private(flow));
        let Some(flow) = flow else {
            return Err(format!(
                "its socket at {} is at an address that only this host has: let it serve at the group's",
                place.local
            ));
        };
        let to = flow.remote.ip();
        if to == address || self.services.contains(&to) {
            return Err(format!(
                "its connection from {} to {} stays within this host: end it, or move both ends together",
                flow.local, flow.remote
            ));
        }
        Ok(())
    }

    /// Returns the TCP connections among new sockets, without connections inside the tree.
    pub(super) fn connections(&self, found: &Descriptors) -> Vec<Flow> {
        let places = found.sockets.values().filter_map(place);
        let flows = places.filter_map(|place| place.flow());
        let outside = |flow: &Flow| {
            flow.protocol == Protocol::Tcp
                && (self.services.contains(&flow.local.ip()) || self.is_private(flow))
        };
        flows.filter(outside).collect()
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

    #[test]
    fn a_connection_over_loopback_needs_both_ends() {
        use std::net::{TcpListener, TcpStream};
        use std::os::fd::AsFd;
        let found = |sockets: &[(FileId, &TcpStream)]| {
            let mut reader = holdfast_sys::process::sockets::Reader::new().expect("a reader");
            let mut read = |stream: &TcpStream| reader.read(stream.as_fd()).expect("read");
            Descriptors {
                files: holdfast_sys::process::image::Files::Changes(Default::default()),
                sockets: sockets.iter().map(|(id, one)| (*id, read(one))).collect(),
                gone: BTreeSet::new(),
            }
        };
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).expect("bound");
            let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
            let (far, _) = listener.accept().expect("accepts");
            let mut places = Places::default();
            places.follow(&found(&[(1, &near)]));
            let why = places
                .are_whole()
                .expect_err("its other end is not in the tree");
            assert!(why.contains("another process has the other end"), "{why}");
            places.follow(&found(&[(2, &far)]));
            assert_eq!(places.are_whole(), Ok(()));
            places.follow(&Descriptors {
                gone: [1, 2].into(),
                ..found(&[])
            });
            assert_eq!(places.are_whole(), Ok(()));
        }
    }

    #[test]
    fn what_begins_a_flow_comes_to_who_listens() {
        let place = |local: &str, remote: Option<&str>| Place {
            protocol: Protocol::Tcp,
            local: local.parse().expect("an address"),
            remote: remote.map(|remote| remote.parse().expect("an address")),
        };
        let begins = |place: Place| place.begins(Protocol::Tcp, "10.0.0.1:80".parse().unwrap());
        assert!(begins(place("10.0.0.1:80", None)));
        assert!(begins(place("0.0.0.0:80", None)));
        assert!(begins(place("[::]:80", None)));
        assert!(begins(place("[::ffff:10.0.0.1]:80", None)));
        assert!(!begins(place("10.0.0.1:81", None)));
        assert!(!begins(place("10.0.0.2:80", None)));
        assert!(!begins(place("10.0.0.1:80", Some("10.0.1.2:4242"))));
    }

    #[test]
    fn connections_from_a_nodes_own_address_may_go() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let addresses = Addresses::new([ip("10.0.0.100")], [(ip("10.0.0.2"), NodeId(2))]);
        let check = |local: &str, remote: Option<&str>| {
            addresses.check_place(&Place {
                protocol: Protocol::Tcp,
                local: local.parse().expect("an address"),
                remote: remote.map(|remote| remote.parse().expect("an address")),
            })
        };
        assert_eq!(check("10.0.0.2:4242", Some("10.0.9.1:3306")), Ok(()));
        assert_eq!(
            check("[::ffff:10.0.0.2]:4242", Some("[::ffff:10.0.9.1]:3306")),
            Ok(())
        );
        assert_eq!(check("10.0.0.100:80", Some("10.0.9.1:4242")), Ok(()));
        assert!(
            check("10.0.0.2:80", None).is_err(),
            "it listens where nobody else is"
        );
        assert!(
            check("10.0.0.7:4242", Some("10.0.9.1:3306")).is_err(),
            "nobody knows whose it is"
        );
        assert!(
            check("10.0.0.2:4242", Some("10.0.0.2:3306")).is_err(),
            "it never leaves the host"
        );
        assert!(
            check("10.0.0.2:4242", Some("10.0.0.100:80")).is_err(),
            "nor does this"
        );
    }
}
