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
    /// The problem.
    pub error: String,
    /// A remedy for the caller.
    pub what_to_do: String,
}

/// Status of this node. Answer of `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Name of this node.
    pub node: String,
    /// Number of this node in the group, from 1.
    pub node_id: u16,
    /// Name of the group.
    pub group: String,
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// Reach of the group (packets' way to the owner): `steer` or `broadcast`.
    pub reach: String,
    /// Name of the contact node, which holds the steering table.
    pub contact_node: String,
    /// The services this node serves.
    pub services: Vec<ServiceStatus>,
    /// The server programs with an open session.
    pub programs: Vec<ProgramStatus>,
    /// Flows known to this node, by state.
    pub flows: FlowCounts,
    /// Handoffs since the daemon started.
    pub handoffs: HandoffCounts,
    /// The processes that were migrated to this node.
    #[serde(default)]
    pub residents: Vec<ResidentProcess>,
    /// Number of other nodes in the group that this node is connected to.
    pub peers_connected: u32,
    /// Number of nodes in the group, without this one.
    pub peers_total: u32,
    /// Defects of this node and their reasons: missing capabilities, kernel features. Empty if there are none.
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
    /// The program's name, as it told the daemon.
    pub name: String,
    /// The program's PID, from the kernel (SO_PEERCRED).
    pub pid: u32,
    /// The pools it serves.
    pub pools: Vec<String>,
    /// Number of the program's flows.
    pub flows: u64,
}

/// Flows of this node, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowCounts {
    /// Flows that this node owns.
    pub owned: u64,
    /// Flows in transit to or from this node.
    pub transit: u64,
    /// Flows that moved away from this node, and for which late packets are still forwarded.
    pub moved: u64,
}

/// Handoffs since the daemon started, in flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffCounts {
    /// Flows given to other nodes.
    pub donated: u64,
    /// Flows taken from other nodes.
    pub accepted: u64,
    /// Flows that stayed because the handoff failed.
    pub kept: u64,
}
