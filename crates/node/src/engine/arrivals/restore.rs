//! Restoration of arriving connections: from the donor's state, or from the journal of an earlier daemon.

use std::os::fd::{AsFd, OwnedFd};

use holdfast_proto::handoff::FlowToRestore;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::Flow;
use holdfast_wire::failure::{Failure, NodeFault};

use super::super::packet_hold::HeldPackets;
use super::super::state_blobs::{StaticBlob, decode};
use super::{ArrivalSocket, ArrivingConnection, ArrivingConnections};
use crate::app_server::SessionId;
use crate::dataplane::Dataplane;
use crate::failure_conversion::IntoFailure;

/// A connection that an earlier daemon had restored or was restoring, as its program reclaims it.
pub struct ReclaimedArrival {
    /// The program's session.
    pub session: SessionId,
    /// Id of the arrival, given by the earlier daemon.
    pub id: u64,
    /// The program's number for the service.
    pub service: u32,
    /// True if the program has received descriptor and state.
    pub is_received: bool,
    /// The program's descriptor; none for a flow of a shared UDP socket.
    pub socket: Option<OwnedFd>,
}

impl ReclaimedArrival {
    /// Closes the socket of a connection that this node does not own.
    pub fn close_silently(self) {
        if let Some(socket) = self.socket {
            ArrivalSocket::Reclaimed(socket).close_silently();
        }
    }
}

impl ArrivingConnection {
    /// Returns options and state of the connection's socket.
    ///
    /// # Errors
    /// The donor has not sent them.
    pub(super) fn tcp_states(&self) -> Result<(&TcpStaticState, &TcpDynamicState), Failure> {
        let static_state = self
            .static_state
            .as_ref()
            .ok_or(NodeFault::SocketOptionsMissing)?;
        let state = self
            .dynamic_state
            .tcp
            .as_ref()
            .ok_or(NodeFault::TcpStateMissing)?;
        Ok((static_state, state))
    }
}

impl ArrivingConnections {
    /// Restores the socket of a prepared connection, which stays in repair mode.
    ///
    /// # Errors
    /// The socket cannot be restored.
    pub fn restore(
        &mut self,
        dataplane: &Dataplane,
        restore: &FlowToRestore,
    ) -> Result<(), Failure> {
        let arrival = self.connections.get_mut(&restore.flow);
        let arrival = arrival.ok_or(NodeFault::FlowNotPrepared)?;
        arrival.dynamic_state = decode(&restore.dynamic)?;
        match std::mem::replace(&mut arrival.socket, ArrivalSocket::Closed) {
            ArrivalSocket::Prepared(prepared) => {
                let (static_state, state) = arrival.tcp_states()?;
                let socket = holdfast_tcp_repair::restore(prepared, static_state, state)
                    .map_err(IntoFailure::into_failure)?;
                let states = (static_state, state);
                arrival.has_congestion_entry =
                    self.congestion
                        .restore(dataplane, &restore.flow, socket.as_fd(), states);
                arrival.socket = ArrivalSocket::Restored(socket);
            }
            ArrivalSocket::SharedUdp => arrival.socket = ArrivalSocket::SharedUdp,
            ArrivalSocket::Queued => {
                let (static_state, state) = arrival.tcp_states()?;
                holdfast_tcp_repair::unaccepted_connection(static_state, state)
                    .map_err(IntoFailure::into_failure)?;
                arrival.socket = ArrivalSocket::Queued;
            }
            ArrivalSocket::Restored(_)
            | ArrivalSocket::Reclaimed(_)
            | ArrivalSocket::Active(_)
            | ArrivalSocket::Closed => {
                return Err(NodeFault::FlowAlreadyRestored.into());
            }
        }
        Ok(())
    }

    /// Gives an arrival to its program's new session. Returns false if there is no such arrival.
    pub fn set_session(&mut self, id: u64, session: SessionId, is_received: bool) -> bool {
        let Some((flow, _)) = self.ids.get(&id) else {
            return false;
        };
        if let Some(arrival) = self.connections.get_mut(flow) {
            arrival.session = session;
            arrival.is_received |= is_received;
        }
        true
    }

    /// Recreates an arrival from the journal and the program's message, with a slot of the hold counters.
    pub fn recreate(&mut self, flow: Flow, reclaimed: ReclaimedArrival, slot: u32) {
        let ReclaimedArrival {
            session,
            id,
            service,
            is_received,
            socket,
        } = reclaimed;
        let journaled = self.journal.take_earlier_flow(&flow);
        let static_state = decode::<StaticBlob>(&journaled.static_blob)
            .ok()
            .and_then(|blob| blob.tcp);
        let arrival = ArrivingConnection {
            session,
            id,
            is_received,
            socket: socket.map_or(ArrivalSocket::SharedUdp, ArrivalSocket::Reclaimed),
            static_state,
            dynamic_state: decode(&journaled.dynamic_blob).unwrap_or_default(),
            held_packets: HeldPackets::with_slot(slot),
            has_congestion_entry: false,
        };
        self.connections.insert(flow, arrival);
        self.ids.insert(id, (flow, service));
    }
}
