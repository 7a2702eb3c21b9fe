//! Server programs that reclaim flows after the daemon died in the middle of a handoff.

use std::os::fd::{AsFd, OwnedFd};

use holdfast_api::app::{FromDaemon, ReclaimItem, StillWaiting};
use holdfast_bpf::shared::FlowState;
use holdfast_proto::handoff::FlowEpoch;
use holdfast_sys::tcp_repair;
use holdfast_wire::Flow;

use super::acceptor::{Arrival, Socket, silence};
use super::blob::{StaticBlob, decode};
use super::donor::Donation;
use super::recover::Verdict;
use super::{Engine, flow_of, text_of};
use crate::app::SessionId;

impl Engine {
    /// Handles a program that reclaims a flow in transit.
    pub(super) fn reclaim(
        &mut self,
        session: SessionId,
        item: ReclaimItem,
        socket: Option<OwnedFd>,
    ) {
        let Some(flow) = flow_of(&item.flow) else {
            return;
        };
        match item.was {
            StillWaiting::Donated { to } => self.reclaim_donated(session, flow, socket, &to),
            StillWaiting::Incoming { id, received } => {
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
        let verdict = self.recovered.remove(&flow).map(|of| of.verdict);
        match verdict {
            Some(Some(Verdict::Gone { to })) => self.reclaim_gone(session, flow, socket, &to),
            Some(Some(_)) => self.reclaim_kept(session, flow, socket),
            // The holder has not answered yet.
            Some(None) => {
                self.donations.insert(flow, reclaimed(session, socket));
            }
            None => match self.dataplane.flow(&flow).map(|(state, _)| state) {
                Some(FlowState::Moved) | None => self.reclaim_gone(session, flow, socket, to),
                // The handoff had not begun, or the flow has already been given back.
                Some(_) => self.reclaim_kept(session, flow, socket),
            },
        }
    }

    fn reclaim_gone(&mut self, session: SessionId, flow: Flow, socket: Option<OwnedFd>, to: &str) {
        if let Some(Err(error)) = socket.map(|socket| tcp_repair::abandon(socket.as_fd())) {
            tracing::warn!(%flow, %error, "the socket of a moved flow could not be ended");
        }
        let gone = FromDaemon::Gone {
            flows: vec![text_of(&flow)],
            to: to.to_owned(),
        };
        self.tell(session, &gone, Vec::new());
    }

    fn reclaim_kept(&mut self, session: SessionId, flow: Flow, socket: Option<OwnedFd>) {
        // Resuming is harmless if the socket was not frozen. A closed one has nothing to resume.
        if let Some(socket) = &socket
            && let Ok(fixed) = tcp_repair::read_static(socket.as_fd())
            && let Err(error) = tcp_repair::resume(socket.as_fd(), &fixed)
        {
            tracing::warn!(%flow, %error, "its socket does not go on");
        }
        self.programs.has(session, flow);
        let kept = FromDaemon::Kept {
            flows: vec![text_of(&flow)],
            reason: "the daemon restarted".into(),
        };
        self.tell(session, &kept, Vec::new());
    }

    fn reclaim_incoming(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        (id, service, received): (u64, u32, bool),
    ) {
        if let Some((of, _)) = self.arrival_ids.get(&id) {
            // The arrival still exists: only the session broke.
            if let Some(arrival) = self.arrivals.get_mut(of) {
                arrival.session = session;
                arrival.received |= received;
            }
            return self.poll_preparing();
        }
        let recovered = self.recovered.remove(&flow);
        let verdict = recovered.as_ref().and_then(|of| of.verdict.clone());
        let slot = recovered.as_ref().map_or(0, |of| of.slot);
        let state = self.dataplane.flow(&flow);
        match (recovered, verdict, state) {
            (Some(_), Some(Verdict::Ours(epoch)), _) => {
                self.arrive_again(session, flow, socket, (id, service, received), slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            // The holder has not answered yet.
            (Some(_), None, _) => {
                self.arrive_again(session, flow, socket, (id, service, received), slot);
            }
            // The flow is owned here and only the program was not notified; the socket may still be in repair mode.
            (
                None,
                _,
                Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, value)),
            ) if self.journal.has(&flow) => {
                let epoch = value.epoch;
                self.arrive_again(session, flow, socket, (id, service, received), slot);
                self.activate_reclaimed(FlowEpoch { flow, epoch });
            }
            (None, _, Some((FlowState::Owned | FlowState::Prepared | FlowState::Closing, _))) => {
                self.programs.has(session, flow);
                self.tell(session, &FromDaemon::Go { ids: vec![id] }, Vec::new());
            }
            _ => {
                self.slots.give_back(slot);
                if let Some(socket) = socket {
                    silence(&Socket::Reclaimed(socket));
                }
                let cancel = FromDaemon::Cancel {
                    ids: vec![id],
                    reason: "the daemon restarted before it had moved".to_owned(),
                };
                self.tell(session, &cancel, Vec::new());
            }
        }
    }

    /// Recreates an arrival from the journal and the program's message.
    fn arrive_again(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        (id, service, received): (u64, u32, bool),
        slot: u32,
    ) {
        let journaled = self.journal.take(&flow);
        let fixed = decode::<StaticBlob>(&journaled.fixed)
            .ok()
            .and_then(|blob| blob.tcp);
        let arrival = Arrival {
            session,
            id,
            received,
            socket: socket.map_or(Socket::Shared, Socket::Reclaimed),
            fixed,
            state: decode(&journaled.state).unwrap_or_default(),
            slot,
            held: Vec::new(),
            released: false,
            congestion: false,
        };
        self.arrivals.insert(flow, arrival);
        self.arrival_ids.insert(id, (flow, service));
    }

    /// Activates a reclaimed flow, which the `Activate` command could not do in the program's absence.
    fn activate_reclaimed(&mut self, of: FlowEpoch) {
        let flows = [of];
        let woken = self.activate_all(&flows);
        if let Err(error) = woken.and_then(|each| each.into_iter().collect::<Result<(), _>>()) {
            tracing::error!(flow = %of.flow, %error, "a flow that is ours could not be woken");
        }
        self.finish_activation(&flows);
        self.journal.ended(&of.flow);
    }
}

/// Returns the donation of a flow that a program gave away to an earlier daemon.
fn reclaimed(session: SessionId, socket: Option<OwnedFd>) -> Donation {
    let fixed = socket
        .as_ref()
        .and_then(|socket| tcp_repair::read_static(socket.as_fd()).ok());
    Donation {
        fixed,
        unread: Some(Vec::new()),
        // The socket may be in repair mode; resuming is harmless if it is not.
        frozen_at_ns: Some(0),
        ..Donation::new(session, socket, Vec::new())
    }
}
