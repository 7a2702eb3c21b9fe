//! Writes services, nodes and placement from the configuration into the maps.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use holdfast_bpf::Error;
use holdfast_bpf::shared_with_c::{
    MAX_SERVICES, NODE_ENCAP, NODE_HOLDER, NODE_KNOWN, NODE_V6, Node, Service, ServiceKey,
    Successor, to_mapped,
};
use holdfast_wire::{NodeId, Protocol};

use super::Dataplane;
use super::placement::placement_table;
use crate::config::{PlacementRule, ServiceConfig};

/// Path to a node, from the neighbour and route tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRoute {
    /// Address of the node.
    pub address: std::net::IpAddr,
    /// Link address of the node, or of the router towards it.
    pub link: [u8; 6],
    /// This node's link address on that interface.
    pub own_link: [u8; 6],
    /// Index of the interface.
    pub ifindex: u32,
    /// True if a router is in between, so that packets must be encapsulated.
    pub routed: bool,
}

impl Dataplane {
    /// Sets the path to a node. Packets that the node has encapsulated are accepted.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn set_node(&self, id: NodeId, path: &NodeRoute, is_holder: bool) -> Result<(), Error> {
        let mut flags = NODE_KNOWN;
        flags |= if path.routed { NODE_ENCAP } else { 0 };
        flags |= if path.address.is_ipv6() { NODE_V6 } else { 0 };
        flags |= if is_holder { NODE_HOLDER } else { 0 };
        let node = Node {
            address: to_mapped(path.address),
            link: path.link,
            own_link: path.own_link,
            ifindex: path.ifindex,
            flags,
            pad: 0,
        };
        self.programs.nodes.set(&u32::from(id.0), &node)?;
        self.programs.peers.set(&node.address, &id.0)
    }

    /// Fills the first placement table of a service, then adds the service and its bare address (for fragments, ARP and
    /// ND).
    ///
    /// # Errors
    /// Too many services, or the kernel refuses the change.
    pub fn set_service(&mut self, index: u16, service: &ServiceConfig) -> Result<(), Error> {
        if usize::from(index) >= MAX_SERVICES {
            let reason = format!("at most {MAX_SERVICES} services are possible");
            return Err(Error::Map {
                name: "services",
                reason,
            });
        }
        self.programs
            .set_placement(index, 0, &placement_table(&service.weights))?;
        self.generations.insert(index, 0);
        self.service_rows
            .insert((service.protocol, service.address), index);
        let value = service_value(index, 0, false, service, &service.weights);
        self.programs
            .services
            .set(&service_key(service.protocol, service.address), &value)?;
        let bare = SocketAddr::new(service.address.ip(), 0);
        self.programs
            .services
            .set(&service_key(service.protocol, bare), &value)
    }

    /// Returns the node to which the server of a service has moved.
    #[must_use]
    pub fn successor(&self, service: &ServiceConfig) -> Option<Successor> {
        let key = service_key(service.protocol, service.address);
        self.programs.successors.get(&key).ok()?
    }

    /// Sets or removes the node to which the server of a service has moved.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn set_successor(
        &self,
        service: &ServiceConfig,
        to: Option<Successor>,
    ) -> Result<(), Error> {
        let key = service_key(service.protocol, service.address);
        match to {
            Some(to) => self.programs.successors.set(&key, &to),
            None => self.programs.successors.remove(&key),
        }
    }

    /// Changes the placement of new flows of a service. Existing flows stay: a flow without an entry is found by the
    /// previous table.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn set_weights(
        &mut self,
        index: u16,
        service: &ServiceConfig,
        weights: &BTreeMap<NodeId, u32>,
    ) -> Result<(), Error> {
        let next = 1 - self.generations.get(&index).copied().unwrap_or(0);
        self.programs
            .set_placement(index, next, &placement_table(weights))?;
        self.generations.insert(index, next);
        let value = service_value(index, next, true, service, weights);
        self.programs
            .services
            .set(&service_key(service.protocol, service.address), &value)
    }
}

fn service_value(
    index: u16,
    generation: u8,
    has_previous: bool,
    service: &ServiceConfig,
    weights: &BTreeMap<NodeId, u32>,
) -> Service {
    // With placement by port, the whole service belongs to the node of greatest weight (the lowest id among equals).
    let heaviest = weights
        .iter()
        .max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0)));
    Service {
        index,
        generation,
        by_port: u8::from(service.placement == PlacementRule::Port),
        port_owner: heaviest.map_or(0, |(node, _)| node.0),
        has_previous: u8::from(has_previous),
        pad: 0,
    }
}

fn service_key(protocol: Protocol, address: SocketAddr) -> ServiceKey {
    ServiceKey {
        address: to_mapped(address.ip()),
        port: address.port().to_be_bytes(),
        protocol: protocol.number(),
        pad: 0,
    }
}
