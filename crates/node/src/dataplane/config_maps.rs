//! Writes services, nodes and placement from the configuration into the maps.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;

use holdfast_bpf::Error;
use holdfast_bpf::shared_with_c::{
    FlowKey, HAS_PREVIOUS, IS_REPLICATED, MAX_SERVICES, NODE_ENCAP, NODE_HOLDER, NODE_KNOWN,
    NODE_V6, Node, Service, ServiceKey, Successor, to_mapped,
};
use holdfast_proto::node_pool::{NodeFigures, shares_by_policy};
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
    pub fn set_service(&mut self, service: &ServiceConfig) -> Result<(), Error> {
        let (index, shares) = (service.row, initial_shares(service));
        if usize::from(index) >= MAX_SERVICES {
            let reason = format!("at most {MAX_SERVICES} services are possible");
            return Err(Error::Map {
                name: "services",
                reason,
            });
        }
        self.programs
            .set_placement(index, 0, &placement_table(&shares))?;
        self.generations.insert(index, 0);
        // The replicator of an earlier daemon goes on until the first view.
        let key = service_key(service.protocol, service.address);
        let known = self.programs.services.get(&key)?;
        if known.is_some_and(|known| known.flags & IS_REPLICATED != 0) {
            self.replicated_rows.insert(index);
        }
        self.service_rows
            .insert((service.protocol, service.address), index);
        let value = self.service_value((index, 0), false, service, &shares);
        self.programs
            .services
            .set(&service_key(service.protocol, service.address), &value)?;
        let bare = SocketAddr::new(service.address.ip(), 0);
        self.programs
            .services
            .set(&service_key(service.protocol, bare), &value)
    }

    /// Lets the replicator of this node take the packets of a service without a record, or ends that.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn set_replicated(
        &mut self,
        service: &ServiceConfig,
        is_replicated: bool,
    ) -> Result<(), Error> {
        let changed = match is_replicated {
            true => self.replicated_rows.insert(service.row),
            false => self.replicated_rows.remove(&service.row),
        };
        let key = service_key(service.protocol, service.address);
        let Some(mut value) = self.programs.services.get(&key)?.filter(|_| changed) else {
            return Ok(());
        };
        value.flags &= !IS_REPLICATED;
        if is_replicated {
            value.flags |= IS_REPLICATED;
        }
        self.programs.services.set(&key, &value)
    }

    /// Removes the services that are not in `services`, with all their flows. Returns the number of flows.
    ///
    /// # Errors
    /// The kernel refuses a removal.
    pub fn remove_unconfigured_services(&self, services: &[ServiceConfig]) -> Result<usize, Error> {
        let programs = &self.programs;
        let keys_of = |service: &ServiceConfig| {
            let bare = SocketAddr::new(service.address.ip(), 0);
            [service.address, bare].map(|address| service_key(service.protocol, address))
        };
        let configured: HashSet<ServiceKey> = services.iter().flat_map(keys_of).collect();
        for (key, _) in programs.successors.entries() {
            if !configured.contains(&key) {
                programs.successors.remove(&key)?;
            }
        }
        let mut removed = HashSet::new();
        for (key, _) in programs.services.entries() {
            if !configured.contains(&key) {
                removed.insert(key);
            }
        }
        if removed.is_empty() {
            return Ok(0);
        }
        let is_of_removed = |flow: &FlowKey| removed.contains(&service_key_of_flow(flow));
        let mut flows = 0;
        for (flow, _) in programs.flows.entries() {
            if is_of_removed(&flow) {
                programs.flows.remove(&flow)?;
                flows += 1;
            }
        }
        for (flow, _) in programs.steering.entries() {
            if is_of_removed(&flow) {
                programs.steering.remove(&flow)?;
            }
        }
        // Last: a start that dies before finds the flows by these entries again.
        for key in removed {
            programs.services.remove(&key)?;
        }
        Ok(flows)
    }

    /// Removes a service without flows, and its bare address if no other service of the protocol has the address. The
    /// address must be gone from this host: without the service, the stack would answer its packets.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn remove_service(&mut self, service: &ServiceConfig) -> Result<(), Error> {
        let (protocol, address) = (service.protocol, service.address);
        self.set_successor(service, None)?;
        self.programs
            .services
            .remove(&service_key(protocol, address))?;
        self.service_rows.remove(&(protocol, address));
        self.generations.remove(&service.row);
        self.replicated_rows.remove(&service.row);
        self.programs.flow_quota.set_count(service.row, 0);
        let mut others = self.service_rows.keys();
        match others.any(|(known, other)| *known == protocol && other.ip() == address.ip()) {
            true => Ok(()),
            false => {
                let bare = SocketAddr::new(address.ip(), 0);
                self.programs.services.remove(&service_key(protocol, bare))
            }
        }
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
        let value = self.service_value((index, next), true, service, weights);
        self.programs
            .services
            .set(&service_key(service.protocol, service.address), &value)
    }

    /// Returns the service's entry for this row and half of the placement table, which is filled by `weights`.
    fn service_value(
        &self,
        (index, generation): (u16, u8),
        has_previous: bool,
        service: &ServiceConfig,
        weights: &BTreeMap<NodeId, u32>,
    ) -> Service {
        let positive = || weights.iter().filter(|(_, weight)| **weight > 0);
        // With placement by port, the whole service belongs to the node of greatest weight (the lowest id among equals).
        let by_port = service.placement == PlacementRule::Port;
        let heaviest = positive().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0)));
        let port_owner = heaviest.map_or(NodeId(0), |(node, _)| *node);
        let own_node_placed = match by_port {
            true => port_owner == self.own_id,
            false => positive().any(|(node, _)| *node == self.own_id),
        };
        let flag_if = |is_set: bool, flag: u8| u8::from(is_set) * flag;
        let is_replicated = self.replicated_rows.contains(&index);
        Service {
            index,
            generation,
            by_port: u8::from(by_port),
            port_owner: port_owner.0,
            flags: flag_if(has_previous, HAS_PREVIOUS) | flag_if(is_replicated, IS_REPLICATED),
            own_node_placed: u8::from(own_node_placed),
        }
    }
}

/// Returns each node's share of a service's new flows before the first load reports; none for a service that ends, so
/// that packets without a record find no node.
pub fn initial_shares(service: &ServiceConfig) -> BTreeMap<NodeId, u32> {
    if service.is_ending {
        return BTreeMap::new();
    }
    let figures_of = |weight: &u32| NodeFigures {
        weight: *weight,
        load: 0,
        distance_ms: 0,
    };
    let nodes = (service.weights.iter()).map(|(node, weight)| (*node, figures_of(weight)));
    shares_by_policy(&service.policy, &nodes.collect())
}

fn service_key_of_flow(flow: &FlowKey) -> ServiceKey {
    ServiceKey {
        address: flow.local,
        port: flow.local_port,
        protocol: flow.protocol,
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
