//! Changes of a group's settings, as pure functions.

use super::checks::{
    CHECK_INTERVAL_MS, CHECK_RESULTS, CHECK_TIMEOUT_MS, STALL_MS_MAX, ServiceChecks,
};
use super::field_encodings::bounded_weights::WEIGHTS_MAX;
use super::replication::ServiceReplication;
use super::service::{
    DRAIN_MS_MAX, GroupService, SERVICE_ADDRESSES_MAX, ServiceName, ServicePolicy, ServiceProtocol,
    SlotChoice, WEIGHT_MAX,
};
use super::{GroupSettings, RECENT_CHANGES_MAX};
use crate::frame::bounded_list_of;
use crate::membership_frames::NodeName;
use crate::replication_frames::LEGS_MAX;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Identifies a change, however often it is requested: a random number of the node that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupChangeId(pub u64);

impl fmt::Display for GroupChangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// New weights of nodes; none removes a node's own weight.
pub type WeightChanges = Vec<(NodeName, Option<u32>)>;

/// Changes of a service's fields; a field without a new value stays. Port and protocol cannot change, since flows have
/// them in their names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicePatch {
    /// Addresses to add.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    pub added_addresses: Vec<IpAddr>,
    /// Addresses to remove.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    pub removed_addresses: Vec<IpAddr>,
    /// New choice of a new flow's slot in the placement table.
    pub placement: Option<SlotChoice>,
    /// New policy by which nodes share the service's new flows, with its figures.
    pub policy: Option<ServicePolicy>,
    /// Weights of some nodes.
    #[serde(deserialize_with = "bounded_list_of::<_, _, WEIGHTS_MAX>")]
    pub weights: WeightChanges,
    /// The time that a handoff may wait, in milliseconds; the inner none: no wait.
    pub drain_ms: Option<Option<u32>>,
    /// New checks of the service's servers.
    pub checks: Option<ServiceChecks>,
}

/// A change of a group's settings. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupChange {
    /// Adds a service to the group.
    AddService(Box<GroupService>),
    /// Changes fields of a service of the group.
    SetService {
        /// Name of the service to change.
        name: ServiceName,
        /// The fields to change, with their new values.
        patch: Box<ServicePatch>,
    },
    /// Removes a service: new flows are refused, existing ones go on until they end. The addresses stay as
    /// [`GroupService::ending_addresses`].
    RemoveService(ServiceName),
    /// Drops ending addresses of a service, which have no flows any more.
    DropEndedAddresses {
        /// Name of the service whose ending addresses are dropped.
        name: ServiceName,
        /// The ending addresses to drop. An address that is not ending stays.
        #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
        addresses: Vec<IpAddr>,
    },
    /// Sets nodes' weights for all services.
    SetWeights(
        /// New weights of nodes, set in every service.
        #[serde(deserialize_with = "bounded_list_of::<_, _, WEIGHTS_MAX>")]
        WeightChanges,
    ),
    /// Begins or changes the replication of a service.
    SetReplication(ServiceReplication),
    /// Ends the replication of a service: the last primary alone gets new flows.
    EndReplication(ServiceName),
}

/// The nodes of the group, which a change is checked against.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupNodes {
    /// Names of all nodes.
    pub names: BTreeSet<NodeName>,
    /// Addresses of the nodes' daemons.
    pub addresses: BTreeSet<IpAddr>,
}

/// The reason for which a change is refused; nothing was changed. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GroupChangeRefusal {
    /// A service of this name exists.
    #[error(
        "there is a service {0} already; change it with `holdfast service set`, or choose another name"
    )]
    NameTaken(ServiceName),
    /// The group has no service of this name.
    #[error("there is no service {0}; `holdfast service list` shows those there are")]
    UnknownService(ServiceName),
    /// Another service has the address, port and protocol.
    #[error("service {by} has {protocol} {address} already; choose another address or port")]
    AddressTaken {
        /// The service that has the address already.
        by: ServiceName,
        /// Protocol of both services.
        protocol: ServiceProtocol,
        /// The address and port that both services would have.
        address: SocketAddr,
    },
    /// A node's daemon has the address.
    #[error(
        "{0} is a node's own address; a service address belongs to the group, so use one that no host has"
    )]
    NodeAddress(IpAddr),
    /// The address cannot be a service address.
    #[error("{0} cannot be a service address; use a unicast address that clients can reach")]
    UnusableAddress(IpAddr),
    /// The address appears twice in the service.
    #[error("address {0} appears twice; name each address once")]
    RepeatedAddress(IpAddr),
    /// The service does not have the address that shall be removed.
    #[error("service {name} has no address {address}; `holdfast service list` shows those it has")]
    UnknownAddress {
        /// Name of the service to change.
        name: ServiceName,
        /// The address that the service does not have.
        address: IpAddr,
    },
    /// The service would have no address.
    #[error("service {0} would have no address; add one, or remove the service")]
    NoAddress(ServiceName),
    /// The port is 0.
    #[error("0 is not a port; use 1 to 65535")]
    PortZero,
    /// The group would have too many service addresses.
    #[error(
        "the group would have {0} service addresses, and may have {SERVICE_ADDRESSES_MAX}; remove some first"
    )]
    TooManyAddresses(u32),
    /// The group has no node of this name.
    #[error("there is no node {0} in this group; `holdfast node list` shows those there are")]
    UnknownNode(NodeName),
    /// The weight is too large.
    #[error("weight {0} is out of range; use 0 to {WEIGHT_MAX}")]
    WeightTooLarge(u32),
    /// No node would get new flows.
    #[error("no node would take new flows of service {0}; leave at least one weight above 0")]
    NoWeight(ServiceName),
    /// The drain time is too long.
    #[error("a drain time of {0} ms is out of range; use 0 to {DRAIN_MS_MAX}")]
    DrainTooLong(u32),
    /// A connect check of a service without connections.
    #[error("a udp service has no connections to check; use a check script")]
    ConnectCheckOfUdp,
    /// The time between two checks is out of range.
    #[error(
        "a check interval of {0} ms is out of range; use {min} to {max}",
        min = CHECK_INTERVAL_MS.start(),
        max = CHECK_INTERVAL_MS.end()
    )]
    CheckInterval(u32),
    /// The time limit of a check is out of range.
    #[error(
        "a check time limit of {0} ms is out of range; use {min} to {max}",
        min = CHECK_TIMEOUT_MS.start(),
        max = CHECK_TIMEOUT_MS.end()
    )]
    CheckTimeout(u32),
    /// The number of results that change the judgement is out of range.
    #[error(
        "{0} consecutive checks are out of range; use {min} to {max}",
        min = CHECK_RESULTS.start(),
        max = CHECK_RESULTS.end()
    )]
    CheckResults(u32),
    /// The time after which a server hangs is too long.
    #[error("a stall time of {0} ms is out of range; use 0 to {STALL_MS_MAX}")]
    StallTooLong(u32),
    /// The services are out of order.
    #[error("the services are not in the order of their names")]
    ServiceOrder,
    /// The settings would be too long.
    #[error("the group's settings would be too long; remove services or weights first")]
    TooLong,
    /// Too many changes wait for a vote.
    #[error("too many changes are under way; try again")]
    Busy,
    /// The contact node cannot read the settings.
    #[error(
        "the contact node's release cannot read the group's settings; run the same release on all nodes"
    )]
    UnreadableSettings,
    /// The service is replicated, and the change is not for replicated services.
    #[error("service {0} is replicated; end that with `holdfast replicate stop {0}` first")]
    Replicated(ServiceName),
    /// The service cannot be replicated.
    #[error("service {0} cannot be replicated: only a TCP service with one address can")]
    NotReplicable(ServiceName),
    /// The number of legs is out of range, or a node is named twice.
    #[error(
        "a service has a primary and 1 to {max} replicas, each at a node of its own; name so many nodes",
        max = LEGS_MAX - 1
    )]
    ReplicaCount,
    /// A leg would run at the contact node.
    #[error("node {0} is the contact node, which cannot have a replica; name other nodes")]
    ReplicaAtContactNode(NodeName),
}

use GroupChangeRefusal as Refusal;

impl GroupSettings {
    /// Returns the settings after a change. A change that [`GroupSettings::has_change`] recognises changes nothing.
    ///
    /// # Errors
    /// The change is refused.
    pub fn apply(
        &self,
        id: GroupChangeId,
        change: &GroupChange,
        nodes: &GroupNodes,
    ) -> Result<GroupSettings, GroupChangeRefusal> {
        if self.has_change(id) {
            return Ok(self.clone());
        }
        let mut next = self.clone();
        match change {
            GroupChange::AddService(service) => next.add_service(service, nodes)?,
            GroupChange::SetService { name, patch } => {
                if !patch.added_addresses.is_empty() || !patch.removed_addresses.is_empty() {
                    next.check_not_replicated(name)?;
                }
                next.patch_service(name, patch, nodes)?;
            }
            GroupChange::RemoveService(name) => {
                next.check_not_replicated(name)?;
                let service = next.active_service_mut(name)?;
                service.ending_addresses.append(&mut service.addresses);
            }
            GroupChange::DropEndedAddresses { name, addresses } => {
                next.drop_ended_addresses(name, addresses);
            }
            GroupChange::SetWeights(weights) => {
                check_nodes_known(weighted_nodes(weights), nodes)?;
                let services = next.services.iter_mut();
                for service in services.filter(|service| !service.is_ending()) {
                    service.change_weights(weights);
                    service.check_weights_within(nodes)?;
                }
            }
            GroupChange::SetReplication(replication) => next.set_replication(replication, nodes)?,
            GroupChange::EndReplication(name) => next.end_replication(name, nodes),
        }
        next.check()?;
        if next.recent_changes.len() == RECENT_CHANGES_MAX {
            next.recent_changes.remove(0);
        }
        next.recent_changes.push(id);
        Ok(next)
    }

    fn add_service(
        &mut self,
        service: &GroupService,
        nodes: &GroupNodes,
    ) -> Result<(), GroupChangeRefusal> {
        check_nodes_known(service.weights.keys(), nodes)?;
        check_not_nodes(&service.addresses, nodes)?;
        service.check_weights_within(nodes)?;
        let by_name = |known: &GroupService| known.name.cmp(&service.name);
        let mut service = service.clone();
        service.ending_addresses.clear();
        match self.services.binary_search_by(by_name) {
            Err(position) => self.services.insert(position, service),
            Ok(position) => {
                let former = &mut self.services[position];
                let is_same = (former.port, former.protocol) == (service.port, service.protocol);
                if !former.is_ending() || !is_same {
                    return Err(Refusal::NameTaken(service.name));
                }
                // Flows of the former service go on at addresses that the new one lacks.
                let is_kept = |address: &IpAddr| !service.addresses.contains(address);
                former.ending_addresses.retain(is_kept);
                service.ending_addresses = std::mem::take(&mut former.ending_addresses);
                *former = service;
            }
        }
        Ok(())
    }

    /// Returns the service of this name, unless only its flows go on.
    fn active_service_mut(
        &mut self,
        name: &ServiceName,
    ) -> Result<&mut GroupService, GroupChangeRefusal> {
        let mut services = self.services.iter_mut();
        services
            .find(|service| service.name == *name && !service.is_ending())
            .ok_or_else(|| Refusal::UnknownService(name.clone()))
    }

    fn drop_ended_addresses(&mut self, name: &ServiceName, addresses: &[IpAddr]) {
        for service in &mut self.services {
            if service.name == *name {
                (service.ending_addresses).retain(|address| !addresses.contains(address));
            }
        }
        let is_over =
            |service: &GroupService| service.is_ending() && service.ending_addresses.is_empty();
        self.services.retain(|service| !is_over(service));
    }

    fn patch_service(
        &mut self,
        name: &ServiceName,
        patch: &ServicePatch,
        nodes: &GroupNodes,
    ) -> Result<(), GroupChangeRefusal> {
        check_nodes_known(weighted_nodes(&patch.weights), nodes)?;
        check_not_nodes(&patch.added_addresses, nodes)?;
        let service = self.active_service_mut(name)?;
        for address in &patch.removed_addresses {
            let Some(position) = service.addresses.iter().position(|known| known == address) else {
                return Err(Refusal::UnknownAddress {
                    name: name.clone(),
                    address: *address,
                });
            };
            service
                .ending_addresses
                .push(service.addresses.remove(position));
        }
        let is_back = |address: &IpAddr| patch.added_addresses.contains(address);
        service.ending_addresses.retain(|address| !is_back(address));
        service.addresses.extend(&patch.added_addresses);
        if service.addresses.is_empty() {
            return Err(Refusal::NoAddress(name.clone()));
        }
        service.placement = patch.placement.unwrap_or(service.placement);
        service.policy = patch.policy.unwrap_or(service.policy);
        service.drain_ms = patch.drain_ms.unwrap_or(service.drain_ms);
        if let Some(checks) = &patch.checks {
            service.checks.clone_from(checks);
        }
        service.change_weights(&patch.weights);
        service.check_weights_within(nodes)
    }

    /// Checks the rules that hold whatever nodes the group has.
    pub(super) fn check(&self) -> Result<(), GroupChangeRefusal> {
        let is_ordered = |left: &GroupService, right: &GroupService| left.name < right.name;
        if !self.services.is_sorted_by(is_ordered) {
            return Err(Refusal::ServiceOrder);
        }
        let mut owners: BTreeMap<(ServiceProtocol, SocketAddr), &ServiceName> = BTreeMap::new();
        for service in &self.services {
            service.check()?;
            for (address, _) in service.socket_addresses() {
                let former = owners.insert((service.protocol, address), &service.name);
                match former {
                    None => {}
                    Some(by) if *by == service.name => {
                        return Err(Refusal::RepeatedAddress(address.ip()));
                    }
                    Some(by) => {
                        return Err(Refusal::AddressTaken {
                            by: by.clone(),
                            protocol: service.protocol,
                            address,
                        });
                    }
                }
            }
        }
        if owners.len() > SERVICE_ADDRESSES_MAX {
            return Err(Refusal::TooManyAddresses(owners.len() as u32));
        }
        self.check_replications()
    }
}

impl GroupService {
    /// Checks the rules for the fields of one service.
    fn check(&self) -> Result<(), GroupChangeRefusal> {
        let mut addresses = self
            .addresses
            .iter()
            .chain(&self.ending_addresses)
            .peekable();
        if addresses.peek().is_none() {
            return Err(Refusal::NoAddress(self.name.clone()));
        }
        if let Some(address) = addresses.find(|address| !is_usable(**address)) {
            return Err(Refusal::UnusableAddress(*address));
        }
        if self.port == 0 {
            return Err(Refusal::PortZero);
        }
        if let Some(weight) = self.weights.values().find(|weight| **weight > WEIGHT_MAX) {
            return Err(Refusal::WeightTooLarge(*weight));
        }
        if let Some(drain_ms) = self.drain_ms.filter(|drain_ms| *drain_ms > DRAIN_MS_MAX) {
            return Err(Refusal::DrainTooLong(drain_ms));
        }
        self.checks.check(self.protocol)
    }

    /// Checks that a node of the group gets new flows.
    fn check_weights_within(&self, nodes: &GroupNodes) -> Result<(), GroupChangeRefusal> {
        match nodes.names.iter().any(|node| self.weight(node) > 0) {
            true => Ok(()),
            false => Err(Refusal::NoWeight(self.name.clone())),
        }
    }

    fn change_weights(&mut self, changes: &WeightChanges) {
        for (node, weight) in changes {
            match weight {
                Some(weight) => self.weights.insert(node.clone(), *weight),
                None => self.weights.remove(node),
            };
        }
    }
}

/// The operation for the audit line, such as `service add web (tcp port 80 at 10.9.0.1)`.
impl fmt::Display for GroupChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupChange::AddService(service) => {
                write!(f, "service add {service}")?;
                write_policy(f, Some(service.policy), Some(service.placement))?;
                let weights = service.weights.iter();
                write_weights(f, weights.map(|(node, weight)| (node, Some(*weight))))?;
                write_drain(f, service.drain_ms.map(Some))?;
                let has_checks = service.checks != ServiceChecks::default();
                write_checks(f, has_checks.then_some(&service.checks))
            }
            GroupChange::SetService { name, patch } => {
                write!(f, "service set {name}")?;
                for address in &patch.added_addresses {
                    write!(f, " +{address}")?;
                }
                for address in &patch.removed_addresses {
                    write!(f, " -{address}")?;
                }
                write_policy(f, patch.policy, patch.placement)?;
                let weights = patch.weights.iter();
                write_weights(f, weights.map(|(node, weight)| (node, *weight)))?;
                write_drain(f, patch.drain_ms)?;
                write_checks(f, patch.checks.as_ref())
            }
            GroupChange::RemoveService(name) => write!(f, "service remove {name}"),
            GroupChange::DropEndedAddresses { name, addresses } => {
                write!(f, "end of flows of service {name} at")?;
                addresses
                    .iter()
                    .try_for_each(|address| write!(f, " {address}"))
            }
            GroupChange::SetWeights(weights) => {
                f.write_str("weights of all services")?;
                write_weights(f, weights.iter().map(|(node, weight)| (node, *weight)))
            }
            GroupChange::SetReplication(replication) => {
                let ServiceReplication {
                    service,
                    replicator,
                    legs,
                    replicas,
                } = replication;
                write!(
                    f,
                    "replicate {service} by {replicator}, {replicas} replicas, at"
                )?;
                legs.iter().try_for_each(|leg| write!(f, " {leg}"))
            }
            GroupChange::EndReplication(name) => write!(f, "end of the replication of {name}"),
        }
    }
}

fn write_policy(
    f: &mut fmt::Formatter<'_>,
    policy: Option<ServicePolicy>,
    placement: Option<SlotChoice>,
) -> fmt::Result {
    if let Some(policy) = policy {
        write!(f, " policy {}", policy.kind)?;
    }
    match placement {
        Some(SlotChoice::Hash) => f.write_str(" placement hash"),
        Some(SlotChoice::Port) => f.write_str(" placement port"),
        None => Ok(()),
    }
}

fn write_weights<'a>(
    f: &mut fmt::Formatter<'_>,
    weights: impl Iterator<Item = (&'a NodeName, Option<u32>)>,
) -> fmt::Result {
    for (node, weight) in weights {
        match weight {
            Some(weight) => write!(f, " {node}={weight}")?,
            None => write!(f, " {node}=default")?,
        }
    }
    Ok(())
}

fn write_drain(f: &mut fmt::Formatter<'_>, drain_ms: Option<Option<u32>>) -> fmt::Result {
    match drain_ms {
        Some(Some(drain_ms)) => write!(f, " drain {drain_ms} ms"),
        Some(None) => f.write_str(" no drain"),
        None => Ok(()),
    }
}

fn write_checks(f: &mut fmt::Formatter<'_>, checks: Option<&ServiceChecks>) -> fmt::Result {
    match checks {
        Some(checks) => write!(f, " checks {checks}"),
        None => Ok(()),
    }
}

/// Returns true if clients can reach a service at the address.
fn is_usable(address: IpAddr) -> bool {
    let is_special = address.is_unspecified() || address.is_multicast() || address.is_loopback();
    let is_of_family = match address {
        IpAddr::V4(v4) => !v4.is_broadcast(),
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_none() && !v6.is_unicast_link_local(),
    };
    !is_special && is_of_family
}

/// Returns the nodes that get a weight of their own.
fn weighted_nodes(changes: &WeightChanges) -> impl Iterator<Item = &NodeName> {
    let weighted = changes.iter().filter(|(_, weight)| weight.is_some());
    weighted.map(|(node, _)| node)
}

fn check_nodes_known<'a>(
    names: impl IntoIterator<Item = &'a NodeName>,
    nodes: &GroupNodes,
) -> Result<(), GroupChangeRefusal> {
    let mut names = names.into_iter();
    match names.find(|name| !nodes.names.contains(*name)) {
        Some(name) => Err(Refusal::UnknownNode(name.clone())),
        None => Ok(()),
    }
}

fn check_not_nodes(addresses: &[IpAddr], nodes: &GroupNodes) -> Result<(), GroupChangeRefusal> {
    match addresses
        .iter()
        .find(|address| nodes.addresses.contains(*address))
    {
        Some(address) => Err(Refusal::NodeAddress(*address)),
        None => Ok(()),
    }
}
