//! The acceptor's last command: activating connections at this node.

use std::collections::BTreeMap;

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowEpoch, Results};
use holdfast_tcp_repair::WindowProbe;
use holdfast_wire::{Flow, NodeId};

use super::Engine;
use super::acceptor::{ArrivalSocket, ArrivingConnection, IDS_PER_MESSAGE};
use crate::app_server::SessionId;
use crate::dataplane::{FilterEntry, monotonic_ns, sort_for_replay};

impl Engine {
    pub(super) fn activate_arrivals(&mut self, token: CommandToken, flows: &[FlowEpoch]) {
        let results = match self.activate_flows(flows) {
            Ok(results) => results,
            Err(error) => {
                let failed = flows.iter().map(|_| Err(error.clone())).collect();
                return self.complete_handoff_command(Completion {
                    token,
                    results: Results::Activated(failed),
                });
            }
        };
        // The donor can be answered before the remaining steps.
        self.complete_handoff_command(Completion {
            token,
            results: Results::Activated(results),
        });
        self.finish_activation(flows);
    }

    fn arrival_entries(
        &self,
        flows: &[FlowEpoch],
        slot: impl Fn(&ArrivingConnection) -> u32,
    ) -> Vec<FilterEntry> {
        let entry = |flow_epoch: &FlowEpoch| {
            let arrival = self.arrivals.get(&flow_epoch.flow)?;
            // A connection without a socket must not receive packets yet.
            if matches!(arrival.socket, ArrivalSocket::Queued) {
                return None;
            }
            Some(FilterEntry {
                flow: flow_epoch.flow,
                epoch: flow_epoch.epoch,
                peer: NodeId(0),
                hold_slot: slot(arrival),
            })
        };
        flows.iter().filter_map(entry).collect()
    }

    /// Activates the sockets. Fails if the flow table refuses the change, in which case no socket becomes active.
    pub(super) fn activate_flows(
        &mut self,
        flows: &[FlowEpoch],
    ) -> Result<Vec<Result<(), String>>, String> {
        let entries = self.arrival_entries(flows, |arrival| arrival.slot);
        self.dataplane
            .set_flows(&entries, FlowState::Flushing)
            .map_err(|error| error.to_string())?;
        let activate = |flow_epoch: &FlowEpoch| {
            match self
                .arrivals
                .get(&flow_epoch.flow)
                .map(|arrival| &arrival.socket)
            {
                None => return self.on_owned_verdict(flow_epoch),
                Some(ArrivalSocket::Queued) => return self.create_or_wait(flow_epoch),
                Some(_) => {}
            }
            self.activate_flow(&flow_epoch.flow)?;
            self.taken_at_ns.insert(flow_epoch.flow, monotonic_ns());
            Ok(())
        };
        Ok(flows.iter().map(activate).collect())
    }

    /// Notifies the programs, replays held packets, and releases the arrivals' resources.
    pub(super) fn finish_activation(&mut self, flows: &[FlowEpoch]) {
        self.send_activate_messages(flows);
        self.replay_held(flows);
        let owned_entries = self.arrival_entries(flows, |_| 0);
        if let Err(error) = self.dataplane.set_flows(&owned_entries, FlowState::Owned) {
            tracing::error!(%error, "cannot mark flows as owned: their packets stay held");
        }
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        self.release_arrivals(flows);
    }

    fn activate_flow(&mut self, flow: &Flow) -> Result<(), String> {
        let arrival = self
            .arrivals
            .get_mut(flow)
            .ok_or("the flow is not arriving here")?;
        match std::mem::replace(&mut arrival.socket, ArrivalSocket::Closed) {
            ArrivalSocket::Restored(socket) => {
                let static_state = arrival
                    .static_state
                    .as_ref()
                    .ok_or("the flow's socket options are missing")?;
                let state = arrival
                    .dynamic_state
                    .tcp
                    .as_ref()
                    .ok_or("the flow's TCP state is missing")?;
                if let Some(packet) = holdfast_tcp_repair::state_packet(static_state, state) {
                    self.hold.inject(&packet);
                }
                for packet in &arrival.dynamic_state.packets {
                    self.hold.replay_if_of_flow(flow, packet);
                }
                let active = holdfast_tcp_repair::activate(
                    socket,
                    static_state,
                    state,
                    WindowProbe::IfUnacknowledged,
                );
                arrival.socket = ArrivalSocket::Active(active.map_err(|error| error.to_string())?);
            }
            ArrivalSocket::Reclaimed(socket) => {
                let static_state = arrival
                    .static_state
                    .as_ref()
                    .ok_or("the flow's socket options are missing")?;
                let state = arrival
                    .dynamic_state
                    .tcp
                    .as_ref()
                    .ok_or("the flow's TCP state is missing")?;
                let active = holdfast_tcp_repair::activate_again(socket, static_state, state);
                arrival.socket = ArrivalSocket::Active(active.map_err(|error| error.to_string())?);
            }
            ArrivalSocket::SharedUdp => {
                for datagram in &arrival.dynamic_state.packets {
                    self.hold.inject_datagram(flow, datagram);
                }
            }
            ArrivalSocket::Prepared(_) | ArrivalSocket::Queued => {
                return Err("the flow was never restored".into());
            }
            unchanged @ (ArrivalSocket::Active(_) | ArrivalSocket::Closed) => {
                arrival.socket = unchanged
            }
        }
        Ok(())
    }

    /// Notifies the programs that the flows are theirs.
    fn send_activate_messages(&mut self, flows: &[FlowEpoch]) {
        for (session, ids) in self.ids_by_session(flows.iter().map(|flow_epoch| flow_epoch.flow)) {
            for ids in ids.chunks(IDS_PER_MESSAGE) {
                self.send_to_program(
                    session,
                    &FromDaemon::Activate { ids: ids.to_vec() },
                    Vec::new(),
                );
            }
        }
    }

    pub(super) fn ids_by_session(
        &self,
        flows: impl Iterator<Item = Flow>,
    ) -> BTreeMap<SessionId, Vec<u64>> {
        let mut ids: BTreeMap<SessionId, Vec<u64>> = BTreeMap::new();
        for flow in flows {
            if let Some(arrival) = self.arrivals.get(&flow) {
                ids.entry(arrival.session).or_default().push(arrival.id);
            }
        }
        ids
    }

    /// Replays held packets in order.
    fn replay_held(&mut self, flows: &[FlowEpoch]) {
        self.read_hold();
        for flow_epoch in flows {
            let Some(arrival) = self.arrivals.get_mut(&flow_epoch.flow) else {
                continue;
            };
            arrival.released = true;
            let mut packets = std::mem::take(&mut arrival.held_packets);
            let (slot, count) = (arrival.slot, packets.len());
            sort_for_replay(&mut packets);
            for packet in &packets {
                self.hold.replay(&packet.bytes);
            }
            for _ in 0..count {
                self.dataplane.programs.hold_counters.count_replayed(slot);
            }
        }
        self.read_hold();
    }

    /// Sets the deferred socket options and releases the arrivals' slots and map entries.
    fn release_arrivals(&mut self, flows: &[FlowEpoch]) {
        let now = self.now();
        for flow_epoch in flows {
            let Some(arrival) = self.arrivals.remove(&flow_epoch.flow) else {
                continue;
            };
            self.arrival_ids.remove(&arrival.id);
            if let (ArrivalSocket::Active(socket), Some(static_state)) =
                (arrival.socket, arrival.static_state)
            {
                self.deferred_options.apply(now, socket, &static_state);
            }
            self.programs.set_owner(arrival.session, flow_epoch.flow);
            if arrival.has_congestion_entry {
                self.congestion.forget(&self.dataplane, &flow_epoch.flow);
            }
            self.hold_slots.release(arrival.slot);
        }
    }
}
