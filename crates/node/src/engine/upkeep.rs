//! Upkeep once a second: tombstones, closed flows, idle datagram flows, gauges.

use holdfast_bpf::shared_with_c::{FlowState, MAX_SERVICES};
use holdfast_wire::Protocol;

use super::tombstones::Tombstone;
use super::{Engine, network_setup};
use crate::dataplane::{FilterEntry, monotonic_s};

/// Time for which the last packets of a closed TCP connection may arrive: TIME_WAIT of Linux, in seconds.
const TIME_WAIT_S: u32 = 60;

/// Silence after which a datagram association is forgotten, in seconds.
const UDP_IDLE_S: u32 = 120;

/// Seconds between two sweeps of the whole flow table.
const SWEEP_INTERVAL_S: u32 = 10;

impl Engine {
    pub(super) fn upkeep(&mut self) {
        let now_s = monotonic_s();
        self.background_work
            .add_tombstones(self.flow_history.take_expired_tombstones(now_s));
        if now_s.is_multiple_of(SWEEP_INTERVAL_S) {
            self.sweep_flow_table(now_s);
            self.sweep_private_flows();
            network_setup::refresh_routes(&self.group, &self.dataplane);
            let now = self.now();
            self.credentials.watch_age(now);
        }
        self.give_up_recovered();
        self.drop_repeated_clients();
        let now = self.now();
        self.remote_drains.expire(now);
        let metrics = self.statistics.metrics();
        metrics.set_in_transit(self.donations.len(), self.arrivals.len());
        metrics.set_hold_slots(self.hold.slots_in_use());
        self.contact_service.retry_refused();
        self.give_up_unanswered();
        self.placement
            .poll_handshake_forwarding(&self.dataplane, now_s);
        self.migrations.upkeep();
        self.update_load();
        self.share_new_flows();
        self.drop_ended_addresses();
        self.report_unrecorded();
        self.replication.publish_packet_counts();
        for (name, count) in self.dataplane.programs.counters() {
            if let Some(reason) = name.strip_prefix("drop_") {
                self.statistics.metrics().set_drops(reason, count);
            }
            if name == "drop_flows_full" {
                self.on_refused_count(now_s, count);
            }
            if name == "events_lost" && self.statistics.on_lost_events(count) {
                self.report_table();
            }
        }
        for peer in self.peers.ids().collect::<Vec<_>>() {
            // The channels may know a node before the view does; a series has the node's name.
            if let (Some(stats), Some(name)) = (self.peers.stats(peer), self.group.name_of(peer)) {
                let metrics = self.statistics.metrics();
                metrics.set_connected(name, self.peers.is_up(peer));
                if let Some(round_trip) = stats.round_trip {
                    metrics.set_round_trip(name, round_trip);
                }
            }
        }
    }

    /// Removes an expired tombstone.
    pub(super) fn remove_tombstone(&mut self, tombstone: &Tombstone) {
        let flow = &tombstone.flow;
        if let Some((state, value)) = self.dataplane.flow(flow)
            && tombstone.matches_entry(state, value.epoch)
            && let Err(error) = self.dataplane.remove_flow(flow)
        {
            tracing::warn!(%flow, %error, "cannot remove a tombstone from the flow table");
        }
    }

    fn sweep_flow_table(&mut self, now_s: u32) {
        let mut changes = Vec::new();
        let mut idle = Vec::new();
        let mut owned = 0;
        let mut service_counts = [0; MAX_SERVICES];
        for (flow, state, value) in self.dataplane.flows() {
            let row = self.dataplane.service_index(&flow);
            if let Some(count) = row.and_then(|row| service_counts.get_mut(usize::from(row))) {
                *count += 1;
            }
            let silent_s = now_s.saturating_sub(value.last_packet_s);
            match state {
                FlowState::Closing if silent_s >= TIME_WAIT_S => {
                    changes.extend(self.removal_of_closed_flow(&flow))
                }
                FlowState::Owned if flow.protocol == Protocol::Udp && silent_s >= UDP_IDLE_S => {
                    idle.push(FilterEntry::from_value(flow, &value));
                }
                FlowState::Owned => owned += 1,
                // A tombstone of an earlier daemon.
                FlowState::Moved
                    if silent_s >= 2 * TIME_WAIT_S && !self.private_flows.is_private(&flow) =>
                {
                    let _ = self.dataplane.remove_flow(&flow);
                }
                _ => {}
            }
        }
        self.statistics.metrics().set_flows_owned(owned);
        for (row, count) in (0u16..).zip(service_counts) {
            self.dataplane.programs.flow_quota.set_count(row, count);
        }
        self.remove_ended_services(&service_counts);
        changes.extend(self.end_datagram_flows(&idle));
        if !changes.is_empty() {
            self.report_changes(changes);
        }
    }
}
