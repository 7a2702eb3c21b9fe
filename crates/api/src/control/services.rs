//! `GET /v1/services` and `POST /v1/services`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Protocol;

/// Answer of `GET /v1/services`: the services of the group, as this node knows them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceList {
    /// Where the services come from.
    pub source: ServiceSource,
    /// Number of changes of the group's settings; 0 with files.
    pub version: u64,
    /// The services in the order of their names.
    pub services: Vec<ServiceEntry>,
}

/// Where the services of a group come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceSource {
    /// `[[service]]` in the node's file: the services change only with the files.
    #[default]
    File,
    /// The group's settings, which its contact node and backups keep.
    Group,
}

/// A service of the group with its settings, as a node knows them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceEntry {
    /// The name, which is also the pool handle for server programs.
    pub name: String,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Port of the service, the same at all its addresses.
    pub port: u16,
    /// Addresses that clients connect to.
    pub addresses: Vec<IpAddr>,
    /// Addresses that were removed: their flows go on until they end, and there are no new ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ending_addresses: Vec<IpAddr>,
    /// The choice of the slot of a new flow.
    pub placement: FlowPlacementRule,
    /// The pool policy by its short name.
    pub policy: String,
    /// Increase of a node's load by one of 256 shares of new flows, 0 to 1.
    pub load_degradation: f64,
    /// Increase of a node's load per millisecond of distance, 0 to 1.
    pub load_dpf: f64,
    /// Weight by node name, for every node.
    pub weights: BTreeMap<String, u32>,
    /// Share of new flows in force by node name, relative to the others. A node that is not named gets none.
    pub shares: BTreeMap<String, u32>,
    /// Default time that a handoff may wait for the send queue to empty, in milliseconds; none: no wait.
    pub drain_ms: Option<u64>,
    /// Checks that each node makes of its own server.
    #[serde(default)]
    pub checks: ServerChecks,
}

/// Checks that each node makes of its own server of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerChecks {
    /// True if a node connects to its server regularly.
    pub connect: bool,
    /// Path of the script that this node runs regularly.
    pub script: Option<String>,
    /// Time between two checks, in milliseconds.
    pub interval_ms: u64,
    /// Time limit of a check, in milliseconds.
    pub timeout_ms: u64,
    /// Number of consecutive failed checks after which a server gets no new clients.
    pub fall: u32,
    /// Number of consecutive good checks after which a server gets new clients again.
    pub rise: u32,
    /// Time after which a server that takes no waiting client gets no new clients, in milliseconds; 0: never.
    pub stall_ms: u64,
}

impl Default for ServerChecks {
    /// Returns the checks of a service whose operator wants none.
    fn default() -> Self {
        ServerChecks {
            connect: false,
            script: None,
            interval_ms: 1_000,
            timeout_ms: 500,
            fall: 2,
            rise: 2,
            stall_ms: 500,
        }
    }
}

/// The part of a client's address that chooses the slot of a new flow in the placement table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FlowPlacementRule {
    /// A hash of the client's address and port.
    #[default]
    Hash,
    /// The service's port: one node gets all new flows.
    Port,
}

/// Body of `POST /v1/services`: a change of the group's services, at any node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceChangeRequest {
    /// A random number that makes a repetition of the request harmless; the daemon chooses one if absent.
    #[serde(default)]
    pub id: Option<u64>,
    /// Addition, change or removal of a service.
    pub change: ServiceChange,
}

/// A change of the group's services.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServiceChange {
    /// Add a service.
    Add(NewService),
    /// Change a service.
    Set(ServiceUpdate),
    /// Remove the service of this name: its flows go on until they end, and there are no new ones.
    Remove(String),
}

/// A service to add.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewService {
    /// The name: lower-case letters, digits and inner hyphens, at most 40.
    pub name: String,
    /// Addresses that clients connect to, at least one.
    pub addresses: Vec<IpAddr>,
    /// Port of the service, the same at all its addresses.
    pub port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Settings other than the defaults.
    #[serde(default)]
    pub settings: ServiceSettings,
}

/// Changes of a service; absent values stay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceUpdate {
    /// The service's name.
    pub name: String,
    /// Addresses to add.
    #[serde(default)]
    pub added_addresses: Vec<IpAddr>,
    /// Addresses to remove: their flows go on until they end.
    #[serde(default)]
    pub removed_addresses: Vec<IpAddr>,
    /// Settings of the service to change.
    #[serde(default)]
    pub settings: ServiceSettings,
}

/// Settings of a service. Absent values are the defaults of a new service, or stay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceSettings {
    /// The pool policy by its short name; WRAND by default.
    #[serde(default)]
    pub policy: Option<String>,
    /// Increase of a node's load by one of 256 shares of new flows, 0 to 1.
    #[serde(default)]
    pub load_degradation: Option<f64>,
    /// Increase of a node's load per millisecond of distance, 0 to 1.
    #[serde(default)]
    pub load_dpf: Option<f64>,
    /// The choice of the slot of a new flow.
    #[serde(default)]
    pub placement: Option<FlowPlacementRule>,
    /// Weight by node name; none removes a node's own weight, which makes it 1.
    #[serde(default)]
    pub weights: BTreeMap<String, Option<u32>>,
    /// Default time that a handoff may wait for the send queue to empty, in milliseconds; 0: no wait.
    #[serde(default)]
    pub drain_ms: Option<u32>,
    /// Checks that each node makes of its own server.
    #[serde(default)]
    pub checks: CheckSettings,
}

/// Checks of a service. Absent values are the defaults of a new service, or stay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckSettings {
    /// True if each node connects to its server regularly; for TCP only.
    #[serde(default)]
    pub connect: Option<bool>,
    /// File name of a script in each node's directory of check scripts; empty: no script.
    #[serde(default)]
    pub script: Option<String>,
    /// Time between two checks in milliseconds, 100 to 600000; 1000 by default.
    #[serde(default)]
    pub interval_ms: Option<u32>,
    /// Time limit of a check in milliseconds, 1 to 600000; 500 by default.
    #[serde(default)]
    pub timeout_ms: Option<u32>,
    /// Number of consecutive failed checks after which a server gets no new clients, 1 to 100; 2 by default.
    #[serde(default)]
    pub fall: Option<u32>,
    /// Number of consecutive good checks after which a server gets new clients again, 1 to 100; 2 by default.
    #[serde(default)]
    pub rise: Option<u32>,
    /// Time in milliseconds after which a server that takes no waiting client gets no new clients, at most 600000;
    /// 0: never; 500 by default.
    #[serde(default)]
    pub stall_ms: Option<u32>,
}

/// Answer of `POST /v1/services`: the change is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceChanged {
    /// Number of changes of the group's settings, this one included.
    pub version: u64,
}
