//! Server programs that reclaim flows after the daemon died in the middle of a handoff.

use std::os::fd::{AsFd, OwnedFd};

use holdfast_api::app::{FromDaemon, ReclaimItem, ReclaimedFlowState};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::FlowEpoch;
use holdfast_wire::Flow;

use super::acceptor::{ArrivalSocket, ArrivingConnection, close_silently};
use super::donor::DonatedConnection;
use super::recovery::RecoveryVerdict;
use super::state_blobs::{StaticBlob, decode};
use super::{Engine, flow_from_text, flow_text};
use crate::app_server::SessionId;

impl Engine {
    /// Handles a program that reclaims a flow in transit.
    pub(super) fn reclaim(
        &mut self,
        session: SessionId,
        item: ReclaimItem,
        socket: Option<OwnedFd>,
    ) {
        let Some(flow) = flow_from_text(&item.flow) else {
            return;
        };
        match item.transit {
            ReclaimedFlowState::Donated { to } => self.reclaim_donated(session, flow, socket, &to),
            ReclaimedFlowState::Incoming { id, received } => {
                self.reclaim_incoming(session, flow, socket, (id, item.service, received));
            }
        }
    }

    fn reclaim_donated(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        to: &str,
    ) {
        if let Some(donation) = self.donations.get_mut(&flow) {
            // The donation still exists: only the session broke.
            donation.session = session;
            return;
        }
        let verdict = self
            .unreclaimed
            .remove(&flow)
            .map(|unreclaimed| unreclaimed.verdict);
        match verdict {
            Some(Some(RecoveryVerdict::Moved { to })) => {
                self.reclaim_moved(session, flow, socket, &to)
            }
            Some(Some(_)) => self.reclaim_kept(session, flow, socket),
            // The holder has not answered yet.
            Some(None) => {
                self.donations
                    .insert(flow, reclaimed_donation(session, socket));
            }
            None => match self.dataplane.flow(&flow).map(|(state, _)| state) {
                Some(FlowState::Moved) | None => self.reclaim_moved(session, flow, socket, to),
                // The handoff had not begun, or the flow has already been given back.
                Some(_) => self.reclaim_kept(session, flow, socket),
            },
        }
    }

    fn reclaim_moved(&mut self, session: SessionId, flow: Flow, socket: Option<OwnedFd>, to: &str) {
        if let Some(Err(error)) = socket.map(|socket| holdfast_tcp_repair::abandon(socket.as_fd()))
        {
            tracing::warn!(%flow, %error, "cannot close the socket of a moved flow");
        }
        let message = FromDaemon::Moved {
            flows: vec![flow_text(&flow)],
            to: to.to_owned(),
        };
        self.send_to_program(session, &message, Vec::new());
    }

    fn reclaim_kept(&mut self, session: SessionId, flow: Flow, socket: Option<OwnedFd>) {
        // Resuming is harmless if the socket was not frozen. A closed one has nothing to resume.
        if let Some(socket) = &socket
            && let Ok(static_state) = holdfast_tcp_repair::read_static(socket.as_fd())
            && let Err(error) = holdfast_tcp_repair::resume(socket.as_fd(), &static_state)
        {
            tracing::warn!(%flow, %error, "cannot resume the socket of a kept flow");
        }
        self.programs.set_owner(session, flow);
        let message = FromDaemon::Kept {
            flows: vec![flow_text(&flow)],
            reason: "the daemon restarted".into(),
        };
        self.send_to_program(session, &message, Vec::new());
    }

    fn reclaim_incoming(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        (id, service, received): (u64, u32, bool),
    ) {
        if let Some((arriving_flow, _)) = self.arrival_ids.get(&id) {
            // The arrival still exists: only the session broke.
            if let Some(arrival) = self.arrivals.get_mut(arriving_flow) {
                arrival.session = session;
                arrival.is_received |= received;
            }
            return self.poll_prepares();
        }
        let recovered = self.unreclaimed.remove(&flow);
        let verdict = recovered
            .as_ref()
            .and_then(|unreclaimed| unreclaimed.verdict.clone());
        let slot = recovered.as_ref().map_or(0, |unreclaimed| unreclaimed.slot);
        let state = self.dataplane.flow(&flow);
        match (recovered, verdict, state) {
            (Some(_), Some(RecoveryVerdict::Owned(epoch)), _) => {
                self.recreate_arrival(session, flow, socket, (id, service, received), slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            // The holder has not answered yet.
            (Some(_), None, _) => {
                self.recreate_arrival(session, flow, socket, (id, service, received), slot);
            }
            // The flow is owned here and only the program was not notified; the socket may still be in repair mode.
            (
                None,
                _,
                Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, value)),
            ) if self.journal.has_earlier(&flow) => {
                let epoch = value.epoch;
                self.recreate_arrival(session, flow, socket, (id, service, received), slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            (None, _, Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, _))) => {
                self.programs.set_owner(session, flow);
                self.send_to_program(session, &FromDaemon::Activate { ids: vec![id] }, Vec::new());
            }
            _ => {
                self.hold_slots.release(slot);
                if let Some(socket) = socket {
                    close_silently(&ArrivalSocket::Reclaimed(socket));
                }
                let cancel = FromDaemon::Cancel {
                    ids: vec![id],
                    reason: "the daemon restarted before the flow had moved".to_owned(),
                };
                self.send_to_program(session, &cancel, Vec::new());
            }
        }
    }

    /// Recreates an arrival from the journal and the program's message.
    fn recreate_arrival(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        (id, service, received): (u64, u32, bool),
        slot: u32,
    ) {
        let journaled = self.journal.take_earlier_flow(&flow);
        let static_state = decode::<StaticBlob>(&journaled.static_blob)
            .ok()
            .and_then(|blob| blob.tcp);
        let arrival = ArrivingConnection {
            session,
            id,
            is_received: received,
            socket: socket.map_or(ArrivalSocket::SharedUdp, ArrivalSocket::Reclaimed),
            static_state,
            dynamic_state: decode(&journaled.dynamic_blob).unwrap_or_default(),
            slot,
            held_packets: Vec::new(),
            released: false,
            has_congestion_entry: false,
        };
        self.arrivals.insert(flow, arrival);
        self.arrival_ids.insert(id, (flow, service));
    }

    /// Activates a reclaimed flow, which the `Activate` command could not do in the program's absence.
    fn activate_reclaimed(&mut self, flow_epoch: FlowEpoch) {
        let flows = [flow_epoch];
        let activated = self.activate_flows(&flows);
        if let Err(error) = activated.and_then(|each| each.into_iter().collect::<Result<(), _>>()) {
            tracing::error!(flow = %flow_epoch.flow, %error, "cannot activate a flow that this node owns");
        }
        self.finish_activation(&flows);
        self.journal.remove(&flow_epoch.flow);
    }
}

/// Returns the donation of a flow that a program gave away to an earlier daemon.
fn reclaimed_donation(session: SessionId, socket: Option<OwnedFd>) -> DonatedConnection {
    let static_state = socket
        .as_ref()
        .and_then(|socket| holdfast_tcp_repair::read_static(socket.as_fd()).ok());
    DonatedConnection {
        static_state,
        unread_datagrams: Some(Vec::new()),
        // The socket may be in repair mode; resuming is harmless if it is not.
        frozen_at_ns: Some(0),
        ..DonatedConnection::new(session, socket, Vec::new())
    }
}
