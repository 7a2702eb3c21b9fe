//! Activation of arriving connections, after the holder has made this node their owner.

use std::time::Duration;

use holdfast_proto::handoff::FlowEpoch;
use holdfast_tcp_repair::WindowProbe;
use holdfast_wire::failure::{Failure, NodeFault};
use holdfast_wire::{Flow, NodeId};

use super::super::packet_hold::PacketHold;
use super::{ArrivalSocket, ArrivingConnection, ArrivingConnections};
use crate::app_server::SessionId;
use crate::dataplane::{Dataplane, FilterEntry, HoldDevice};
use crate::failure_conversion::IntoFailure;

impl ArrivingConnections {
    /// Returns the filters' entries with which packets of the flows are held until the hold is empty.
    pub fn flushing_entries(&self, flows: &[FlowEpoch]) -> Vec<FilterEntry> {
        self.filter_entries(flows, |arrival| arrival.held_packets.slot())
    }

    /// Returns the filters' entries with which packets of the flows reach the stack.
    pub fn owned_entries(&self, flows: &[FlowEpoch]) -> Vec<FilterEntry> {
        self.filter_entries(flows, |_| 0)
    }

    fn filter_entries(
        &self,
        flows: &[FlowEpoch],
        slot: impl Fn(&ArrivingConnection) -> u32,
    ) -> Vec<FilterEntry> {
        let entry = |flow_epoch: &FlowEpoch| {
            let arrival = self.connections.get(&flow_epoch.flow)?;
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

    /// Activates the socket of a restored connection.
    ///
    /// # Errors
    /// The socket cannot be activated.
    pub fn activate(&mut self, hold: &HoldDevice, flow: &Flow) -> Result<(), Failure> {
        let arrival = self
            .connections
            .get_mut(flow)
            .ok_or(NodeFault::FlowNotArriving)?;
        match std::mem::replace(&mut arrival.socket, ArrivalSocket::Closed) {
            ArrivalSocket::Restored(socket) => {
                let (static_state, state) = arrival.tcp_states()?;
                if let Some(packet) = holdfast_tcp_repair::injected_peer_packet(static_state, state)
                {
                    hold.inject(&packet);
                }
                for packet in &arrival.dynamic_state.packets {
                    hold.replay_if_of_flow(flow, packet);
                }
                let active = holdfast_tcp_repair::activate(
                    socket,
                    static_state,
                    state,
                    WindowProbe::IfUnacknowledged,
                );
                arrival.socket = ArrivalSocket::Active(active.map_err(IntoFailure::into_failure)?);
            }
            ArrivalSocket::Reclaimed(socket) => {
                let (static_state, state) = arrival.tcp_states()?;
                let active = holdfast_tcp_repair::activate_again(socket, static_state, state);
                arrival.socket = ArrivalSocket::Active(active.map_err(IntoFailure::into_failure)?);
            }
            ArrivalSocket::SharedUdp => {
                for datagram in &arrival.dynamic_state.packets {
                    hold.inject_datagram(flow, datagram);
                }
            }
            ArrivalSocket::Prepared(_) | ArrivalSocket::Queued => {
                return Err(NodeFault::FlowNotRestored.into());
            }
            unchanged @ (ArrivalSocket::Active(_) | ArrivalSocket::Closed) => {
                arrival.socket = unchanged
            }
        }
        Ok(())
    }

    /// Replays held packets in order. Later packets of the flows go to the stack at once.
    pub fn replay_held(&mut self, dataplane: &Dataplane, hold: &PacketHold, flows: &[FlowEpoch]) {
        for flow_epoch in flows {
            if let Some(arrival) = self.connections.get_mut(&flow_epoch.flow) {
                arrival.held_packets.replay(dataplane, hold);
            }
        }
    }

    /// Sets the deferred socket options of an activated connection and releases its slot and map entries, at the
    /// machine's time `now`. Returns the session of its program.
    pub fn release(
        &mut self,
        now: Duration,
        dataplane: &Dataplane,
        hold: &mut PacketHold,
        flow: &Flow,
    ) -> Option<SessionId> {
        let arrival = self.connections.remove(flow)?;
        self.ids.remove(&arrival.id);
        if let (ArrivalSocket::Active(socket), Some(static_state)) =
            (arrival.socket, arrival.static_state)
        {
            self.deferred_socket_options
                .apply(now, socket, &static_state);
        }
        if arrival.has_congestion_entry {
            self.congestion.forget(dataplane, flow);
        }
        arrival.held_packets.free_slot(hold);
        Some(arrival.session)
    }

    /// Returns the machine's time at which deferred options are due.
    pub fn deferred_options_at(&self) -> Option<Duration> {
        self.deferred_socket_options.next_wake()
    }

    /// Sets the deferred options that are due.
    pub fn poll_deferred_options(&mut self, now: Duration) {
        self.deferred_socket_options.poll(now);
    }
}
