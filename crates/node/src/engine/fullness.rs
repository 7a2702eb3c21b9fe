//! A flow table without room: what is done about it, and how it is told.
//!
//! Each service has room of its own (`c/room.h` of the data plane), so that a flood of datagrams takes no other service's. Of the
//! flooded service the flows go first that have been silent for longest.

use holdfast_bpf::shared::FlowState;
use holdfast_wire::{Change, Flow, Protocol};

use super::Engine;
use crate::dataplane::Entry;

/// Datagram flows are not idle before, seconds.
const IDLE_MIN_S: u32 = 5;
/// Between two searches for idle flows, seconds.
const SEARCH_S: u32 = 2;
/// One part in so many of the table is made free at once.
const FREED: usize = 8;
/// For how long after a refusal the table is called full, seconds.
const TOLD_S: u32 = 60;

/// How full the flow table is.
#[derive(Default)]
pub struct Fullness {
    /// Flows without an entry so far, by the data plane's counter; none before the first look.
    refused: Option<u64>,
    /// When the last was refused.
    full_s: Option<u32>,
    searched_s: u32,
}

impl Fullness {
    /// What the operator is told while the table has no room.
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
    /// Takes the counter of flows that had no room.
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

    /// Ends datagram flows of this node; gives what the holder is to be told.
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
