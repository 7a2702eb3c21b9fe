//! A full flow table: detection, eviction of idle datagram flows, and the report to the operator.
//!
//! Each service has a guaranteed capacity (`c/flow_quota.h` of the data plane), so that a flood of datagrams to one service
//! cannot use up the entries of another. In the flooded service the flows with the longest silence are evicted first.

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_wire::{Flow, OwnershipChange, Protocol};

use super::Engine;
use crate::dataplane::FilterEntry;

/// Minimum silence of an idle datagram flow, in seconds.
const IDLE_MIN_S: u32 = 5;
/// Minimum time between two searches for idle flows, in seconds.
const SEARCH_INTERVAL_S: u32 = 2;
/// Inverse fraction of the table that one search frees.
const FREED_DIVISOR: usize = 8;
/// Time after a refusal for which the table is reported as full, in seconds.
const REPORT_S: u32 = 60;

/// Fill state of the flow table.
#[derive(Default)]
pub struct TableOverflow {
    /// Number of flows refused so far, by the data plane's counter; `None` before the first reading.
    refused_flows: Option<u64>,
    /// Time of the last refusal, in seconds.
    last_refusal_s: Option<u32>,
    last_search_s: u32,
}

impl TableOverflow {
    /// Returns the message for the operator while the table is full.
    pub fn problem(&self, capacity: u32) -> Option<String> {
        self.last_refusal_s.map(|_| {
            let refused = self.refused_flows.unwrap_or(0);
            format!(
                "the flow table is full ({capacity} flows, shared among services; {refused} new flows refused so far): \
                 raise node.capacity, or look for a flood (holdfast flow list)"
            )
        })
    }
}

impl Engine {
    /// Handles a reading of the counter of refused flows.
    pub(super) fn on_refused_count(&mut self, now_s: u32, refused: u64) {
        let before = self.table_overflow.refused_flows.replace(refused);
        if before.is_some_and(|before| before < refused) {
            if self.table_overflow.last_refusal_s.replace(now_s).is_none() {
                tracing::error!(
                    capacity = self.config.node.capacity,
                    "the flow table is full: removing idle datagram flows; raise node.capacity"
                );
            }
        } else if (self.table_overflow.last_refusal_s)
            .is_some_and(|full_s| now_s.saturating_sub(full_s) >= REPORT_S)
        {
            self.table_overflow.last_refusal_s = None;
        }
        self.metrics
            .set_flow_table_full(self.table_overflow.last_refusal_s.is_some());
        let is_search_due = self.table_overflow.last_refusal_s == Some(now_s)
            && now_s.saturating_sub(self.table_overflow.last_search_s) >= SEARCH_INTERVAL_S;
        if is_search_due {
            self.table_overflow.last_search_s = now_s;
            self.evict_idle(now_s);
        }
    }

    fn evict_idle(&mut self, now_s: u32) {
        let flows = self.dataplane.flows().into_iter();
        let mut idle: Vec<(u32, FilterEntry)> = flows
            .filter(|(flow, state, value)| {
                flow.protocol == Protocol::Udp
                    && *state == FlowState::Owned
                    && now_s.saturating_sub(value.last_packet_s) >= IDLE_MIN_S
            })
            .map(|(flow, _, value)| (value.last_packet_s, FilterEntry::from_value(flow, &value)))
            .collect();
        idle.sort_unstable_by_key(|(last_packet_s, _)| *last_packet_s);
        idle.truncate((self.config.node.capacity as usize / FREED_DIVISOR).max(1));
        let entries: Vec<FilterEntry> = idle.into_iter().map(|(_, entry)| entry).collect();
        let changes = self.end_datagram_flows(&entries);
        if !changes.is_empty() {
            tracing::warn!(
                flows = changes.len(),
                "removed idle datagram flows from the full flow table"
            );
            self.report_changes(changes);
        }
    }

    /// Ends datagram flows of this node. Returns the changes to report to the holder.
    pub(super) fn end_datagram_flows(&mut self, entries: &[FilterEntry]) -> Vec<OwnershipChange> {
        for entry in entries {
            self.programs.clear_owner(&entry.flow);
        }
        if self
            .dataplane
            .set_flows(entries, FlowState::Closing)
            .is_err()
        {
            return Vec::new();
        }
        let flows: Vec<Flow> = entries.iter().map(|entry| entry.flow).collect();
        flows
            .iter()
            .filter_map(|flow| self.remove_closed_flow(flow))
            .collect()
    }
}
