//! The acceptor's last command: activating connections at this node.

use std::collections::BTreeMap;

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::{Completion, FlowEpoch, Results, Token};
use holdfast_sys::tcp_repair::{self, WindowProbe};
use holdfast_wire::{Flow, NodeId};

use super::Engine;
use super::acceptor::{Arrival, IDS_MAX, Socket};
use crate::app::SessionId;
use crate::dataplane::{Entry, in_order, monotonic_ns};

impl Engine {
    pub(super) fn activate(&mut self, token: Token, flows: &[FlowEpoch]) {
        let results = match self.activate_all(flows) {
            Ok(results) => results,
            Err(error) => {
                let failed = flows.iter().map(|_| Err(error.clone())).collect();
                return self.done(Completion {
                    token,
                    results: Results::Activated(failed),
                });
            }
        };
        // The donor can be answered before the remaining steps.
        self.done(Completion {
            token,
            results: Results::Activated(results),
        });
        self.finish_activation(flows);
    }

    fn entries(&self, flows: &[FlowEpoch], slot: impl Fn(&Arrival) -> u32) -> Vec<Entry> {
        let entry = |of: &FlowEpoch| {
            let arrival = self.arrivals.get(&of.flow)?;
            // A connection without a socket must not receive packets yet.
            if matches!(arrival.socket, Socket::Queued) {
                return None;
            }
            Some(Entry {
                flow: of.flow,
                epoch: of.epoch,
                peer: NodeId(0),
                hold_slot: slot(arrival),
            })
        };
        flows.iter().filter_map(entry).collect()
    }

    /// Activates the sockets. Fails if the flow table refuses the change, in which case no socket becomes active.
    pub(super) fn activate_all(
        &mut self,
        flows: &[FlowEpoch],
    ) -> Result<Vec<Result<(), String>>, String> {
        let entries = self.entries(flows, |arrival| arrival.slot);
        self.dataplane
            .set_flows(&entries, FlowState::Flushing)
            .map_err(|error| error.to_string())?;
        let activate = |of: &FlowEpoch| {
            match self.arrivals.get(&of.flow).map(|arrival| &arrival.socket) {
                None => return self.decided_ours(of),
                Some(Socket::Queued) => return self.queue_up(of),
                Some(_) => {}
            }
            self.activate_one(&of.flow)?;
            self.taken_at_ns.insert(of.flow, monotonic_ns());
            Ok(())
        };
        Ok(flows.iter().map(activate).collect())
    }

    /// Notifies the programs, replays held packets, and releases the arrivals' resources.
    pub(super) fn finish_activation(&mut self, flows: &[FlowEpoch]) {
        self.go(flows);
        self.flush(flows);
        let settled = self.entries(flows, |_| 0);
        if let Err(error) = self.dataplane.set_flows(&settled, FlowState::Owned) {
            tracing::error!(%error, "flows stay in the hold's care");
        }
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        self.settle(flows);
    }

    fn activate_one(&mut self, flow: &Flow) -> Result<(), String> {
        let arrival = self.arrivals.get_mut(flow).ok_or("it is not here")?;
        match std::mem::replace(&mut arrival.socket, Socket::Gone) {
            Socket::Restored(socket) => {
                let fixed = arrival.fixed.as_ref().ok_or("it has no options")?;
                let state = arrival.state.tcp.as_ref().ok_or("it has no state")?;
                if let Some(packet) = tcp_repair::injection(fixed, state) {
                    self.hold.inject(&packet);
                }
                for packet in &arrival.state.packets {
                    self.hold.replay_for(flow, packet);
                }
                let live = tcp_repair::activate(socket, fixed, state, WindowProbe::Unacknowledged);
                arrival.socket = Socket::Live(live.map_err(|error| error.to_string())?);
            }
            Socket::Reclaimed(socket) => {
                let fixed = arrival.fixed.as_ref().ok_or("it has no options")?;
                let state = arrival.state.tcp.as_ref().ok_or("it has no state")?;
                let live = tcp_repair::activate_again(socket, fixed, state);
                arrival.socket = Socket::Live(live.map_err(|error| error.to_string())?);
            }
            Socket::Shared => {
                for datagram in &arrival.state.packets {
                    self.hold.inject_datagram(flow, datagram);
                }
            }
            Socket::Prepared(_) | Socket::Queued => return Err("it was never restored".into()),
            live @ (Socket::Live(_) | Socket::Gone) => arrival.socket = live,
        }
        Ok(())
    }

    /// Notifies the programs that the flows are theirs.
    fn go(&mut self, flows: &[FlowEpoch]) {
        for (session, ids) in self.ids_by_session(flows.iter().map(|of| of.flow)) {
            for ids in ids.chunks(IDS_MAX) {
                self.tell(session, &FromDaemon::Go { ids: ids.to_vec() }, Vec::new());
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
    fn flush(&mut self, flows: &[FlowEpoch]) {
        self.read_hold();
        for of in flows {
            let Some(arrival) = self.arrivals.get_mut(&of.flow) else {
                continue;
            };
            arrival.released = true;
            let mut held = std::mem::take(&mut arrival.held);
            let (slot, count) = (arrival.slot, held.len());
            in_order(&mut held);
            for packet in &held {
                self.hold.replay(&packet.bytes);
            }
            for _ in 0..count {
                self.dataplane.programs.holds.replayed(slot);
            }
        }
        self.read_hold();
    }

    /// Sets the deferred socket options and releases the arrivals' slots and map entries.
    fn settle(&mut self, flows: &[FlowEpoch]) {
        let now = self.now();
        for of in flows {
            let Some(arrival) = self.arrivals.remove(&of.flow) else {
                continue;
            };
            self.arrival_ids.remove(&arrival.id);
            if let (Socket::Live(socket), Some(fixed)) = (arrival.socket, arrival.fixed) {
                self.settling.settle(now, socket, &fixed);
            }
            self.programs.has(arrival.session, of.flow);
            if arrival.congestion {
                self.congestion.forget(&self.dataplane, &of.flow);
            }
            self.slots.give_back(arrival.slot);
        }
    }
}
