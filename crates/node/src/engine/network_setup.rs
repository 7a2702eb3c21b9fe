//! The node's network configuration: interface, paths to the other nodes, service addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use holdfast_bpf::shared_with_c::{Config as MapConfig, PRIVATE_MARK};
use holdfast_sys::local_delivery_routes::{deliver_locally, end_local_delivery};
use holdfast_sys::net::{self, Interface};
use holdfast_sys::sysctl;

use super::setup::{SetupError, other_error, system_error};
use crate::config::Config;
use crate::dataplane::{Dataplane, HoldDevice, NodeRoute};
use crate::reach::reach_of;

/// Name of the TUN device that holds packets.
pub(super) const HOLD_DEVICE: &str = "hf-hold";

/// Routing table of marked packets that this host receives under any address; also the priority of its rules.
const ROUTING_TABLE: u32 = 18_534;

/// Maximum wait for a neighbour's answer at start-up; later refreshes find a slower neighbour.
const NEIGHBOUR_WAIT_MAX: Duration = Duration::from_millis(300);

/// Writes nodes and settings to the maps; services only if `ready`, until which the programs fail closed.
pub(super) fn configure_dataplane(
    config: &Config,
    interface: &Interface,
    hold: &HoldDevice,
    dataplane: &mut Dataplane,
    ready: bool,
) -> Result<(), SetupError> {
    let paths = node_routes(config, interface);
    for (id, path) in &paths {
        let is_holder = *id == config.group.contact;
        dataplane
            .set_node(*id, path, is_holder)
            .map_err(other_error)?;
    }
    if ready {
        for (index, service) in (0u16..).zip(&config.services) {
            dataplane.set_service(index, service).map_err(other_error)?;
        }
        let services = u32::try_from(config.services.len()).unwrap_or(u32::MAX);
        (dataplane.programs.flow_quota).divide(services, config.node.capacity);
    }
    let outer_header = paths
        .iter()
        .filter(|(_, path)| path.routed)
        .map(|(_, path)| outer_header_length(path.address))
        .max();
    let clamp = |headers: u16| {
        outer_header.map_or(0, |outer| mtu(interface).saturating_sub(outer + headers))
    };
    let reach = reach_of(config.group.reach);
    let map_config = MapConfig {
        own_id: config.node.id.0,
        reach: reach.program_number(),
        holder: u8::from(config.is_holder()),
        hold_ifindex: hold.ifindex(),
        mss_clamp_v4: clamp(40),
        mss_clamp_v6: clamp(60),
        mtu: mtu(interface),
        shared_link: reach.shared_link_address(),
        ready: u32::from(ready),
    };
    dataplane
        .programs
        .set_config(&map_config)
        .map_err(other_error)
}

/// Delivers private-flow packets for this host to its stack: where processes move, connections keep their addresses.
pub(super) fn deliver_private_flows(config: &Config) -> Result<(), SetupError> {
    if !config.migration.enabled {
        return Ok(());
    }
    deliver_locally(PRIVATE_MARK, HOLD_DEVICE, ROUTING_TABLE).map_err(system_error("routing rules"))
}

fn mtu(interface: &Interface) -> u16 {
    u16::try_from(interface.mtu).unwrap_or(u16::MAX)
}

/// Returns the length of an outer header in bytes.
fn outer_header_length(address: IpAddr) -> u16 {
    if address.is_ipv6() { 40 } else { 20 }
}

/// Returns the path to each node. A node that does not answer is found by a later refresh.
pub(super) fn node_routes(
    config: &Config,
    interface: &Interface,
) -> Vec<(holdfast_wire::NodeId, NodeRoute)> {
    let own_path = NodeRoute {
        address: config.node.address,
        link: interface.mac,
        own_link: interface.mac,
        ifindex: interface.index,
        routed: false,
    };
    let peers = config
        .peers
        .iter()
        .filter_map(|peer| match resolve_route(peer.address.ip()) {
            Ok(path) => Some((peer.id, path)),
            Err(error) => {
                tracing::debug!(peer = peer.name, %error, "the path to a peer is not resolved yet");
                None
            }
        });
    std::iter::once((config.node.id, own_path))
        .chain(peers)
        .collect()
}

fn resolve_route(address: IpAddr) -> std::io::Result<NodeRoute> {
    let route = net::route_to(address)?;
    net::resolve_neighbour(
        route.interface,
        route.gateway.unwrap_or(address),
        NEIGHBOUR_WAIT_MAX,
    )?;
    known_route(address)?.ok_or_else(|| std::io::ErrorKind::HostUnreachable.into())
}

/// Refreshes the paths to the other nodes, without waiting for nodes that do not answer.
pub(super) fn refresh_routes(config: &Config, dataplane: &Dataplane) {
    for peer in &config.peers {
        if let Ok(Some(path)) = known_route(peer.address.ip())
            && let is_holder = peer.id == config.group.contact
            && let Err(error) = dataplane.set_node(peer.id, &path, is_holder)
        {
            tracing::warn!(peer = peer.name, %error, "cannot update a peer's path in the filters");
        }
    }
}

fn known_route(address: IpAddr) -> std::io::Result<Option<NodeRoute>> {
    let route = net::route_to(address)?;
    let Some(link) = net::neighbour(route.interface, route.gateway.unwrap_or(address))? else {
        return Ok(None);
    };
    let own_interface = Interface::by_index(route.interface)?;
    Ok(Some(NodeRoute {
        address,
        link,
        own_link: own_interface.mac,
        ifindex: route.interface,
        routed: route.gateway.is_some(),
    }))
}

/// Adds the service addresses: at the holder on its interface, where it answers ARP and ND; at other nodes on
/// `lo`, where no neighbour can ask for them.
pub(super) fn add_addresses(config: &Config, interface: &Interface) -> Result<(), SetupError> {
    let name = &config.node.interface;
    for (setting, value) in [("arp_ignore", "1"), ("arp_announce", "2")] {
        sysctl::write(&format!("net/ipv4/conf/{name}/{setting}"), value)
            .map_err(system_error(format!("net.ipv4.conf.{name}.{setting}")))?;
    }
    let on_interface = config.is_holder() && reach_of(config.group.reach).has_contact_node();
    let ifindex = if on_interface {
        interface.index
    } else {
        Interface::find("lo").map_err(system_error("lo"))?.index
    };
    for address in service_addresses(config) {
        net::add_address(ifindex, address, prefix_length(address))
            .map_err(system_error(format!("service address {address}")))?;
    }
    Ok(())
}

/// Removes from the host what an ended daemon left on purpose: service addresses, routing rules, filters and maps. The
/// node gives up all its flows. Addresses are removed before the filters, without which the stack would reset
/// connections of other nodes.
///
/// # Errors
/// The kernel refuses a removal; what is absent already is no error.
pub fn detach(config: &Config) -> Result<(), SetupError> {
    for name in [config.node.interface.as_str(), "lo"] {
        // Addresses end with their interface.
        let Ok(interface) = Interface::find(name) else {
            continue;
        };
        for address in service_addresses(config) {
            net::remove_address(interface.index, address, prefix_length(address)).map_err(
                system_error(format!("removing service address {address} from {name}")),
            )?;
        }
    }
    end_local_delivery(PRIVATE_MARK, HOLD_DEVICE, ROUTING_TABLE)
        .map_err(system_error("removing routing rules"))?;
    // Removing the last reference to a link detaches its program.
    match std::fs::remove_dir_all(&config.node.bpffs) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let pins = config.node.bpffs.display();
            Err(system_error(format!("removing {pins}"))(error))
        }
        _ => Ok(()),
    }
}

fn service_addresses(config: &Config) -> BTreeSet<IpAddr> {
    let services = config.services.iter();
    services.map(|service| service.address.ip()).collect()
}

/// Returns the length of a prefix that covers the address alone, bits.
fn prefix_length(address: IpAddr) -> u8 {
    if address.is_ipv6() { 128 } else { 32 }
}
