//! The node's network configuration: interface, paths to the other nodes, service addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use holdfast_bpf::LEASE_WITHOUT_END;
use holdfast_bpf::shared_with_c::{Config as MapConfig, PRIVATE_MARK, ROLE_HOLDER, ROLE_NONE};
use holdfast_sys::local_delivery_routes::{
    deliver_locally, end_local_delivery, has_local_delivery,
};
use holdfast_sys::net::{self, Interface};
use holdfast_sys::sysctl;
use holdfast_wire::NodeId;

use super::group_role::{GroupNode, GroupRole, has_configured_contact};
use super::host_changes::{AddedAddress, HostChanges, RecordBackup};
use super::setup::{SetupError, other_error, system_error};
use super::start_undo::StartUndo;
use crate::config::Config;
use crate::dataplane::{Dataplane, HoldDevice, NodeRoute};
use crate::reach::reach_of;

/// Name of the TUN device that holds packets.
pub(super) const HOLD_DEVICE: &str = "hf-hold";

/// Routing table of marked packets that this host receives under any address; also the priority of its rules.
pub(super) const ROUTING_TABLE: u32 = 18_534;

/// Settings of the node's interface, `net.ipv4.conf.INTERFACE`: the interface answers ARP only for its own addresses, and
/// asks with the best of them.
const ARP_SETTINGS: [(&str, &str); 2] = [("arp_ignore", "1"), ("arp_announce", "2")];

/// Maximum wait for a neighbour's answer at start-up; later refreshes find a slower neighbour.
const NEIGHBOUR_WAIT_MAX: Duration = Duration::from_millis(300);

/// Writes nodes, services and settings to the maps. Until the settings are there, the programs fail closed.
pub(super) fn configure_dataplane(
    config: &Config,
    group: &GroupRole,
    interface: &Interface,
    (hold, dataplane): (&HoldDevice, &mut Dataplane),
) -> Result<(), SetupError> {
    let paths = node_routes(config, group, interface);
    for (id, path) in &paths {
        let is_holder = *id == group.contact();
        dataplane
            .set_node(*id, path, is_holder)
            .map_err(other_error)?;
    }
    for service in &config.services {
        dataplane.set_service(service).map_err(other_error)?;
    }
    divide_flow_table(config, dataplane);
    let outer_header = paths
        .iter()
        .filter(|(_, path)| path.routed)
        .map(|(_, path)| outer_header_length(path.address))
        .max();
    let clamp = |headers: u16| {
        outer_header.map_or(0, |outer| mtu(interface).saturating_sub(outer + headers))
    };
    let reach = reach_of(config.group.reach);
    let role = match has_configured_contact(config) {
        true if group.is_contact() => ROLE_HOLDER,
        true => ROLE_NONE,
        // The role of an earlier daemon lasts until the first view.
        false => dataplane.programs.config().map_err(other_error)?.role,
    };
    let map_config = MapConfig {
        own_id: config.node.id.0,
        reach: reach.program_number(),
        role,
        hold_ifindex: hold.ifindex(),
        mss_clamp_v4: clamp(40),
        mss_clamp_v6: clamp(60),
        mtu: mtu(interface),
        shared_link: reach.shared_link_address(),
        ready: 1,
    };
    dataplane
        .programs
        .set_config(&map_config)
        .map_err(other_error)
}

/// Divides the flow table among the services.
pub(super) fn divide_flow_table(config: &Config, dataplane: &Dataplane) {
    let rows = config.services.iter().map(|service| service.row + 1);
    let rows = u32::from(rows.max().unwrap_or(0));
    (dataplane.programs.flow_quota).divide(rows, config.node.capacity);
}

/// Delivers private-flow packets for this host to its stack: where processes move, connections keep their addresses.
pub(super) fn deliver_private_flows(
    config: &Config,
    undo: &mut StartUndo,
) -> Result<(), SetupError> {
    if !config.migration.enabled {
        return Ok(());
    }
    if !has_local_delivery(ROUTING_TABLE).map_err(system_error("routing rules"))? {
        undo.push("routing rules", || {
            end_local_delivery(PRIVATE_MARK, HOLD_DEVICE, ROUTING_TABLE)
        });
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
    group: &GroupRole,
    interface: &Interface,
) -> Vec<(NodeId, NodeRoute)> {
    let own_path = NodeRoute {
        address: config.node.address,
        link: interface.mac,
        own_link: interface.mac,
        ifindex: interface.index,
        routed: false,
    };
    let peers = group
        .others()
        .filter_map(|(id, peer)| match resolve_route(peer.address.ip()) {
            Ok(path) => Some((id, path)),
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
pub(super) fn refresh_routes(group: &GroupRole, dataplane: &Dataplane) {
    for (id, peer) in group.others() {
        refresh_route(group, dataplane, (id, peer));
    }
}

/// Refreshes the path to one other node, unless the kernel does not know the path yet.
pub(super) fn refresh_route(
    group: &GroupRole,
    dataplane: &Dataplane,
    (id, peer): (NodeId, &GroupNode),
) {
    if let Ok(Some(path)) = known_route(peer.address.ip())
        && let is_holder = id == group.contact()
        && let Err(error) = dataplane.set_node(id, &path, is_holder)
    {
        tracing::warn!(peer = peer.name, %error, "cannot update a peer's path in the filters");
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
/// `lo`, where no neighbour can ask for them. In a group that runs itself, every node has them on `lo`, and the contact
/// node on its interface as well, once there is a view. `changes` records the addresses that were not there.
pub(super) fn add_addresses(
    (config, group): (&Config, &GroupRole),
    interface: &Interface,
    changes: &mut HostChanges,
    undo: &mut StartUndo,
) -> Result<(), SetupError> {
    let state_dir = &config.node.state_dir;
    let record = RecordBackup::take(state_dir);
    undo.push("the record of service addresses", move || record.restore());
    let settings = settings_to_change(interface)?;
    let missing = absent_addresses(config, &service_interface(config, group, interface)?)?;
    for SettingChange { path, before, .. } in &settings {
        (changes.settings.entry(path.clone())).or_insert_with(|| before.clone());
    }
    changes.addresses.extend(missing.iter().cloned());
    if !has_configured_contact(config) {
        // A node that becomes contact node takes the addresses on the interface, and has no time for the disk then.
        changes
            .addresses
            .extend(absent_addresses(config, interface)?);
    }
    // Recorded first: a daemon that dies in between leaves no address that the next one takes for the operator's.
    if let Err(error) = changes.store(state_dir) {
        tracing::warn!(%error, "cannot record the service addresses that this daemon adds: they stay if their service is removed");
    }
    for SettingChange {
        path,
        before,
        value,
    } in settings
    {
        sysctl::write(&path, value).map_err(system_error(path.replace('/', ".")))?;
        undo.push(path.clone(), move || sysctl::write(&path, &before));
    }
    for added in missing {
        let (index, address) = (added.index, added.address);
        let what = format!("service address {address}");
        undo.push(&what, move || added.remove());
        net::add_address(index, address, prefix_length(address)).map_err(system_error(what))?;
    }
    Ok(())
}

/// A kernel setting with another value than the daemon needs.
struct SettingChange {
    path: String,
    before: String,
    value: &'static str,
}

fn settings_to_change(interface: &Interface) -> Result<Vec<SettingChange>, SetupError> {
    let mut changes = Vec::new();
    for (setting, value) in ARP_SETTINGS {
        let path = setting_path(&interface.name, setting);
        let before = sysctl::read(&path).map_err(system_error(path.replace('/', ".")))?;
        if before != value {
            changes.push(SettingChange {
                path,
                before,
                value,
            });
        }
    }
    Ok(changes)
}

fn setting_path(interface: &str, setting: &str) -> String {
    format!("net/ipv4/conf/{interface}/{setting}")
}

/// Returns the service addresses that an interface lacks.
fn absent_addresses(
    config: &Config,
    interface: &Interface,
) -> Result<Vec<AddedAddress>, SetupError> {
    AddedAddress::absent_from(interface, service_addresses(config))
        .map_err(system_error(format!("addresses of {}", interface.name)))
}

/// Returns the interface that has the service addresses.
fn service_interface(
    config: &Config,
    group: &GroupRole,
    interface: &Interface,
) -> Result<Interface, SetupError> {
    match group.is_contact() && reach_of(config.group.reach).has_contact_node() {
        true => Ok(interface.clone()),
        false => Interface::find("lo").map_err(system_error("lo")),
    }
}

/// Removes what an earlier daemon added and this configuration lacks: addresses of removed services, of another
/// interface, and settings of another interface. Addresses that no daemon added stay.
pub(super) fn remove_unconfigured_addresses(
    (config, group): (&Config, &GroupRole),
    interface: &Interface,
    changes: &mut HostChanges,
) -> Result<(), SetupError> {
    let index = service_interface(config, group, interface)?.index;
    // A contact node of a group that runs itself keeps its addresses on the interface until the first view.
    let is_kept_at =
        |at: u32| at == index || (!has_configured_contact(config) && at == interface.index);
    let wanted = service_addresses(config);
    let (kept, unconfigured) = (changes.addresses.iter().cloned())
        .partition(|added| is_kept_at(added.index) && wanted.contains(&added.address));
    let unconfigured: BTreeSet<AddedAddress> = unconfigured;
    changes.addresses = kept;
    for added in &unconfigured {
        let (address, interface) = (added.address, &added.interface);
        match added.remove() {
            Ok(()) => {
                tracing::info!(%address, interface, "removed the address of a removed service")
            }
            Err(error) => {
                tracing::warn!(%address, interface, %error, "cannot remove the address of a removed service");
                changes.addresses.insert(added.clone());
            }
        }
    }
    let own = ARP_SETTINGS.map(|(setting, _)| setting_path(&interface.name, setting));
    let others = changes.settings.keys().filter(|path| !own.contains(path));
    for path in others.cloned().collect::<Vec<_>>() {
        if let Err(error) = changes.restore_setting(&path) {
            tracing::warn!(path, %error, "cannot restore a setting of another interface");
        }
    }
    if let Err(error) = changes.store(&config.node.state_dir) {
        tracing::warn!(%error, "cannot record the removed service addresses");
    }
    Ok(())
}

/// Gives the programs a lease without end if this node is the configured contact node, and none if another one is. The
/// lease of a group that runs itself outlives the daemon.
pub(super) fn adopt_lease(config: &Config, group: &GroupRole, dataplane: &Dataplane) {
    let lease = &dataplane.programs.lease;
    if has_configured_contact(config) {
        let is_contact = group.is_contact();
        lease.set_table_ready(is_contact);
        lease.set_table_epoch(0);
        let until_ns = if is_contact { LEASE_WITHOUT_END } else { 0 };
        lease.writer().set_until_ns(until_ns);
    } else if lease.until_ns() == LEASE_WITHOUT_END {
        lease.writer().set_until_ns(0);
    }
}

/// Adds a service address to the interface on which clients' packets arrive. The host answers for the address there.
///
/// # Errors
/// The kernel refuses.
pub(super) fn add_to_interface(interface: &Interface, address: IpAddr) -> std::io::Result<()> {
    net::add_address(interface.index, address, prefix_length(address))
}

/// Removes a service address from the interface. The host keeps the address on `lo`, for its connections.
///
/// # Errors
/// The kernel refuses.
pub(super) fn remove_from_interface(interface: &Interface, address: IpAddr) -> std::io::Result<()> {
    let prefix = prefix_length(address);
    net::add_address(Interface::find("lo")?.index, address, prefix)?;
    net::remove_address(interface.index, address, prefix)
}

/// Adds a service address to `lo`, where no neighbour can ask for the address.
///
/// # Errors
/// The kernel refuses.
pub(super) fn add_to_loopback(address: IpAddr) -> std::io::Result<()> {
    net::add_address(
        Interface::find("lo")?.index,
        address,
        prefix_length(address),
    )
}

/// Removes the address of a service that has ended from the interface and from `lo`.
///
/// # Errors
/// The kernel refuses; an address that is absent is no error.
pub(super) fn remove_address(interface: &Interface, address: IpAddr) -> std::io::Result<()> {
    let prefix = prefix_length(address);
    net::remove_address(interface.index, address, prefix)?;
    net::remove_address(Interface::find("lo")?.index, address, prefix)
}

/// Returns the addresses of all services.
pub(super) fn service_addresses(config: &Config) -> BTreeSet<IpAddr> {
    let services = config.services.iter();
    services.map(|service| service.address.ip()).collect()
}

/// Returns the length of a prefix that covers the address alone, bits.
pub(super) fn prefix_length(address: IpAddr) -> u8 {
    if address.is_ipv6() { 128 } else { 32 }
}
