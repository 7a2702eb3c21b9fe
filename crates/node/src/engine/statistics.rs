//! Statistics of this node: metrics, and the events that the kernel programs' counters reveal.

use holdfast_proto::handoff::FlowHandoffOutcome;

use super::table_overflow::TableOverflow;
use crate::metrics::{CountedHandoff, Metrics};

/// Counters and gauges that the operator sees.
pub struct Statistics {
    metrics: Metrics,
    table_overflow: TableOverflow,
    /// Number of lost kernel-program events at the last reading of the counter.
    events_lost: u64,
}

impl Statistics {
    /// Returns statistics that begin at zero; `metrics` is shared with the control API.
    pub fn new(metrics: Metrics) -> Self {
        Self {
            metrics,
            table_overflow: TableOverflow::default(),
            events_lost: 0,
        }
    }

    /// Returns the metrics of the control API.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Counts a flow that this node has taken from another node.
    pub fn count_accepted(&mut self) {
        self.metrics.count_handoff(CountedHandoff::Accepted);
    }

    /// Counts a flow that this node has given to another node, or has kept. A closed flow counts as neither.
    pub fn count_outcome(&mut self, outcome: &FlowHandoffOutcome) {
        match outcome {
            FlowHandoffOutcome::Moved { .. } => {
                self.metrics.count_handoff(CountedHandoff::Moved);
            }
            FlowHandoffOutcome::Kept { .. } => {
                self.metrics.count_handoff(CountedHandoff::Kept);
            }
            FlowHandoffOutcome::Closed => {}
        }
    }

    /// Records the counter of flows that the full flow table has refused, at time `now_s` in seconds. Returns true if
    /// idle flows must be evicted.
    pub fn on_refused_flows(&mut self, now_s: u32, refused: u64, capacity: u32) -> bool {
        self.table_overflow
            .on_refused_flows(now_s, refused, capacity);
        self.metrics
            .set_flow_table_full(self.table_overflow.is_full());
        self.table_overflow.begin_search_if_due(now_s)
    }

    /// Records the counter of lost events. Returns true if events were lost since the last reading.
    pub fn on_lost_events(&mut self, count: u64) -> bool {
        let is_new = count != self.events_lost;
        if is_new {
            tracing::warn!(
                count,
                "events of the kernel programs were lost; reading the flow table instead"
            );
            self.events_lost = count;
        }
        is_new
    }

    /// Returns the messages to the operator about present problems, for a flow table of this capacity in flows.
    pub fn problems(&self, capacity: u32) -> Vec<String> {
        self.table_overflow.problem(capacity).into_iter().collect()
    }
}
