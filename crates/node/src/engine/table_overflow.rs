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

/// Observation whether the data plane's flow table is full.
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

    /// Records the counter of refused flows, at time `now_s` in seconds.
    pub fn on_refused_flows(&mut self, now_s: u32, refused: u64, capacity: u32) {
        let before = self.refused_flows.replace(refused);
        if before.is_some_and(|before| before < refused) {
            if self.last_refusal_s.replace(now_s).is_none() {
                tracing::error!(
                    capacity,
                    "the flow table is full: removing idle datagram flows; raise node.capacity"
                );
            }
        } else if self
            .last_refusal_s
            .is_some_and(|full_s| now_s.saturating_sub(full_s) >= REPORT_S)
        {
            self.last_refusal_s = None;
        }
    }

    /// Returns true while the table is reported as full.
    pub fn is_full(&self) -> bool {
        self.last_refusal_s.is_some()
    }

    /// Returns true if a search for idle flows is due at time `now_s` in seconds, and records that the search begins.
    pub fn begin_search_if_due(&mut self, now_s: u32) -> bool {
        let is_due = self.last_refusal_s == Some(now_s)
            && now_s.saturating_sub(self.last_search_s) >= SEARCH_INTERVAL_S;
        if is_due {
            self.last_search_s = now_s;
        }
        is_due
    }
}

impl Engine {
    /// Handles a reading of the counter of refused flows.
    pub(super) fn on_refused_count(&mut self, now_s: u32, refused: u64) {
        let capacity = self.config.node.capacity;
        if self.statistics.on_refused_flows(now_s, refused, capacity) {
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
            .filter_map(|flow| self.removal_of_closed_flow(flow))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u32 = 1000;

    #[test]
    fn first_reading_is_no_refusal() {
        let mut overflow = TableOverflow::default();
        overflow.on_refused_flows(100, 7, CAPACITY);
        assert!(!overflow.is_full());
        assert!(!overflow.begin_search_if_due(100));
        assert_eq!(overflow.problem(CAPACITY), None);
    }

    #[test]
    fn searches_keep_their_interval() {
        let mut overflow = TableOverflow::default();
        overflow.on_refused_flows(100, 0, CAPACITY);
        overflow.on_refused_flows(101, 1, CAPACITY);
        assert!(overflow.begin_search_if_due(101));
        overflow.on_refused_flows(102, 2, CAPACITY);
        assert!(!overflow.begin_search_if_due(102));
        overflow.on_refused_flows(103, 3, CAPACITY);
        assert!(overflow.begin_search_if_due(103));
    }

    #[test]
    fn table_is_reported_as_full_for_a_minute() {
        let mut overflow = TableOverflow::default();
        overflow.on_refused_flows(100, 0, CAPACITY);
        overflow.on_refused_flows(101, 1, CAPACITY);
        overflow.on_refused_flows(100 + REPORT_S, 1, CAPACITY);
        assert!(overflow.problem(CAPACITY).is_some());
        overflow.on_refused_flows(101 + REPORT_S, 1, CAPACITY);
        assert!(!overflow.is_full());
    }
}
