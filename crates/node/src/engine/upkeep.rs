//! Upkeep once a second: tombstones, closed flows, idle datagram flows, gauges.

use holdfast_bpf::shared::FlowState;
use holdfast_wire::Protocol;

use super::tombstones::Tombstone;
use super::{Engine, network};
use crate::dataplane::{Entry, monotonic_s};

/// Time for which the last packets of a closed TCP connection may arrive: TIME_WAIT of Linux, in seconds.
const TIME_WAIT_S: u32 = 60;

/// Silence after which a datagram association is forgotten, in seconds.
const UDP_IDLE_S: u32 = 120;

/// Seconds between two sweeps of the whole flow table.
const SWEEP_S: u32 = 10;

impl Engine {
    pub(super) fn upkeep(&mut self) {
        let now_s = monotonic_s();
        self.work.forget(self.tombstones.due(now_s));
        if now_s.is_multiple_of(SWEEP_S) {
            self.sweep(now_s);
            self.sweep_private();
            network::refresh(&self.config, &self.dataplane);
        }
        self.give_up_recovered();
        self.metrics
            .set_in_transit(self.donations.len(), self.arrivals.len());
        self.metrics.set_hold_slots(self.slots.in_use());
        self.give_up_asked();
        self.poll_queues();
        self.poll_successors(now_s);
        self.moves.upkeep();
        self.report_unrecorded();
        for (name, count) in self.dataplane.programs.counters() {
            if let Some(reason) = name.strip_prefix("drop_") {
                self.metrics.set_drops(reason, count);
            }
            if name == "drop_flows_full" {
                self.watch_fullness(now_s, count);
            }
            if name == "events_lost" && count != self.events_lost {
                tracing::warn!(
                    count,
                    "events of the kernel programs were lost; reading the flow table instead"
                );
                self.events_lost = count;
                self.report_table();
            }
        }
        for peer in self.peers.ids().collect::<Vec<_>>() {
            if let Some(stats) = self.peers.stats(peer) {
                let name = self.name_of(peer);
                self.metrics.set_connected(&name, self.peers.is_up(peer));
                if let Some(round_trip) = stats.round_trip {
                    self.metrics.set_round_trip(&name, round_trip);
                }
            }
        }
    }

    /// Removes an expired tombstone.
    pub(super) fn forget_moved(&mut self, tombstone: &Tombstone) {
        let flow = &tombstone.flow;
        if let Some((state, value)) = self.dataplane.flow(flow)
            && tombstone.is(state, value.epoch)
            && let Err(error) = self.dataplane.forget(flow)
        {
            tracing::warn!(%flow, %error, "a tombstone stays");
        }
    }

    fn sweep(&mut self, now_s: u32) {
        let mut changes = Vec::new();
        let mut idle = Vec::new();
        let mut owned = 0;
        let mut of_services = vec![0; self.config.services.len()];
        for (flow, state, value) in self.dataplane.flows() {
            let row = self.dataplane.row(&flow);
            if let Some(count) = row.and_then(|row| of_services.get_mut(usize::from(row))) {
                *count += 1;
            }
            let silent_s = now_s.saturating_sub(value.seen_s);
            match state {
                FlowState::Closing if silent_s >= TIME_WAIT_S => {
                    changes.extend(self.removal(&flow))
                }
                FlowState::Owned if flow.protocol == Protocol::Udp && silent_s >= UDP_IDLE_S => {
                    idle.push(Entry::of(flow, &value));
                }
                FlowState::Owned => owned += 1,
                // A tombstone of an earlier daemon.
                FlowState::Moved
                    if silent_s >= 2 * TIME_WAIT_S && !self.moves.addresses().is_private(&flow) =>
                {
                    let _ = self.dataplane.forget(&flow);
                }
                _ => {}
            }
        }
        self.metrics.set_flows_owned(owned);
        for (row, count) in (0u16..).zip(of_services) {
            self.dataplane.programs.room.counted(row, count);
        }
        changes.extend(self.forget_datagrams(&idle));
        if !changes.is_empty() {
            self.report(changes);
        }
    }
}
