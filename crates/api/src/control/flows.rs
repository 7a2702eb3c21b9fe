//! `GET /v1/flows` and `GET /v1/flows/{flow}`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FlowText, Protocol};

/// Which flows. A field that is absent matches all.
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
    /// At most so many, in the order of the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// The query of `GET /v1/flows`: a filter and a place in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FlowQuery {
    /// Flows of this pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Flows that this node owns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Flows of this protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// At most so many in this answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Flows after this one: `next` of the answer before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<FlowText>,
}

/// Answer of `GET /v1/flows`: the flows this node knows, ordered by flow. The contact node knows all of the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowList {
    /// The flows.
    pub flows: Vec<FlowEntry>,
    /// How many match, in this answer or not.
    pub total: u64,
    /// The last flow of this answer, when more follow: `after` of the next query.
    pub next: Option<FlowText>,
}

/// Who has a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum FlowState {
    /// One node serves it.
    Owned {
        /// Name of that node.
        owner: String,
    },
    /// It is on its way, and nobody serves it.
    Transit {
        /// Name of the node that gives it.
        donor: String,
        /// Name of the node that takes it.
        acceptor: String,
    },
}

/// One flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowEntry {
    /// Which flow.
    pub flow: FlowText,
    /// Who has it.
    #[serde(flatten)]
    pub state: FlowState,
    /// Grows by one with each change of `state`.
    pub epoch: u32,
    /// The pool it belongs to, where known.
    pub pool: Option<String>,
    /// The server program that has it, where it is on this node and has a session.
    pub program: Option<String>,
    /// When this node took it by handoff and its socket could act: nanoseconds of this node's monotonic clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_at_ns: Option<u64>,
}

/// Answer of `GET /v1/flows/{flow}`; `{flow}` is percent-encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowDetail {
    /// The flow.
    #[serde(flatten)]
    pub entry: FlowEntry,
    /// What its socket says; absent where the socket is not on this node, and for UDP.
    pub tcp: Option<TcpDetail>,
    /// Why it cannot move, each by name. Empty when it can.
    pub blockers: Vec<String>,
    /// The freeze to expect from a handoff, in microseconds.
    pub predicted_freeze_us: Option<u64>,
}

/// What a TCP socket says (tcp(7), `TCP_INFO`; `SIOCINQ`, `SIOCOUTQ`, `SIOCOUTQNSD`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TcpDetail {
    /// The state's name in RFC 9293: `ESTABLISHED`, `CLOSE-WAIT`, ...
    pub state: String,
    /// Smoothed round trip time, microseconds.
    pub rtt_us: u32,
    /// Congestion window, segments.
    pub cwnd_segments: u32,
    /// Segment size for sending, bytes.
    pub mss_bytes: u32,
    /// Received and not read by the program, bytes.
    pub unread_bytes: u64,
    /// In the send queue, sent and unacknowledged ones included, bytes.
    pub send_queue_bytes: u64,
    /// In the send queue and not sent, bytes.
    pub unsent_bytes: u64,
    /// Segments retransmitted in the connection's life.
    pub retransmits: u32,
    /// Time that a drain of the send queue takes by this socket's own rate, microseconds.
    pub predicted_drain_us: Option<u64>,
}
