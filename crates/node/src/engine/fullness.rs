//! A full flow table: detection, eviction of idle datagram flows, and the report to the operator.
//!
//! Each service has a guaranteed capacity (`c/room.h` of the data plane), so that a flood of datagrams to one service
//! cannot use up the entries of another. In the flooded service the flows with the longest silence are evicted first.

use holdfast_bpf::shared::FlowState;
use holdfast_wire::{Change, Flow, Protocol};

use super::Engine;
use crate::dataplane::Entry;

/// Minimum silence of an idle datagram flow, in seconds.
const IDLE_MIN_S: u32 = 5;
/// Minimum time between two searches for idle flows, in seconds.
const SEARCH_S: u32 = 2;
/// Inverse fraction of the table that one search frees.
const FREED: usize = 8;
/// Time after a refusal for which the table is reported as full, in seconds.
const TOLD_S: u32 = 60;

/// Fill state of the flow table.
#[derive(Default)]
pub struct Fullness {
    /// Number of flows refused so far, by the data plane's counter; `None` before the first reading.
    refused: Option<u64>,
    /// Time of the last refusal, in seconds.
    full_s: Option<u32>,
    searched_s: u32,
}

impl Fullness {
    /// Returns the message for the operator while the table is full.
    pub fn problem(&self, capacity: u32) -> Option<String> {
        self.full_s.map(|_| {
            let refused = self.refused.unwrap_or(0);
            format!(
                "the flow table is full ({capacity} flows, shared out among services; {refused} new flows had no room so far): \
                 raise node.capacity, or find out who floods (holdfast flow list)"
            )
        })
    }
}

impl Engine {
    /// Handles a reading of the counter of refused flows.
    pub(super) fn watch_fullness(&mut self, now_s: u32, refused: u64) {
        let before = self.fullness.refused.replace(refused);
        if before.is_some_and(|before| before < refused) {
            if self.fullness.full_s.replace(now_s).is_none() {
                tracing::error!(
                    capacity = self.config.node.capacity,
                    "the flow table is full; idle datagram flows go first; raise node.capacity"
                );
            }
        } else if (self.fullness.full_s)
            .is_some_and(|full_s| now_s.saturating_sub(full_s) >= TOLD_S)
        {
            self.fullness.full_s = None;
        }
        self.metrics
            .set_flow_table_full(self.fullness.full_s.is_some());
        let search = self.fullness.full_s == Some(now_s)
            && now_s.saturating_sub(self.fullness.searched_s) >= SEARCH_S;
        if search {
            self.fullness.searched_s = now_s;
            self.forget_idle(now_s);
        }
    }

    fn forget_idle(&mut self, now_s: u32) {
        let flows = self.dataplane.flows().into_iter();
        let mut idle: Vec<(u32, Entry)> = flows
            .filter(|(flow, state, value)| {
                flow.protocol == Protocol::Udp
                    && *state == FlowState::Owned
                    && now_s.saturating_sub(value.seen_s) >= IDLE_MIN_S
            })
            .map(|(flow, _, value)| (value.seen_s, Entry::of(flow, &value)))
            .collect();
        idle.sort_unstable_by_key(|(seen_s, _)| *seen_s);
        idle.truncate((self.config.node.capacity as usize / FREED).max(1));
        let entries: Vec<Entry> = idle.into_iter().map(|(_, entry)| entry).collect();
        let changes = self.forget_datagrams(&entries);
        if !changes.is_empty() {
            tracing::warn!(
                flows = changes.len(),
                "idle datagram flows were forgotten, for want of room"
            );
            self.report(changes);
        }
    }

    /// Ends datagram flows of this node. Returns the changes to report to the holder.
    pub(super) fn forget_datagrams(&mut self, entries: &[Entry]) -> Vec<Change> {
        for of in entries {
            self.programs.lost(&of.flow);
        }
        if self
            .dataplane
            .set_flows(entries, FlowState::Closing)
            .is_err()
        {
            return Vec::new();
        }
        let flows: Vec<Flow> = entries.iter().map(|of| of.flow).collect();
        flows.iter().filter_map(|flow| self.removal(flow)).collect()
    }
}
