//! `GET /v1/flows` and `GET /v1/flows/{flow}`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FlowText, Protocol};

/// A selection of flows. An absent field matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FlowFilter {
    /// Flows of this pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Flows that this node owns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Flows of this protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Maximum number of flows, in the order of the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// The query of `GET /v1/flows`: a filter and a position in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FlowListQuery {
    /// Flows of this pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Flows that this node owns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Flows of this protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Maximum number of flows in this answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Flows after this one: `next` of the previous answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<FlowText>,
}

/// Answer of `GET /v1/flows`: the flows known to this node, ordered by flow. The contact node knows all flows of the
/// group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowList {
    /// Flows that match the query, as many as its `limit` permits.
    pub flows: Vec<FlowEntry>,
    /// Number of matching flows, in this answer or not.
    pub total: u64,
    /// The last flow of this answer, if more follow: `after` of the next query.
    pub next: Option<FlowText>,
}

/// The owner of a flow, or its transit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum FlowState {
    /// One node owns the flow.
    Owned {
        /// Name of the owner.
        owner: String,
    },
    /// The flow is in transit and has no owner.
    Transit {
        /// Name of the node that gives the flow.
        donor: String,
        /// Name of the node that takes the flow.
        acceptor: String,
    },
}

/// One flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowEntry {
    /// The flow's protocol, service address and client address.
    pub flow: FlowText,
    /// The flow's owner, or its transit.
    #[serde(flatten)]
    pub state: FlowState,
    /// Epoch of the ownership record: grows by one with each change of `state`.
    pub epoch: u32,
    /// The flow's pool, if known.
    pub pool: Option<String>,
    /// The server program of the flow, if that is on this node and has a session.
    pub program: Option<String>,
    /// Time at which this node's socket became active in a handoff: nanoseconds of this node's monotonic clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at_ns: Option<u64>,
}

/// Answer of `GET /v1/flows/{flow}`; `{flow}` is percent-encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowDetail {
    /// The flow with its owner and epoch, as `GET /v1/flows` lists them.
    #[serde(flatten)]
    pub entry: FlowEntry,
    /// State of the TCP socket; absent if the socket is not on this node, and for UDP.
    pub tcp: Option<TcpDetail>,
    /// Reasons that prevent a handoff, each by name. Empty if the flow can move.
    pub blockers: Vec<String>,
    /// Predicted freeze of a handoff, in microseconds.
    pub predicted_freeze_us: Option<u64>,
}

/// State of a TCP socket (tcp(7), `TCP_INFO`; `SIOCINQ`, `SIOCOUTQ`, `SIOCOUTQNSD`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TcpDetail {
    /// The state's name in RFC 9293: `ESTABLISHED`, `CLOSE-WAIT`, ...
    pub state: String,
    /// Smoothed round trip time, in microseconds.
    pub rtt_us: u32,
    /// Congestion window, in segments.
    pub cwnd_segments: u32,
    /// Segment size for sending, in bytes.
    pub mss_bytes: u32,
    /// Data received and not read by the program, in bytes.
    pub unread_bytes: u64,
    /// Data in the send queue, sent but unacknowledged data included, in bytes.
    pub send_queue_bytes: u64,
    /// Data in the send queue and not sent, in bytes.
    pub unsent_bytes: u64,
    /// Segments retransmitted since the connection began.
    pub retransmits: u32,
    /// Predicted time to drain the send queue at this socket's rate, in microseconds.
    pub predicted_drain_us: Option<u64>,
}
