//! `GET /v1/nodes`, `GET /v1/drops`, `GET /v1/placement` and `POST /v1/placement`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/nodes`: the group as this node sees it, ordered by number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeList {
    /// The nodes, this one included.
    pub nodes: Vec<NodeEntry>,
}

/// One node of the group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeEntry {
    /// Its name.
    pub name: String,
    /// Its number, from 1.
    pub id: u16,
    /// Where its daemon listens for other nodes: ADDRESS:PORT.
    pub address: String,
    /// Whether it is this node.
    pub here: bool,
    /// Whether it is the contact node.
    pub contact: bool,
    /// Whether this node has a connection to it. True for this node itself.
    pub connected: bool,
    /// Round trip time of the last ping, microseconds.
    pub rtt_us: Option<f64>,
    /// Its weight in the placement of new flows.
    pub weight: u32,
    /// Flows it owns, where this node knows (the contact node does).
    pub flows: Option<u64>,
    /// Why there is no connection.
    pub problem: Option<String>,
}

/// Answer of `GET /v1/drops`: packets that the data plane of this node dropped, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DropList {
    /// One entry for each reason, counts of zero included.
    pub drops: Vec<DropCount>,
}

/// Packets dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DropCount {
    /// The reason, in words of letters and underscores.
    pub reason: String,
    /// How many since the data plane was attached.
    pub packets: u64,
}

/// Body of `POST /v1/placement`, for the contact node: weights for new flows. Existing flows stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlacementRequest {
    /// Node name to weight; a node that is not named keeps its weight, a weight of 0 gets no new flow.
    pub weights: BTreeMap<String, u32>,
}

/// Answer of `GET` and `POST /v1/placement`: the weights in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Placement {
    /// Node name to weight, every node.
    pub weights: BTreeMap<String, u32>,
    /// Grows by one with each change.
    pub epoch: u32,
}
