//! `GET /v1/status`, and the body of every error.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ResidentProcess;
use crate::Protocol;

/// The body of every answer with a status of 400 or above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{error} ({what_to_do})")]
pub struct ErrorBody {
    /// What is wrong.
    pub error: String,
    /// What the caller can do about it.
    pub what_to_do: String,
}

/// What this node is and does. Answer of `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Name of this node.
    pub node: String,
    /// Its number in the group, from 1.
    pub node_id: u16,
    /// Name of the group.
    pub group: String,
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// How packets reach the owner: `steer` or `broadcast`.
    pub reach: String,
    /// Name of the contact node, which holds the steering table.
    pub contact_node: String,
    /// The services this node serves.
    pub services: Vec<ServiceStatus>,
    /// The server programs with an open session.
    pub programs: Vec<ProgramStatus>,
    /// Flows this node knows, by state.
    pub flows: FlowCounts,
    /// Handoffs since the daemon started.
    pub handoffs: HandoffCounts,
    /// The processes that came to this node by migration.
    #[serde(default)]
    pub residents: Vec<ResidentProcess>,
    /// Nodes of the group this node is connected to.
    pub peers_connected: u32,
    /// Nodes of the group, this one not counted.
    pub peers_total: u32,
    /// What does not work here, and why: missing capabilities, kernel features. Empty when all is well.
    pub problems: Vec<String>,
}

/// A service address of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceStatus {
    /// The pool handle.
    pub pool: String,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The service address and port.
    pub address: SocketAddr,
}

/// A server program with an open session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramStatus {
    /// What it calls itself.
    pub name: String,
    /// Its process, as the kernel told (SO_PEERCRED).
    pub pid: u32,
    /// The pools it serves.
    pub pools: Vec<String>,
    /// Flows it has.
    pub flows: u64,
}

/// Flows of this node, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowCounts {
    /// This node owns them.
    pub owned: u64,
    /// They are on their way to this node or from it.
    pub transit: u64,
    /// They left this node, and stragglers are still forwarded.
    pub moved: u64,
}

/// Handoffs since the daemon started, in flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffCounts {
    /// Flows given to other nodes.
    pub donated: u64,
    /// Flows taken from other nodes.
    pub accepted: u64,
    /// Flows that stayed after all.
    pub kept: u64,
}
