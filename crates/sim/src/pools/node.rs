//! Node numbers and addresses: registrars come first, then elements, then users, and each has one address.

use crate::net::Zone;
use holdfast_proto::registrar::Protocol;
use holdfast_wire::rserpool::{Addresses, RegistrarId, SctpTransport, Transport, TransportUse};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The number of a node.
pub(super) type Node = u32;

/// The kind of a node, with its index within the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Registrar(usize),
    Element(usize),
    User(usize),
}

/// The nodes of a world.
#[derive(Debug)]
pub(super) struct Nodes {
    registrars: u32,
    elements: u32,
    zones: Vec<Zone>,
}

impl Nodes {
    pub(super) fn new(zones: &[super::Zone]) -> Nodes {
        let count = zones.len();
        let mut zone_of: Vec<Zone> = (0..count).map(|zone| zone as Zone).collect();
        for counted in [
            |zone: &super::Zone| zone.elements,
            |zone: &super::Zone| zone.users,
        ] {
            for (index, zone) in zones.iter().enumerate() {
                zone_of.extend((0..counted(zone)).map(|_| index as Zone));
            }
        }
        Nodes {
            registrars: count as u32,
            elements: zones.iter().map(|zone| zone.elements).sum(),
            zones: zone_of,
        }
    }

    pub(super) fn role(&self, node: Node) -> Role {
        if node < self.registrars {
            Role::Registrar(node as usize)
        } else if node - self.registrars < self.elements {
            Role::Element((node - self.registrars) as usize)
        } else {
            Role::User((node - self.registrars - self.elements) as usize)
        }
    }

    pub(super) fn element(&self, index: usize) -> Node {
        self.registrars + index as u32
    }

    pub(super) fn user(&self, index: usize) -> Node {
        self.registrars + self.elements + index as u32
    }

    #[inline]
    pub(super) fn zone(&self, node: Node) -> Zone {
        self.zones[node as usize]
    }

    pub(super) fn registrars(&self) -> usize {
        self.registrars as usize
    }
}

/// The address of node 0; the others follow.
const FIRST_ADDRESS: u32 = 0x0a00_0001;

fn address(node: Node) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(FIRST_ADDRESS + node))
}

/// Returns a node's address and port for a protocol.
pub(super) fn endpoint(node: Node, protocol: Protocol) -> SocketAddr {
    let port = match protocol {
        Protocol::Asap => 3_863,
        Protocol::Enrp => 9_901,
    };
    SocketAddr::new(address(node), port)
}

pub(super) fn sctp_transport(node: Node, protocol: Protocol) -> SctpTransport {
    SctpTransport {
        port: endpoint(node, protocol).port(),
        usage: TransportUse::DataOnly,
        addresses: Addresses::from_iter([address(node)]),
    }
}

/// Returns the address of an element for users.
pub(super) fn service_transport(node: Node) -> Transport {
    Transport::Tcp {
        port: 80,
        usage: TransportUse::DataOnly,
        address: address(node),
    }
}

/// Returns the node with an address.
pub(super) fn node_at(address: IpAddr) -> Option<Node> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_sub(FIRST_ADDRESS),
        IpAddr::V6(_) => None,
    }
}

/// Returns the node of a transport.
pub(super) fn node_of(transport: &Transport) -> Option<Node> {
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
