//! `GET /v1/nodes`, the requests that change the membership, `GET /v1/drops`, `GET /v1/placement` and
//! `POST /v1/placement`.

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
    /// The node's name.
    pub name: String,
    /// The node's number, from 1.
    pub id: u16,
    /// Address of the daemon for other nodes: ADDRESS:PORT.
    pub address: String,
    /// True for this node.
    pub this_node: bool,
    /// True for the contact node.
    pub contact_node: bool,
    /// Role in a group that runs itself: `contact node`, `backup` or `server node`.
    #[serde(default)]
    pub role: Option<String>,
    /// Milliseconds since this node last heard a membership frame from the node, in a group that runs itself.
    #[serde(default)]
    pub silent_ms: Option<u64>,
    /// Milliseconds that the contact node's lease lasts, at the contact node itself.
    #[serde(default)]
    pub lease_ms: Option<u64>,
    /// True if this node has a connection to the node, and for this node itself.
    pub connected: bool,
    /// Round trip time of the last ping, in microseconds.
    pub rtt_us: Option<f64>,
    /// Weight in the placement of new flows.
    pub weight: u32,
    /// Number of flows that the node owns, if this node knows (the contact node does).
    pub flows: Option<u64>,
    /// The reason that there is no connection, or that a connected node gets no new clients.
    pub problem: Option<String>,
}

/// Body of `POST /v1/group/takeover`: makes this voter the contact node without a majority of the voters, which must be
/// lost for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeoverRequest {
    /// Must be true: the operator is certain that no other voter runs as contact node.
    pub force: bool,
}

/// Answer of the requests that change the membership: the group has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MembershipChange {
    /// Epoch of the view with the change, as this node knows it.
    pub epoch: u64,
}

/// What a node knows of a group that runs itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MembershipReport {
    /// Epoch of the view that the node obeys; 0 for none.
    pub epoch: u64,
    /// The node's role: `contact node`, `backup`, `server node`, or `outside` with the reason.
    pub role: String,
    /// The contact node, if the node knows one.
    pub contact_node: Option<String>,
    /// The backups, in the order in which they become contact node.
    pub backups: Vec<String>,
    /// The server nodes that the node knows; the contact node and its backups know all.
    pub server_nodes: Vec<String>,
    /// Milliseconds that the node's lease lasts; none without a lease.
    pub lease_ms: Option<u64>,
    /// The store of the group's views; none if the voters vote on views.
    #[serde(default)]
    pub store: Option<ViewStoreReport>,
}

/// The store of a group's views.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ViewStoreReport {
    /// The kind of the store: `etcd`.
    pub kind: String,
    /// Whether the store answers this node; none for a server node, which does not ask, and before the first answer.
    pub answers: Option<bool>,
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
    /// Number of packets since the data plane was attached.
    pub packets: u64,
}

/// Body of `POST /v1/placement`, for the contact node: weights for new flows. Existing flows stay where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlacementRequest {
    /// Weight by node name; a node that is not named keeps its weight, a node of weight 0 gets no new flow.
    pub weights: BTreeMap<String, u32>,
}

/// Answer of `GET` and `POST /v1/placement`: the weights in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlacementWeights {
    /// Weight by node name, for every node.
    pub weights: BTreeMap<String, u32>,
    /// Version of the weights: grows by one with each change.
    pub epoch: u32,
}
