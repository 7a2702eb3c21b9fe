//! `POST /v1/handoffs`, `GET /v1/handoffs` and `GET /v1/handoffs/{id}`.

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::{Blame, FlowFilter};
use crate::{Drain, FlowText};

/// Body of `POST /v1/handoffs`: `{"flows": ["tcp:..."], "to": "n2", "drain": "none"}`, or with `all_of` for `flows`.
///
/// The request goes to the node that owns the flows. An unknown field is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HandoffRequest {
    /// The flows to hand off.
    #[serde(flatten)]
    pub selection: FlowSelection,
    /// Name of the node that takes the flows.
    pub to: String,
    /// Wait for the send queues to empty first, or not.
    #[serde(default)]
    pub drain: Drain,
}

impl<'de> Deserialize<'de> for HandoffRequest {
    // A flattened field would accept misspelt names.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Body {
            flows: Option<Vec<FlowText>>,
            all_of: Option<FlowFilter>,
            to: String,
            #[serde(default)]
            drain: Drain,
        }
        let body = Body::deserialize(from)?;
        let selection = match (body.flows, body.all_of) {
            (Some(flows), None) => FlowSelection::Flows(flows),
            (None, Some(filter)) => FlowSelection::AllOf(filter),
            _ => return Err(D::Error::custom("either `flows` or `all_of` is needed")),
        };
        Ok(Self {
            selection,
            to: body.to,
            drain: body.drain,
        })
    }
}

/// Selection of the flows to hand off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FlowSelection {
    /// The flows listed.
    Flows(Vec<FlowText>),
    /// All flows that this node owns and the filter matches.
    AllOf(FlowFilter),
}

/// Answer of `POST /v1/handoffs`, status 202: the handoff has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffAccepted {
    /// Number of the handoff, for `GET /v1/handoffs/{id}`.
    pub id: u64,
    /// Number of flows in the handoff.
    pub flows: u64,
}

/// Answer of `GET /v1/handoffs`: the handoffs that the daemon remembers, newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffList {
    /// Handoffs that the daemon remembers, newest first.
    pub handoffs: Vec<HandoffSummary>,
}

/// Progress of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandoffState {
    /// Some flows have no result.
    Running,
    /// Every flow has its result.
    Finished,
}

/// A handoff without its flows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffSummary {
    /// Number of the handoff at this node.
    pub id: u64,
    /// Name of the node that takes the flows.
    pub to: String,
    /// True if the operator requested the handoff, false if the server program did.
    pub requested_by_operator: bool,
    /// Progress of the handoff.
    pub state: HandoffState,
    /// Number of flows in the handoff.
    pub total: u64,
    /// Number of flows that moved.
    pub moved: u64,
    /// Number of flows that stayed.
    pub kept: u64,
    /// CLOCK_MONOTONIC at the start, in nanoseconds.
    pub started_at_ns: u64,
    /// CLOCK_MONOTONIC at the last flow's result, in nanoseconds.
    pub finished_at_ns: Option<u64>,
}

/// Answer of `GET /v1/handoffs/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffStatus {
    /// Destination, progress and flow counts of the handoff.
    #[serde(flatten)]
    pub summary: HandoffSummary,
    /// Result of each flow.
    pub results: Vec<FlowResult>,
}

/// Result of one flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowResult {
    /// Flow that was to move.
    pub flow: FlowText,
    /// Moved, kept, or not yet known.
    #[serde(flatten)]
    pub outcome: FlowOutcome,
    /// Time from the donor socket's last action to the acceptor socket's first, in microseconds.
    pub freeze_us: Option<f64>,
    /// Time in each phase of the handoff.
    pub phases_us: PhasesUs,
    /// Bytes sent from donor to acceptor for this flow, application state included.
    pub bytes_transferred: u64,
    /// Length of the send queue at the freeze, in bytes.
    pub send_queue_bytes: u64,
    /// True if the donor waited for the send queue and it was empty at the freeze.
    pub drained: bool,
    /// CLOCK_MONOTONIC when the donor's socket stopped, in nanoseconds.
    pub frozen_at_ns: Option<u64>,
    /// CLOCK_MONOTONIC of the acceptor when its socket became active, in nanoseconds. Comparable to `frozen_at_ns` only
    /// if both nodes run on one kernel.
    pub active_at_ns: Option<u64>,
}

/// Result of a handoff for one flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum FlowOutcome {
    /// The result is not known yet.
    Pending,
    /// The acceptor owns the flow.
    Moved,
    /// The donor still owns the flow.
    Kept {
        /// Reason why the flow stayed.
        reason: String,
        /// The party to blame for `reason`.
        blame: Blame,
    },
}

/// Time in each step of a handoff (ARCHITECTURE.md), in microseconds. All but `prepare` add up to the freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhasesUs {
    /// Sockets and hold are prepared at the acceptor while the donor still serves.
    pub prepare: f64,
    /// The steering table changes; the part of it during which the donor cannot act.
    pub divert: f64,
    /// State is extracted from the donor's socket.
    pub extract: f64,
    /// State is transferred.
    pub transfer: f64,
    /// State is restored into the acceptor's socket.
    pub restore: f64,
    /// Ownership changes, until the acceptor's socket can act.
    pub commit: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documented_requests_are_parsed() {
        let flow = "tcp:10.0.0.1:80-10.0.1.2:4242";
        let request: HandoffRequest = serde_json::from_value(
            json!({"flows": [flow], "to": "n2", "drain": {"first": {"max_wait_ms": 9}}}),
        )
        .unwrap();
        assert_eq!(
            request.selection,
            FlowSelection::Flows(vec![flow.parse().unwrap()])
        );
        assert_eq!(request.drain, Drain::First { max_wait_ms: 9 });
        let request: HandoffRequest =
            serde_json::from_value(json!({"all_of": {"pool": "files"}, "to": "n2"})).unwrap();
        assert_eq!(request.drain, Drain::None);
        let FlowSelection::AllOf(filter) = request.selection else {
            panic!("a filter")
        };
        assert_eq!(filter.pool.as_deref(), Some("files"));
    }

    #[test]
    fn request_without_selection_is_refused() {
        for body in [
            json!({"to": "n2"}),
            json!({"flows": ["tcp:x"], "to": "n2"}),
            json!({"all_of": {"pol": 1}, "to": "n2"}),
            json!({"flows": [], "all_of": {}, "to": "n2"}),
            json!({"flows": [], "to": "n2", "drian": "none"}),
        ] {
            assert!(serde_json::from_value::<HandoffRequest>(body).is_err());
        }
    }

    #[test]
    fn results_serialize_flat() {
        let result = FlowResult {
            flow: "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap(),
            outcome: FlowOutcome::Kept {
                reason: "busy".into(),
                blame: Blame::Program,
            },
            freeze_us: None,
            phases_us: PhasesUs::default(),
            bytes_transferred: 0,
            send_queue_bytes: 0,
            drained: false,
            frozen_at_ns: None,
            active_at_ns: None,
        };
        let value = serde_json::to_value(&result).unwrap();
        assert_eq!(
            (&value["result"], &value["reason"], &value["blame"]),
            (&json!("kept"), &json!("busy"), &json!("program"))
        );
        assert_eq!(serde_json::from_value::<FlowResult>(value).unwrap(), result);
    }
}
