//! `POST /v1/handoffs`, `GET /v1/handoffs` and `GET /v1/handoffs/{id}`.

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::FlowFilter;
use crate::{Drain, FlowText};

/// Body of `POST /v1/handoffs`: `{"flows": ["tcp:..."], "to": "n2", "drain": "none"}`, or with `all_of` for `flows`.
///
/// Sent to the node that owns the flows. A field that is none of these is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HandoffRequest {
    /// Which flows.
    #[serde(flatten)]
    pub selection: Selection,
    /// Name of the node that is to take them.
    pub to: String,
    /// Whether to wait for the send queues first.
    #[serde(default)]
    pub drain: Drain,
}

impl<'de> Deserialize<'de> for HandoffRequest {
    // A flattened field would let misspelt ones pass.
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
            (Some(flows), None) => Selection::Flows(flows),
            (None, Some(filter)) => Selection::AllOf(filter),
            _ => return Err(D::Error::custom("either `flows` or `all_of` is needed")),
        };
        Ok(Self {
            selection,
            to: body.to,
            drain: body.drain,
        })
    }
}

/// Which flows to hand off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// These.
    Flows(Vec<FlowText>),
    /// All that this node owns and the filter matches.
    AllOf(FlowFilter),
}

/// Answer of `POST /v1/handoffs`, status 202: the handoff has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffAccepted {
    /// For `GET /v1/handoffs/{id}`.
    pub id: u64,
    /// How many flows it is about.
    pub flows: u64,
}

/// Answer of `GET /v1/handoffs`: the handoffs the daemon remembers, newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffList {
    /// The handoffs.
    pub handoffs: Vec<HandoffSummary>,
}

/// Whether a handoff goes on.
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
    /// Its number at this node.
    pub id: u64,
    /// Name of the node that takes the flows.
    pub to: String,
    /// Whether the operator asked for it, or the server program by itself.
    pub asked_by_operator: bool,
    /// Whether it goes on.
    pub state: HandoffState,
    /// Flows it is about.
    pub total: u64,
    /// Flows that moved.
    pub moved: u64,
    /// Flows that stayed.
    pub kept: u64,
    /// CLOCK_MONOTONIC when it began, nanoseconds.
    pub started_at_ns: u64,
    /// CLOCK_MONOTONIC when the last flow had its result, nanoseconds.
    pub finished_at_ns: Option<u64>,
}

/// Answer of `GET /v1/handoffs/{id}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandoffStatus {
    /// The handoff.
    #[serde(flatten)]
    pub summary: HandoffSummary,
    /// What became of each flow.
    pub results: Vec<FlowResult>,
}

/// What became of one flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowResult {
    /// Which flow.
    pub flow: FlowText,
    /// Moved, kept, or not yet known.
    #[serde(flatten)]
    pub outcome: FlowOutcome,
    /// From the last instant the donor's socket could act to the first the acceptor's could, microseconds.
    pub freeze_us: Option<f64>,
    /// The parts of it.
    pub phases_us: PhasesUs,
    /// Bytes that went from donor to acceptor for this flow, application state included.
    pub bytes_transferred: u64,
    /// Bytes in the send queue when it froze.
    pub send_queue_bytes: u64,
    /// Whether the send queue was empty when it froze, because the donor had waited for it.
    pub drained: bool,
    /// CLOCK_MONOTONIC when the donor's socket stopped, nanoseconds.
    pub frozen_at_ns: Option<u64>,
    /// CLOCK_MONOTONIC of the acceptor when its socket began, nanoseconds. Comparable to `frozen_at_ns` only where both
    /// nodes are on one kernel.
    pub active_at_ns: Option<u64>,
}

/// What became of a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum FlowOutcome {
    /// Not yet known.
    Pending,
    /// The acceptor owns it.
    Moved,
    /// The donor owns it as before.
    Kept {
        /// Why.
        reason: String,
    },
}

/// Time in each step of DESIGN.md's "Moving a connection", microseconds. All but `prepare` add up to the freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhasesUs {
    /// Sockets and hold made ready at the acceptor; the donor still serves.
    pub prepare: f64,
    /// The steering table changed; the part of it in which the donor could not act.
    pub divert: f64,
    /// State read out of the donor's socket.
    pub extract: f64,
    /// State on its way.
    pub transfer: f64,
    /// State put into the acceptor's socket.
    pub restore: f64,
    /// Ownership changed, until the acceptor's socket could act.
    pub commit: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_read_as_documented() {
        let flow = "tcp:10.0.0.1:80-10.0.1.2:4242";
        let request: HandoffRequest = serde_json::from_value(
            json!({"flows": [flow], "to": "n2", "drain": {"first": {"max_wait_ms": 9}}}),
        )
        .unwrap();
        assert_eq!(
            request.selection,
            Selection::Flows(vec![flow.parse().unwrap()])
        );
        assert_eq!(request.drain, Drain::First { max_wait_ms: 9 });
        let request: HandoffRequest =
            serde_json::from_value(json!({"all_of": {"pool": "files"}, "to": "n2"})).unwrap();
        assert_eq!(request.drain, Drain::None);
        let Selection::AllOf(filter) = request.selection else {
            panic!("a filter")
        };
        assert_eq!(filter.pool.as_deref(), Some("files"));
    }

    #[test]
    fn requests_that_say_nothing_are_refused() {
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
    fn results_are_flat() {
        let result = FlowResult {
            flow: "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap(),
            outcome: FlowOutcome::Kept {
                reason: "busy".into(),
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
            (&value["result"], &value["reason"]),
            (&json!("kept"), &json!("busy"))
        );
        assert_eq!(serde_json::from_value::<FlowResult>(value).unwrap(), result);
    }
}
