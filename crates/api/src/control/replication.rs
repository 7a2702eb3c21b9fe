//! Replicated services.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/replications`: the replicated services.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicationList {
    /// The services in the order of their names.
    pub services: Vec<ReplicationEntry>,
}

/// A replicated service. Only the node that replicates knows legs' states, connections and what happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicationEntry {
    /// Name of the service.
    pub service: String,
    /// Address that clients connect to.
    pub address: SocketAddr,
    /// How well the service is protected.
    pub state: ReplicationState,
    /// Contact node whose data plane replicates, unless it has left the group.
    pub replicator: Option<String>,
    /// Number of wanted replicas beside the primary.
    pub wanted_replicas: u8,
    /// The legs that serve, the primary first.
    pub legs: Vec<LegEntry>,
    /// Number of replicated connections.
    pub connections: u64,
    /// Number of connections that began before the service was replicated, and are not.
    pub unreplicated_connections: u64,
    /// Number of promotions since the daemon started.
    pub promotions: u64,
    /// The latest dropped legs, the last one last.
    pub dropped: Vec<DroppedLeg>,
    /// Number of outputs that differed since the daemon started.
    pub divergence_count: u64,
    /// The latest differing outputs, the last one last.
    pub divergences: Vec<Divergence>,
    /// Problems of the replication, with remedies.
    pub problems: Vec<String>,
}

/// How well a service is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplicationState {
    /// The servers of the legs are asked for; new clients wait.
    Preparing,
    /// All wanted replicas are sound.
    Full,
    /// Some of the wanted replicas are missing or in doubt.
    Reduced,
    /// The primary serves alone.
    Alone,
    /// No leg serves.
    Dead,
    /// Replication ends when the last connection has ended.
    Ending,
    /// Another node replicates.
    Elsewhere,
    /// The node that replicated is not the contact node any more: its connections are lost, and new clients get the last primary.
    Interrupted,
}

/// A leg of a replicated service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LegEntry {
    /// Name of the node with the leg's server.
    pub node: String,
    /// True for the leg whose output clients see.
    pub primary: bool,
    /// Confidence in the leg; none where another node replicates.
    pub standing: Option<LegStanding>,
    /// Number of bytes that the leg lacks, in all connections together.
    pub lag_bytes: u64,
}

/// Confidence in a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LegStanding {
    /// The leg has all input, and its output does not differ.
    Sound,
    /// The leg's node does not answer at present.
    Suspected,
    /// The leg is not level with the primary.
    CatchingUp,
    /// The leg's output was not compared without a gap.
    Uncompared,
    /// The leg's output has differed.
    Diverged,
}

/// A leg that no longer serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DroppedLeg {
    /// Name of the node with the leg's server.
    pub node: String,
    /// Reason for which the leg no longer serves.
    pub reason: String,
}

/// An output that differed from the primary's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Divergence {
    /// Name of the node whose server's output differed.
    pub node: String,
    /// Client whose connection has different outputs.
    pub client: SocketAddr,
    /// Number of output bytes from the start of the connection by which the outputs differ.
    pub position: u64,
}

/// Body of `POST /v1/replications`, at the contact node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplicationRequest {
    /// Begin to replicate a service. The servers must have the same state.
    Start {
        /// Name of the service.
        service: String,
        /// Number of replicas beside the primary, 1 to 3.
        replicas: u8,
        /// Names of the nodes with the legs, the primary first; empty: the nodes whose servers are well, by number.
        #[serde(default)]
        nodes: Vec<String>,
    },
    /// Make a replica the primary.
    Promote {
        /// Name of the service.
        service: String,
        /// Name of the node with the replica.
        node: String,
    },
    /// Let the primary serve alone, and end the replication with the last connection.
    Stop {
        /// Name of the service.
        service: String,
    },
}

/// Answer of `POST /v1/replications`: the request is accepted, and `GET /v1/replications` shows the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicationAccepted {
    /// Name of the service.
    pub service: String,
}
