//! Socket endpoints of moving processes.
//!
//! A socket can move if its packets reach the other node. So it must have a service address, which all nodes have; or
//! have its other end in the same tree; or be a connection at a node's own address, whose packets that node continues
//! to forward.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

use holdfast_checkpoint::files::image::FileId;
use holdfast_checkpoint::image::DescriptorUpdate;
use holdfast_checkpoint::sockets::{
    RestoredSockets, SocketAddresses, SocketStaticState, split_connections,
};
use holdfast_wire::failure::{Failure, ProgramFault};
use holdfast_wire::{Flow, NodeId, Protocol};

use crate::failure_conversion::system_call;

/// Endpoints of a process's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketEndpoint {
    pub(crate) protocol: Protocol,
    pub(crate) local: SocketAddr,
    /// Remote address of a connection.
    pub(crate) remote: Option<SocketAddr>,
}

impl SocketEndpoint {
    fn ends(&self) -> SocketAddresses {
        SocketAddresses::new(self.protocol == Protocol::Tcp, self.local, self.remote)
    }

    /// Returns the flow of a connection.
    pub(crate) fn flow(&self) -> Option<Flow> {
        let to_canonical =
            |address: SocketAddr| SocketAddr::new(canonical(address.ip()), address.port());
        Flow::new(
            self.protocol,
            to_canonical(self.local),
            to_canonical(self.remote?),
        )
        .ok()
    }

    /// Returns true if the first packet of a flow to this address reaches this socket.
    pub(crate) fn receives_new_flow(&self, protocol: Protocol, address: SocketAddr) -> bool {
        let ip = self.local.ip();
        self.remote.is_none()
            && (self.protocol, self.local.port()) == (protocol, address.port())
            && (ip.is_unspecified() || canonical(ip) == address.ip())
    }

    /// Returns true if packets of a flow reach this socket.
    pub(crate) fn receives_flow(&self, flow: &Flow) -> bool {
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
pub(super) struct TreeSockets {
    endpoints: BTreeMap<FileId, SocketEndpoint>,
    /// Sockets of the tree that are connected over the loopback device.
    loopback: BTreeSet<FileId>,
}

impl TreeSockets {
    /// Returns the TCP connections that were closed since the previous round.
    pub(super) fn closed_connections(&self, found: &DescriptorUpdate) -> Vec<Flow> {
        let tcp_flow = |endpoint: Option<&SocketEndpoint>| {
            let connection = endpoint.filter(|endpoint| endpoint.protocol == Protocol::Tcp);
            connection.and_then(SocketEndpoint::flow)
        };
        let closed = found.removed.iter().map(|id| (id, None));
        let others = found.sockets.iter();
        let others = others.map(|(id, socket)| (id, endpoint_of(socket)));
        let closed_flows = closed.chain(others).filter_map(|(id, current)| {
            let previous = tcp_flow(self.endpoints.get(id))?;
            (tcp_flow(current.as_ref()) != Some(previous)).then_some(previous)
        });
        closed_flows.collect()
    }

    /// Records the sockets found in a round. Returns true if any changed socket is not a connection.
    pub(super) fn update(&mut self, found: &DescriptorUpdate) -> bool {
        let mut is_any_listening = false;
        let is_listening =
            |endpoint: Option<SocketEndpoint>| endpoint.is_some_and(|place| place.remote.is_none());
        for id in &found.removed {
            is_any_listening |= is_listening(self.replace(*id, None));
        }
        for (id, socket) in &found.sockets {
            let endpoint = endpoint_of(socket);
            is_any_listening |= is_listening(endpoint);
            is_any_listening |= is_listening(self.replace(*id, endpoint));
        }
        is_any_listening
    }

    /// Replaces an entry. Returns the previous one.
    fn replace(&mut self, id: FileId, endpoint: Option<SocketEndpoint>) -> Option<SocketEndpoint> {
        if endpoint.is_some_and(|endpoint| endpoint.ends().loopback_peer().is_some()) {
            self.loopback.insert(id);
        } else {
            self.loopback.remove(&id);
        }
        match endpoint {
            Some(endpoint) => self.endpoints.insert(id, endpoint),
            None => self.endpoints.remove(&id),
        }
    }

    /// Checks that all loopback connections of the stopped tree have both ends in the tree. Must be called by a thread
    /// in the tree's network namespace.
    pub(super) fn check_loopback_ends(&self) -> Result<(), Failure> {
        if self.loopback.is_empty() {
            return Ok(());
        }
        let ends: Vec<SocketAddresses> =
            self.endpoints.values().map(SocketEndpoint::ends).collect();
        let halved_pairs = split_connections(&ends)
            .map_err(|error| system_call("cannot list connections of this host", &error))?;
        let first = halved_pairs.first();
        first.map_or(Ok(()), |(ends, why)| {
            Err(ProgramFault::LoopbackSplit(why.text(ends, None).into()).into())
        })
    }

    /// Returns true if packets of a flow reach one of these sockets.
    pub(super) fn receives_flow(&self, flow: &Flow) -> bool {
        self.endpoints
            .values()
            .any(|endpoint| endpoint.receives_flow(flow))
    }

    pub(super) fn list(&self) -> Vec<SocketEndpoint> {
        self.endpoints.values().copied().collect()
    }
}

/// Returns the endpoints of the sockets that are not connections.
pub(super) fn listening_endpoints(sockets: Option<&RestoredSockets>) -> Vec<SocketEndpoint> {
    let sockets = sockets.into_iter().flat_map(RestoredSockets::iter);
    let endpoints = sockets.filter_map(|(.., static_state)| endpoint_of(static_state));
    endpoints
        .filter(|endpoint| endpoint.remote.is_none())
        .collect()
}

/// Returns the flows of the connections among sockets.
pub(super) fn connection_flows(sockets: &[Arc<SocketStaticState>]) -> Vec<Flow> {
    let endpoints = sockets.iter().filter_map(|socket| endpoint_of(socket));
    endpoints.filter_map(|endpoint| endpoint.flow()).collect()
}

/// Returns a socket's endpoints; `None` if it is not bound or its connection was reset.
pub(super) fn endpoint_of(socket: &SocketStaticState) -> Option<SocketEndpoint> {
    let endpoint = match socket {
        SocketStaticState::Connection(static_state) => SocketEndpoint {
            protocol: Protocol::Tcp,
            local: static_state.local,
            remote: Some(static_state.remote),
        },
        SocketStaticState::Unconnected(static_state) => SocketEndpoint {
            protocol: Protocol::Tcp,
            local: static_state.local?,
            remote: None,
        },
        SocketStaticState::Datagrams(static_state) => SocketEndpoint {
            protocol: Protocol::Udp,
            local: static_state.local,
            remote: static_state.remote,
        },
        SocketStaticState::Ended { .. } | SocketStaticState::Closed(_) => return None,
    };
    Some(endpoint)
}

/// Addresses that movable sockets may have: service addresses, and for connections also node addresses.
#[derive(Debug, Clone, Default)]
pub(crate) struct MovableAddresses {
    /// Shared by all copies, since services change while the daemon runs.
    services: Arc<RwLock<BTreeSet<IpAddr>>>,
    /// Servers of this node that are legs of replicated services. Shared, too.
    replicated: Arc<RwLock<BTreeSet<SocketAddr>>>,
    nodes: BTreeMap<IpAddr, NodeId>,
}

impl MovableAddresses {
    pub(crate) fn new(
        services: impl IntoIterator<Item = IpAddr>,
        nodes: impl IntoIterator<Item = (IpAddr, NodeId)>,
    ) -> MovableAddresses {
        MovableAddresses {
            services: Arc::new(RwLock::new(services.into_iter().collect())),
            replicated: Arc::default(),
            nodes: nodes.into_iter().collect(),
        }
    }

    /// Replaces the service addresses, for all copies.
    pub(crate) fn set_services(&self, services: impl IntoIterator<Item = IpAddr>) {
        let mut current = self
            .services
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = services.into_iter().collect();
    }

    /// Replaces the servers of this node that are legs of replicated services, for all copies.
    pub(crate) fn set_replicated(&self, servers: BTreeSet<SocketAddr>) {
        let mut current = (self.replicated.write()).unwrap_or_else(PoisonError::into_inner);
        *current = servers;
    }

    /// Returns the replicated server that a socket belongs to.
    fn replicated_server(&self, endpoint: &SocketEndpoint) -> Option<SocketAddr> {
        let servers = (self.replicated.read()).unwrap_or_else(PoisonError::into_inner);
        let ip = canonical(endpoint.local.ip());
        let is_server = |server: &&SocketAddr| {
            endpoint.protocol == Protocol::Tcp
                && server.port() == endpoint.local.port()
                && (ip.is_unspecified() || ip == server.ip())
        };
        servers.iter().find(is_server).copied()
    }

    /// Returns the node with this address.
    pub(crate) fn node_at(&self, address: IpAddr) -> Option<NodeId> {
        self.nodes.get(&address).copied()
    }

    /// Checks that unaccepted connections at these addresses can be handed off after their program. Connections at
    /// service addresses can; the program must accept the others first.
    pub(super) fn check_handoff_of(&self, addresses: &[SocketAddr]) -> Result<(), Failure> {
        let can_hand_off = |address: &SocketAddr| {
            let ip = canonical(address.ip());
            ip.is_unspecified() || self.is_service(ip)
        };
        match addresses.iter().find(|at| !can_hand_off(at)) {
            None => Ok(()),
            Some(at) => Err(ProgramFault::UnacceptedConnections(*at).into()),
        }
    }

    /// Returns true if the address is a service address.
    pub(super) fn is_service(&self, address: IpAddr) -> bool {
        let services = self.services.read().unwrap_or_else(PoisonError::into_inner);
        services.contains(&address)
    }

    /// Returns true if the flow is a connection at a node's own address.
    pub(crate) fn is_private(&self, flow: &Flow) -> bool {
        flow.protocol == Protocol::Tcp
            && self.nodes.contains_key(&flow.local.ip())
            && !self.is_service(flow.local.ip())
    }

    /// Checks that this socket can exist at another node.
    pub(super) fn check_socket(&self, socket: &SocketStaticState) -> Result<(), Failure> {
        endpoint_of(socket).map_or(Ok(()), |endpoint| self.check_endpoint(&endpoint))
    }

    /// Checks all sockets among these descriptors.
    pub(super) fn check_descriptors(&self, found: &DescriptorUpdate) -> Result<(), Failure> {
        let mut sockets = found.sockets.values();
        sockets.try_for_each(|socket| self.check_socket(socket))
    }

    fn check_endpoint(&self, endpoint: &SocketEndpoint) -> Result<(), Failure> {
        if let Some(server) = self.replicated_server(endpoint) {
            return Err(ProgramFault::ReplicatedServer(server).into());
        }
        let address = canonical(endpoint.local.ip());
        let is_unbound_wildcard = address.is_unspecified() && endpoint.remote.is_none();
        if is_unbound_wildcard || address.is_loopback() || self.is_service(address) {
            return Ok(());
        }
        let flow = endpoint.flow().filter(|flow| self.is_private(flow));
        let Some(flow) = flow else {
            return Err(ProgramFault::HostOnlyAddress(endpoint.local).into());
        };
        let to = flow.remote.ip();
        if to == address || self.is_service(to) {
            let (local, remote) = (flow.local, flow.remote);
            return Err(ProgramFault::ConnectionWithinHost { local, remote }.into());
        }
        Ok(())
    }

    /// Returns the TCP connections among new sockets, without connections inside the tree.
    pub(super) fn connections(&self, found: &DescriptorUpdate) -> Vec<Flow> {
        let endpoints = found.sockets.values().filter_map(endpoint_of);
        let flows = endpoints.filter_map(|endpoint| endpoint.flow());
        let is_outside_tree = |flow: &Flow| {
            flow.protocol == Protocol::Tcp
                && (self.is_service(flow.local.ip()) || self.is_private(flow))
        };
        flows.filter(is_outside_tree).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_matches_its_socket_only() {
        let flow = |text: &str| text.parse::<Flow>().expect("a flow");
        let endpoint = |protocol, local: &str, remote: Option<&str>| SocketEndpoint {
            protocol,
            local: local.parse().expect("an address"),
            remote: remote.map(|remote| remote.parse().expect("an address")),
        };
        let udp = flow("udp:10.0.0.1:27960-10.0.1.2:4242");
        assert!(endpoint(Protocol::Udp, "10.0.0.1:27960", None).receives_flow(&udp));
        assert!(endpoint(Protocol::Udp, "0.0.0.0:27960", None).receives_flow(&udp));
        assert!(endpoint(Protocol::Udp, "[::]:27960", None).receives_flow(&udp));
        assert!(!endpoint(Protocol::Udp, "0.0.0.0:27961", None).receives_flow(&udp));
        assert!(!endpoint(Protocol::Udp, "10.0.0.2:27960", None).receives_flow(&udp));
        let tcp = flow("tcp:10.0.0.1:80-10.0.1.2:4242");
        let remote = Some("10.0.1.2:4242");
        assert!(endpoint(Protocol::Tcp, "10.0.0.1:80", remote).receives_flow(&tcp));
        assert!(
            endpoint(
                Protocol::Tcp,
                "[::ffff:10.0.0.1]:80",
                Some("[::ffff:10.0.1.2]:4242")
            )
            .receives_flow(&tcp)
        );
        assert!(!endpoint(Protocol::Tcp, "10.0.0.1:80", Some("10.0.1.3:4242")).receives_flow(&tcp));
        assert!(
            !endpoint(Protocol::Tcp, "10.0.0.1:80", None).receives_flow(&tcp),
            "it listens"
        );
    }

    #[test]
    fn loopback_connection_needs_both_ends_in_tree() {
        use std::net::{TcpListener, TcpStream};
        use std::os::fd::AsFd;
        let descriptors_of = |sockets: &[(FileId, &TcpStream)]| {
            let mut reader =
                holdfast_checkpoint::sockets::SocketStaticReader::new().expect("a reader");
            let mut read = |stream: &TcpStream| reader.read(stream.as_fd()).expect("read");
            DescriptorUpdate {
                files: holdfast_checkpoint::image::OpenFilesUpdate::Changes(Default::default()),
                sockets: sockets.iter().map(|(id, one)| (*id, read(one))).collect(),
                removed: BTreeSet::new(),
            }
        };
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).expect("bound");
            let local_end =
                TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
            let (other_end, _) = listener.accept().expect("accepts");
            let mut tree_sockets = TreeSockets::default();
            tree_sockets.update(&descriptors_of(&[(1, &local_end)]));
            let why = tree_sockets
                .check_loopback_ends()
                .expect_err("its other end is not in the tree");
            assert!(
                why.to_string()
                    .contains("another process has the other end"),
                "{why}"
            );
            tree_sockets.update(&descriptors_of(&[(2, &other_end)]));
            assert_eq!(tree_sockets.check_loopback_ends(), Ok(()));
            tree_sockets.update(&DescriptorUpdate {
                removed: [1, 2].into(),
                ..descriptors_of(&[])
            });
            assert_eq!(tree_sockets.check_loopback_ends(), Ok(()));
        }
    }

    #[test]
    fn new_flow_matches_listener_only() {
        let endpoint = |local: &str, remote: Option<&str>| SocketEndpoint {
            protocol: Protocol::Tcp,
            local: local.parse().expect("an address"),
            remote: remote.map(|remote| remote.parse().expect("an address")),
        };
        let receives = |endpoint: SocketEndpoint| {
            endpoint.receives_new_flow(Protocol::Tcp, "10.0.0.1:80".parse().unwrap())
        };
        assert!(receives(endpoint("10.0.0.1:80", None)));
        assert!(receives(endpoint("0.0.0.0:80", None)));
        assert!(receives(endpoint("[::]:80", None)));
        assert!(receives(endpoint("[::ffff:10.0.0.1]:80", None)));
        assert!(!receives(endpoint("10.0.0.1:81", None)));
        assert!(!receives(endpoint("10.0.0.2:80", None)));
        assert!(!receives(endpoint("10.0.0.1:80", Some("10.0.1.2:4242"))));
    }

    #[test]
    fn replicated_server_stays() {
        let server: SocketAddr = "10.0.0.2:6379".parse().expect("an address");
        let addresses = MovableAddresses::new([], [(server.ip(), NodeId(2))]);
        addresses.set_replicated([server].into());
        let check = |local: &str, remote: Option<&str>| {
            addresses.check_endpoint(&SocketEndpoint {
                protocol: Protocol::Tcp,
                local: local.parse().expect("an address"),
                remote: remote.map(|remote| remote.parse().expect("an address")),
            })
        };
        let refused = Err(ProgramFault::ReplicatedServer(server).into());
        assert_eq!(check("0.0.0.0:6379", None), refused);
        assert_eq!(
            check("[::ffff:10.0.0.2]:6379", Some("10.0.9.1:4242")),
            refused
        );
        assert_eq!(check("0.0.0.0:6380", None), Ok(()));
    }

    #[test]
    fn connection_at_node_address_may_move() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let addresses = MovableAddresses::new([ip("10.0.0.100")], [(ip("10.0.0.2"), NodeId(2))]);
        let check = |local: &str, remote: Option<&str>| {
            addresses.check_endpoint(&SocketEndpoint {
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
            "listens at the address of its own node"
        );
        assert!(
            check("10.0.0.7:4242", Some("10.0.9.1:3306")).is_err(),
            "the local address is of no known node"
        );
        assert!(
            check("10.0.0.2:4242", Some("10.0.0.2:3306")).is_err(),
            "the connection stays within the host"
        );
        assert!(
            check("10.0.0.2:4242", Some("10.0.0.100:80")).is_err(),
            "the connection to a service address stays within the host"
        );
    }
}
