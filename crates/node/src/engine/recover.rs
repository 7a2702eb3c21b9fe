//! After a restart: flows that an earlier daemon left in the middle of a handoff.
//!
//! The machine asks the holder what became of them. Their sockets are with the server programs, which come back by
//! themselves and reclaim them; until then the machine's commands fail and are tried again.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{FromDaemon, ReclaimItem, StillWaiting};
use holdfast_bpf::shared::{FlowState, FlowValue};
use holdfast_proto::handoff::{RecoveredFlow, RecoveredRole};
use holdfast_sys::tcp_repair;
use holdfast_wire::{Flow, NodeId};

use super::acceptor::{Arrival, Socket};
use super::blob::{DynamicBlob, StaticBlob, decode};
use super::donor::Donation;
use super::{Engine, flow_of, text_of};
use crate::app::SessionId;

/// How long a server program has to come back for its flows.
const COME_BACK: Duration = Duration::from_secs(30);

impl Engine {
    /// Tells the machine what the maps say.
    pub(super) fn recover(&mut self) {
        let flows: Vec<RecoveredFlow> = self
            .dataplane
            .flows()
            .iter()
            .filter_map(|(flow, state, value)| recovered(flow, *state, value))
            .collect();
        if flows.is_empty() {
            return;
        }
        tracing::warn!(
            flows = flows.len(),
            "an earlier daemon left flows in the middle of a handoff"
        );
        let until = self.now() + COME_BACK;
        self.recovered
            .extend(flows.iter().map(|of| (of.flow, until)));
        let now = self.now();
        self.machine.handle_recovered(now, flows);
    }

    /// The answer to a command about a flow whose program is not here: wait for it if it may come back.
    pub(super) fn awaited(&self, flow: &Flow) -> Result<(), String> {
        match self.recovered.get(flow) {
            Some(_) => Err("its server program has not come back yet".into()),
            None => Ok(()),
        }
    }

    pub(super) fn give_up_recovered(&mut self) {
        let now = self.now();
        self.recovered.retain(|flow, until| {
            let wait = *until > now;
            if !wait {
                tracing::warn!(%flow, "its server program did not come back");
            }
            wait
        });
    }

    /// A server program comes back with a flow that was on its way.
    pub(super) fn reclaim(
        &mut self,
        session: SessionId,
        item: ReclaimItem,
        socket: Option<OwnedFd>,
    ) {
        let Some(flow) = flow_of(&item.flow) else {
            return;
        };
        let state = self.dataplane.flow(&flow).map(|(state, _)| state);
        match item.was {
            StillWaiting::Donated { to } => self.reclaim_donated(session, flow, socket, state, &to),
            StillWaiting::Incoming { id, received } => {
                let arrival = (id, item.service, received);
                self.reclaim_incoming(session, flow, socket, state, arrival);
            }
        }
    }

    fn reclaim_donated(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        state: Option<FlowState>,
        to: &str,
    ) {
        match state {
            Some(FlowState::TransitOut | FlowState::Prepared) => {
                let fixed = socket
                    .as_ref()
                    .and_then(|socket| tcp_repair::read_static(socket.as_fd()).ok());
                let donation = Donation {
                    session,
                    socket,
                    application: Vec::new(),
                    fixed,
                    out_of_order: Vec::new(),
                    pieces: Vec::new(),
                    unread: Some(Vec::new()),
                    // The socket may be in repair mode: resuming it is harmless if it is not.
                    frozen_at_ns: Some(0),
                    queued: 0,
                    in_doubt: false,
                    told: false,
                };
                self.donations.insert(flow, donation);
            }
            Some(FlowState::Moved) => {
                if let Some(Err(error)) = socket.map(|socket| tcp_repair::abandon(socket.as_fd())) {
                    tracing::warn!(%flow, %error, "the socket of a moved flow could not be ended");
                }
                let gone = FromDaemon::Gone {
                    flows: vec![text_of(&flow)],
                    to: to.to_owned(),
                };
                self.tell(session, &gone, Vec::new());
            }
            // Nothing had been touched, or the flow has been given back already.
            _ => {
                if let Some(socket) = &socket
                    && let Ok(fixed) = tcp_repair::read_static(socket.as_fd())
                {
                    let _ = tcp_repair::resume(socket.as_fd(), &fixed);
                }
                self.programs.has(session, flow);
                let kept = FromDaemon::Kept {
                    flows: vec![text_of(&flow)],
                    reason: "the daemon restarted".into(),
                };
                self.tell(session, &kept, Vec::new());
            }
        }
    }

    fn reclaim_incoming(
        &mut self,
        session: SessionId,
        flow: Flow,
        socket: Option<OwnedFd>,
        state: Option<FlowState>,
        (id, service, received): (u64, u32, bool),
    ) {
        match state {
            Some(FlowState::TransitIn | FlowState::Flushing) => {
                let journaled = self.journaled.remove(&flow).unwrap_or_default();
                let fixed = decode::<StaticBlob>(&journaled.fixed)
                    .ok()
                    .and_then(|blob| blob.tcp);
                let state: Option<DynamicBlob> = decode(&journaled.state).ok();
                let socket = match (socket, &state) {
                    (Some(socket), Some(_)) => Socket::Reclaimed(socket),
                    (None, _) => Socket::Shared,
                    // The state had not come, so the flow was not committed: there is nothing to keep.
                    (Some(_), None) => Socket::Gone,
                };
                let arrival = Arrival {
                    session,
                    id,
                    received,
                    socket,
                    fixed,
                    state: state.unwrap_or_default(),
                    slot: 0,
                    held: Vec::new(),
                    released: false,
                };
                self.arrivals.insert(flow, arrival);
                self.arrival_ids.insert(id, (flow, service));
            }
            Some(FlowState::Owned | FlowState::Prepared | FlowState::Closing) => {
                self.programs.has(session, flow);
                self.tell(session, &FromDaemon::Go { ids: vec![id] }, Vec::new());
            }
            _ => {
                let reason = "the daemon restarted before it had moved".to_owned();
                self.tell(
                    session,
                    &FromDaemon::Cancel {
                        ids: vec![id],
                        reason,
                    },
                    Vec::new(),
                );
            }
        }
    }
}

fn recovered(flow: &Flow, state: FlowState, value: &FlowValue) -> Option<RecoveredFlow> {
    let (role, epoch) = match state {
        FlowState::Prepared => (RecoveredRole::DonorPrepared, value.epoch),
        FlowState::TransitOut => (RecoveredRole::Donor, value.epoch),
        FlowState::TransitIn => (RecoveredRole::Acceptor, value.epoch),
        FlowState::Flushing => (RecoveredRole::Acceptor, value.epoch.saturating_sub(1)),
        FlowState::Owned | FlowState::Moved | FlowState::Closing => return None,
    };
    Some(RecoveredFlow {
        flow: *flow,
        epoch,
        role,
        peer: NodeId(value.peer),
    })
}
