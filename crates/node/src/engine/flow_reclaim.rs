//! Server programs that reclaim flows after the daemon died in the middle of a handoff.

use std::os::fd::{AsFd, OwnedFd};

use holdfast_api::app::{FromDaemon, ReclaimItem, ReclaimedFlowState};
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::FlowEpoch;
use holdfast_wire::Flow;

use super::arrivals::ReclaimedArrival;
use super::donations::DonatedConnection;
use super::recovered_flows::RecoveryVerdict;
use super::{Engine, flow_from_text};
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
        match item.state {
            ReclaimedFlowState::Donated { to } => self.reclaim_donated(session, flow, socket, &to),
            ReclaimedFlowState::Incoming { id, received } => {
                let reclaimed = ReclaimedArrival {
                    session,
                    id,
                    service: item.service,
                    is_received: received,
                    socket,
                };
                self.reclaim_incoming(flow, reclaimed);
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
        // If the donation still exists, only the session broke.
        if self.donations.set_session(&flow, session) {
            return;
        }
        let verdict = self
            .recovered
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
                    .insert(flow, DonatedConnection::reclaimed(session, socket));
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
        self.program_messages.send_moved(session, &flow, to);
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
        self.program_messages
            .send_kept(session, &[flow], "the daemon restarted");
    }

    fn reclaim_incoming(&mut self, flow: Flow, reclaimed: ReclaimedArrival) {
        let (session, id) = (reclaimed.session, reclaimed.id);
        // If the arrival still exists, only the session broke.
        if self
            .arrivals
            .set_session(id, session, reclaimed.is_received)
        {
            return self.poll_prepares();
        }
        let recovered = self.recovered.remove(&flow);
        let verdict = recovered
            .as_ref()
            .and_then(|unreclaimed| unreclaimed.verdict.clone());
        let slot = recovered.as_ref().map_or(0, |unreclaimed| unreclaimed.slot);
        let state = self.dataplane.flow(&flow);
        match (recovered, verdict, state) {
            (Some(_), Some(RecoveryVerdict::Owned(epoch)), _) => {
                self.arrivals.recreate(flow, reclaimed, slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            // The holder has not answered yet.
            (Some(_), None, _) => self.arrivals.recreate(flow, reclaimed, slot),
            // The flow is owned here and only the program was not notified; the socket may still be in repair mode.
            (
                None,
                _,
                Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, value)),
            ) if self.arrivals.journal().has_earlier(&flow) => {
                let epoch = value.epoch;
                self.arrivals.recreate(flow, reclaimed, slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            (None, _, Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, _))) => {
                self.programs.set_owner(session, flow);
                let activate = FromDaemon::Activate { ids: vec![id] };
                self.program_messages.send(session, &activate, Vec::new());
            }
            _ => {
                self.hold.release_slot(slot);
                reclaimed.close_silently();
                let cancel = FromDaemon::Cancel {
                    ids: vec![id],
                    reason: "the daemon restarted before the flow had moved".to_owned(),
                };
                self.program_messages.send(session, &cancel, Vec::new());
            }
        }
    }

    /// Activates a reclaimed flow, which the `Activate` command could not do in the program's absence.
    fn activate_reclaimed(&mut self, flow_epoch: FlowEpoch) {
        let flows = [flow_epoch];
        let activated = self.activate_flows(&flows);
        if let Err(error) = activated.and_then(|each| each.into_iter().collect::<Result<(), _>>()) {
            tracing::error!(flow = %flow_epoch.flow, %error, "cannot activate a flow that this node owns");
        }
        self.finish_activation(&flows);
        self.arrivals.journal().remove(&flow_epoch.flow);
    }
}
