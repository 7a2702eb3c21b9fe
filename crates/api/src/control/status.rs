//! `GET /v1/status`, and the body of every error.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MembershipReport, ResidentProcess};
use crate::Protocol;

/// The body of every answer with a status of 400 or above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{error} ({what_to_do})")]
pub struct ErrorBody {
    /// Reason why the request failed.
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
    /// The membership, in a group that runs itself.
    #[serde(default)]
    pub membership: Option<MembershipReport>,
    /// True while this node is being drained: it takes no processes, and no new clients that another node can serve.
    #[serde(default)]
    pub draining: bool,
    /// Defects and their reasons: of this node, and of servers and nodes that get no new clients. Empty if there are none.
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
    /// State of this node's server of the service.
    #[serde(default)]
    pub server: ServerHealth,
    /// State of the service at every node of the group, if this node is the contact node.
    #[serde(default)]
    pub nodes: Vec<ServiceNode>,
}

/// State of a node's server of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ServerHealth {
    /// The node has not looked yet.
    #[default]
    Unknown,
    /// The server takes new clients.
    Serving,
    /// No server has listened since the daemon started, or the server moved to another node.
    Absent,
    /// New clients would not be served.
    Failing {
        /// Reason why new clients would not be served.
        problem: String,
    },
}

/// State of a service at one node, as the contact node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceNode {
    /// Name of the node.
    pub node: String,
    /// The node's share of new clients by the operator's wish.
    pub weight: u32,
    /// The node's share of new clients in force.
    pub placed_weight: u32,
    /// Reason why the node gets no new clients, if its server is not well.
    pub problem: Option<String>,
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
    /// Flows that two nodes claim, at the contact node: neither node gets their packets.
    #[serde(default)]
    pub disputed: u64,
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
