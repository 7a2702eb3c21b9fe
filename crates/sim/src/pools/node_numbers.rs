//! Node numbers and addresses: registrars come first, then elements, then users, and each has one address.

use crate::zone_network::Zone;
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::{Addresses, RegistrarId, SctpTransport, Transport, TransportUse};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The number of a node.
pub(super) type NodeNumber = u32;

/// The kind of a node, with its index within the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeRole {
    Registrar(usize),
    Element(usize),
    User(usize),
}

/// The nodes of a world.
#[derive(Debug)]
pub(super) struct NodeNumbers {
    registrars: u32,
    elements: u32,
    zones: Vec<Zone>,
}

impl NodeNumbers {
    pub(super) fn new(zones: &[super::ZoneConfig]) -> NodeNumbers {
        let count = zones.len();
        let mut zone_of: Vec<Zone> = (0..count).map(|zone| zone as Zone).collect();
        for counted in [
            |zone: &super::ZoneConfig| zone.elements,
            |zone: &super::ZoneConfig| zone.users,
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

    pub(super) fn role(&self, node: NodeNumber) -> NodeRole {
        if node < self.registrars {
            NodeRole::Registrar(node as usize)
        } else if node - self.registrars < self.elements {
            NodeRole::Element((node - self.registrars) as usize)
        } else {
            NodeRole::User((node - self.registrars - self.elements) as usize)
        }
    }

    pub(super) fn element(&self, index: usize) -> NodeNumber {
        self.registrars + index as u32
    }

    pub(super) fn user(&self, index: usize) -> NodeNumber {
        self.registrars + self.elements + index as u32
    }

    #[inline]
    pub(super) fn zone(&self, node: NodeNumber) -> Zone {
        self.zones[node as usize]
    }

    pub(super) fn registrars(&self) -> usize {
        self.registrars as usize
    }
}

/// The address of node 0; the others follow.
const FIRST_ADDRESS: u32 = 0x0a00_0001;

fn address(node: NodeNumber) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(FIRST_ADDRESS + node))
}

/// Returns a node's address and port for a protocol.
pub(super) fn endpoint(node: NodeNumber, protocol: PoolProtocol) -> SocketAddr {
    let port = match protocol {
        PoolProtocol::Asap => 3_863,
        PoolProtocol::Enrp => 9_901,
    };
    SocketAddr::new(address(node), port)
}

pub(super) fn sctp_transport(node: NodeNumber, protocol: PoolProtocol) -> SctpTransport {
    SctpTransport {
        port: endpoint(node, protocol).port(),
        usage: TransportUse::DataOnly,
        addresses: Addresses::from_iter([address(node)]),
    }
}

/// Returns the address of an element for users.
pub(super) fn service_transport(node: NodeNumber) -> Transport {
    Transport::Tcp {
        port: 80,
        usage: TransportUse::DataOnly,
        address: address(node),
    }
}

/// Returns the node with an address.
pub(super) fn node_at(address: IpAddr) -> Option<NodeNumber> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_sub(FIRST_ADDRESS),
        IpAddr::V6(_) => None,
    }
}

/// Returns the node of a transport.
pub(super) fn node_of(transport: &Transport) -> Option<NodeNumber> {
    match transport {
        Transport::Tcp { address, .. } => node_at(*address),
        Transport::Sctp(transport) => node_at(*transport.addresses.first()?),
        _ => None,
    }
}

/// Returns the number of a registrar in one of its incarnations: the first registrar has the lowest.
pub(super) fn registrar_id(index: usize, life: u32) -> RegistrarId {
    RegistrarId(((index as u32 + 1) << 16) + life)
}
