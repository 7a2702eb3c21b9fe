//! A service of the group.

use super::checks::ServiceChecks;
use super::field_encodings::{bounded_weights, policy_number};
use crate::Protocol;
use crate::frame::bounded_list_of;
use crate::membership_frames::NodeName;
use crate::rserpool::{Policy, PolicyKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// Maximum number of service addresses of a group, and so of its services: the number of rows in the placement table of
/// each node.
pub const SERVICE_ADDRESSES_MAX: usize = 64;
/// Maximum length of a service's name, in bytes.
pub const SERVICE_NAME_BYTES_MAX: usize = 40;
/// Maximum weight of a node.
pub const WEIGHT_MAX: u32 = 1_000;
/// Weight of a node that a service does not name.
pub const WEIGHT_DEFAULT: u32 = 1;
/// Maximum time that a handoff may wait for the send queue to empty, in milliseconds.
pub const DRAIN_MS_MAX: u32 = 600_000;

/// The name of a service: 1 to [`SERVICE_NAME_BYTES_MAX`] lower-case letters, digits and inner hyphens, so that the name
/// is a label of a domain name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct ServiceName(String);

/// A text that is not the name of a service.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a service's name; use 1 to {SERVICE_NAME_BYTES_MAX} lower-case letters, digits and inner hyphens"
)]
pub struct ServiceNameError(String);

impl ServiceName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ServiceName {
    type Error = ServiceNameError;

    fn try_from(text: String) -> Result<ServiceName, ServiceNameError> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let is_name = (1..=SERVICE_NAME_BYTES_MAX).contains(&text.len())
            && text.chars().all(is_allowed)
            && !text.starts_with('-')
            && !text.ends_with('-');
        match is_name {
            true => Ok(ServiceName(text)),
            false => {
                let shown = text.chars().take(SERVICE_NAME_BYTES_MAX);
                Err(ServiceNameError(shown.collect()))
            }
        }
    }
}

impl FromStr for ServiceName {
    type Err = ServiceNameError;

    /// Parses the name of a service.
    ///
    /// # Errors
    /// The text is empty or too long, or has other characters.
    fn from_str(text: &str) -> Result<ServiceName, ServiceNameError> {
        ServiceName::try_from(text.to_owned())
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Transport protocol of a service. The order of the variants is part of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ServiceProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl From<ServiceProtocol> for Protocol {
    fn from(protocol: ServiceProtocol) -> Protocol {
        match protocol {
            ServiceProtocol::Tcp => Protocol::Tcp,
            ServiceProtocol::Udp => Protocol::Udp,
        }
    }
}

impl fmt::Display for ServiceProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ServiceProtocol::Tcp => "tcp",
            ServiceProtocol::Udp => "udp",
        })
    }
}

/// Key that chooses the slot of a new flow in the placement table; the service's setting `placement`. The order of the
/// variants is part of the format.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum SlotChoice {
    /// A hash of the client's address and port.
    #[default]
    Hash,
    /// The service's port: one node gets all new flows (paper 002, section V-B).
    Port,
}

/// The pool policy by which the server nodes share a service's new flows, and the figures that are the same for all
/// nodes. Weights, loads and distances belong to single nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicePolicy {
    /// Kind of pool policy that fills the slots of the placement table with nodes.
    #[serde(with = "policy_number")]
    pub kind: PolicyKind,
    /// Increase of a node's load by one more slot of the placement table, as a fraction of `u32::MAX`; for the policies
    /// with degradation.
    pub degradation: u32,
    /// Increase of a node's load per millisecond of distance, as a fraction of `u32::MAX`; for the policies with a delay
    /// penalty factor (paper 004).
    pub dpf: u32,
}

impl Default for ServicePolicy {
    /// Returns the policy by which new flows follow the weights alone.
    fn default() -> ServicePolicy {
        ServicePolicy {
            kind: PolicyKind::WeightedRandom,
            degradation: 0,
            dpf: 0,
        }
    }
}

impl ServicePolicy {
    /// Returns a node's figures for the policy: `load` as a fraction of `u32::MAX`, `distance` in milliseconds. The
    /// weight is also the priority.
    pub fn of_node(&self, weight: u32, load: u32, distance: u32) -> Policy {
        let (degradation, dpf) = (self.degradation, self.dpf);
        let priority = weight;
        match self.kind {
            PolicyKind::RoundRobin => Policy::RoundRobin,
            PolicyKind::WeightedRoundRobin => Policy::WeightedRoundRobin { weight },
            PolicyKind::Random => Policy::Random,
            PolicyKind::WeightedRandom => Policy::WeightedRandom { weight },
            PolicyKind::Priority => Policy::Priority { priority },
            PolicyKind::LeastUsed => Policy::LeastUsed { load },
            PolicyKind::LeastUsedDegradation => Policy::LeastUsedDegradation { load, degradation },
            PolicyKind::PriorityLeastUsed => Policy::PriorityLeastUsed { load, degradation },
            PolicyKind::RandomizedLeastUsed => Policy::RandomizedLeastUsed { load },
            PolicyKind::RandomizedPriorityLeastUsed => {
                Policy::RandomizedPriorityLeastUsed { load, degradation }
            }
            PolicyKind::RandomizedLeastUsedDegradation => {
                Policy::RandomizedLeastUsedDegradation { load, degradation }
            }
            PolicyKind::PriorityLeastUsedDegradation => {
                Policy::PriorityLeastUsedDegradation { load, degradation }
            }
            PolicyKind::RandomizedPriorityLeastUsedDegradation => {
                Policy::RandomizedPriorityLeastUsedDegradation { load, degradation }
            }
            PolicyKind::WeightedRandomDpf => Policy::WeightedRandomDpf {
                weight,
                dpf,
                distance,
            },
            PolicyKind::LeastUsedDpf => Policy::LeastUsedDpf {
                load,
                dpf,
                distance,
            },
            PolicyKind::LeastUsedDegradationDpf => Policy::LeastUsedDegradationDpf {
                load,
                degradation,
                dpf,
                distance,
            },
            PolicyKind::PriorityLeastUsedDpf => Policy::PriorityLeastUsedDpf {
                load,
                degradation,
                dpf,
                distance,
            },
            PolicyKind::PriorityLeastUsedDegradationDpf => {
                Policy::PriorityLeastUsedDegradationDpf {
                    load,
                    degradation,
                    dpf,
                    distance,
                }
            }
        }
    }
}

/// A service of the group: the addresses that clients connect to, and the rule by which nodes share its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupService {
    /// The name, unique in the group.
    pub name: ServiceName,
    /// The service addresses. No two services share an address, a port and a protocol.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    pub addresses: Vec<IpAddr>,
    /// Addresses that were removed while they had flows: the flows go on until they end, and there are no new ones.
    #[serde(deserialize_with = "bounded_list_of::<_, _, SERVICE_ADDRESSES_MAX>")]
    pub ending_addresses: Vec<IpAddr>,
    /// The port, not 0.
    pub port: u16,
    /// Transport protocol of the service.
    pub protocol: ServiceProtocol,
    /// The choice of the slot of a new flow.
    pub placement: SlotChoice,
    /// The policy that fills the slots with nodes.
    pub policy: ServicePolicy,
    /// Weights of nodes, at most [`WEIGHT_MAX`] each; a node that is not named has [`WEIGHT_DEFAULT`]. A node of weight
    /// 0 gets no new flows.
    #[serde(with = "bounded_weights")]
    pub weights: BTreeMap<NodeName, u32>,
    /// Time that a handoff may wait for the send queue to empty, in milliseconds, at most [`DRAIN_MS_MAX`]; none: no
    /// wait.
    pub drain_ms: Option<u32>,
    /// Checks of the servers.
    pub checks: ServiceChecks,
}

impl GroupService {
    /// Returns a service with the default policy and placement, in which all nodes have the same weight.
    pub fn new(
        name: ServiceName,
        protocol: ServiceProtocol,
        port: u16,
        addresses: Vec<IpAddr>,
    ) -> GroupService {
        GroupService {
            name,
            addresses,
            ending_addresses: Vec::new(),
            port,
            protocol,
            placement: SlotChoice::default(),
            policy: ServicePolicy::default(),
            weights: BTreeMap::new(),
            drain_ms: None,
            checks: ServiceChecks::default(),
        }
    }

    /// Returns the weight of a node.
    pub fn weight(&self, node: &NodeName) -> u32 {
        self.weights.get(node).copied().unwrap_or(WEIGHT_DEFAULT)
    }

    /// Returns true if the service was removed, and only its flows go on.
    pub fn is_ending(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Returns each address with the port, and true for an address that takes new flows.
    pub fn socket_addresses(&self) -> impl Iterator<Item = (SocketAddr, bool)> {
        let active = self.addresses.iter().map(|address| (address, true));
        let ending = self.ending_addresses.iter().map(|address| (address, false));
        let all = active.chain(ending);
        all.map(|(address, is_active)| (SocketAddr::new(*address, self.port), is_active))
    }
}

/// The name, then protocol, port and addresses, such as `web (tcp port 80 at 10.9.0.1, 10.9.0.2)`.
impl fmt::Display for GroupService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        write!(
            f,
            "{} ({} port {} at {})",
            self.name,
            self.protocol,
            self.port,
            addresses.join(", ")
        )
    }
}
