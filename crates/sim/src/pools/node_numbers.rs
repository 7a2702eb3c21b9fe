//! The nodes of a world of pools: registrars have the first numbers, then elements, then users. Each node has one
//! address.

use super::ZoneConfig;
use crate::associations::NodeNumber;
use crate::zone_network::Zone;
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::{Addresses, RegistrarId, SctpTransport, Transport, TransportUse};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The kind of a node, with its index within the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRole {
    /// A registrar of the pools' scope.
    Registrar(usize),
    /// A pool element.
    Element(usize),
    /// A pool user.
    User(usize),
}

/// The numbers, roles and zones of a world's nodes.
#[derive(Debug)]
pub struct NodeNumbers {
    registrars: u32,
    elements: u32,
    zones: Vec<Zone>,
}

impl NodeNumbers {
    /// Returns the nodes of these zones, with one registrar in each.
    #[must_use]
    pub fn new(zones: &[ZoneConfig]) -> NodeNumbers {
        let count = zones.len();
        let mut zone_of: Vec<Zone> = (0..count).map(|zone| zone as Zone).collect();
        for counted in [
            |zone: &ZoneConfig| zone.elements,
            |zone: &ZoneConfig| zone.users,
        ] {
            for (index, zone) in zones.iter().enumerate() {
                zone_of.extend((0..counted(zone)).map(|_| index as Zone));
            }
        }
        NodeNumbers {
            registrars: count as u32,
            elements: zones.iter().map(|zone| zone.elements).sum(),
            zones: zone_of,
        }
    }

    /// Returns the nodes of a world with a single zone.
    #[must_use]
    pub fn in_one_zone(registrars: usize, elements: usize, users: usize) -> NodeNumbers {
        NodeNumbers {
            registrars: registrars as u32,
            elements: elements as u32,
            zones: vec![0; registrars + elements + users],
        }
    }

    /// Returns the role of a node.
    #[must_use]
    pub fn role(&self, node: NodeNumber) -> NodeRole {
        if node < self.registrars {
            NodeRole::Registrar(node as usize)
        } else if node - self.registrars < self.elements {
            NodeRole::Element((node - self.registrars) as usize)
        } else {
            NodeRole::User((node - self.registrars - self.elements) as usize)
        }
    }

    /// Returns the number of the node with a role.
    #[inline]
    #[must_use]
    pub fn number(&self, role: NodeRole) -> NodeNumber {
        match role {
            NodeRole::Registrar(index) => index as NodeNumber,
            NodeRole::Element(index) => self.element(index),
            NodeRole::User(index) => self.user(index),
        }
    }

    /// Returns the number of an element.
    #[must_use]
    pub fn element(&self, index: usize) -> NodeNumber {
        self.registrars + index as u32
    }

    /// Returns the number of a user.
    #[must_use]
    pub fn user(&self, index: usize) -> NodeNumber {
        self.registrars + self.elements + index as u32
    }

    /// Returns the zone of a node.
    #[inline]
    #[must_use]
    pub fn zone(&self, node: NodeNumber) -> Zone {
        self.zones[node as usize]
    }

    /// Returns the number of registrars.
    #[must_use]
    pub fn registrars(&self) -> usize {
        self.registrars as usize
    }
}

/// The address of node 0; the others follow.
const FIRST_ADDRESS: u32 = 0x0a00_0001;

fn address(node: NodeNumber) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(FIRST_ADDRESS + node))
}

/// Returns a node's address and port for a protocol.
#[must_use]
pub fn endpoint(node: NodeNumber, protocol: PoolProtocol) -> SocketAddr {
    let port = match protocol {
        PoolProtocol::Asap => 3_863,
        PoolProtocol::Enrp => 9_901,
    };
    SocketAddr::new(address(node), port)
}

/// Returns a node's transport address for a protocol between nodes.
#[must_use]
pub fn sctp_transport(node: NodeNumber, protocol: PoolProtocol) -> SctpTransport {
    SctpTransport {
        port: endpoint(node, protocol).port(),
        usage: TransportUse::DataOnly,
        addresses: Addresses::from_iter([address(node)]),
    }
}

/// Returns the address of an element for users.
#[must_use]
pub fn service_transport(node: NodeNumber) -> Transport {
    Transport::Tcp {
        port: 80,
        usage: TransportUse::DataOnly,
        address: address(node),
    }
}

/// Returns the node with an address.
#[must_use]
pub fn node_at(address: IpAddr) -> Option<NodeNumber> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_sub(FIRST_ADDRESS),
        IpAddr::V6(_) => None,
    }
}

/// Returns the node of a transport.
#[must_use]
pub fn node_of(transport: &Transport) -> Option<NodeNumber> {
    match transport {
        Transport::Tcp { address, .. } => node_at(*address),
        Transport::Sctp(transport) => node_at(*transport.addresses.first()?),
        _ => None,
    }
}

/// Returns the ID of a registrar in one of its incarnations: the first registrar has the lowest.
#[must_use]
pub fn registrar_id(index: usize, life: u32) -> RegistrarId {
    RegistrarId(((index as u32 + 1) << 16) + life)
}
