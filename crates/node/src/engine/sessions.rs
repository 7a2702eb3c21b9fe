//! What server programs and peers say.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use holdfast_api::Drain;
use holdfast_api::FlowText;
use holdfast_api::app::{FromDaemon, HandOffItem, Piece, ToDaemon, join_pieces};
use holdfast_proto::handoff::{Drain as MachineDrain, Request};
use holdfast_wire::Flow;
use serde_bytes::ByteBuf;

use super::donor::Donation;
use super::{Engine, flow_of, protocol_of, text_of};
use crate::app::{AppEvent, SessionId};
use crate::channel::PeerEvent;

impl Engine {
    pub(super) fn handle_peer(&mut self, event: PeerEvent) {
        let now = self.now();
        match event {
            PeerEvent::Up { peer, boot } => {
                tracing::info!(%peer, boot, "connected");
                self.machine.handle_peer_connected(now, peer);
            }
            PeerEvent::Frame { from, frame } => self.machine.handle_frame(now, from, frame),
            PeerEvent::Lost { peer, why } => {
                tracing::warn!(%peer, %why, "lost");
                self.machine.handle_peer_lost(now, peer);
            }
        }
    }

    pub(super) fn handle_time(&mut self) {
        let now = self.now();
        self.machine.handle_timeout(now);
        if self.drain_poll_at.is_some_and(|at| at <= now) {
            self.poll_drains();
        }
        if self.settle_poll_at.is_some_and(|at| at <= now) {
            self.poll_unsettled();
        }
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        let machine = self.machine.poll_timeout();
        let next = [machine, self.drain_poll_at, self.settle_poll_at]
            .into_iter()
            .flatten()
            .min();
        next.map(|at| self.started + at)
    }

    pub(super) fn handle_app(&mut self, event: AppEvent) {
        match event {
            AppEvent::Opened { session, name, pid } => {
                tracing::info!(?session, name, pid, "a server program has come");
                self.programs.opened(session, name, pid);
            }
            AppEvent::Message {
                session,
                message,
                descriptors,
            } => self.handle_message(session, message, descriptors),
            AppEvent::Closed { session } => self.program_gone(session),
        }
    }

    fn program_gone(&mut self, session: SessionId) {
        let flows = self.programs.closed(session);
        tracing::info!(?session, flows = flows.len(), "a server program has gone");
        self.poll_preparing();
        self.poll_collecting();
    }

    fn handle_message(&mut self, session: SessionId, message: ToDaemon, descriptors: Vec<OwnedFd>) {
        match message {
            ToDaemon::Open { .. } => {}
            ToDaemon::Serve {
                service,
                pool,
                protocol,
                addresses,
            } => {
                self.programs
                    .serve(session, service, (pool, protocol_of(protocol)), addresses);
            }
            ToDaemon::Withdraw { service } => self.programs.withdraw(session, service),
            ToDaemon::Accepted { flows, .. } => {
                for flow in flows.iter().filter_map(flow_of) {
                    self.programs.has(session, flow);
                }
            }
            ToDaemon::Closed { flows } => {
                for flow in flows.iter().filter_map(flow_of) {
                    self.programs.lost(&flow);
                }
            }
            ToDaemon::HandOff {
                to, drain, items, ..
            } => self.hand_off(session, &to, drain, items, descriptors),
            ToDaemon::Declined { flows, reason } => self.declined(&flows, &reason),
            ToDaemon::Collected { flow, unread, last } => self.collected(&flow, unread, last),
            ToDaemon::Received { ids } => self.received(&ids),
            ToDaemon::Refused { ids, reason } => self.refused(&ids, &reason),
            ToDaemon::Reclaim { items } => {
                let mut descriptors = descriptors.into_iter();
                for item in items {
                    let socket = if item.descriptor {
                        descriptors.next()
                    } else {
                        None
                    };
                    self.reclaim(session, item, socket);
                }
            }
        }
    }

    fn hand_off(
        &mut self,
        session: SessionId,
        to: &str,
        drain: Drain,
        items: Vec<HandOffItem>,
        descriptors: Vec<OwnedFd>,
    ) {
        let mut descriptors = descriptors.into_iter();
        let mut flows = Vec::with_capacity(items.len());
        for item in items {
            let socket = if item.descriptor {
                descriptors.next()
            } else {
                None
            };
            let Some(flow) = flow_of(&item.flow) else {
                continue;
            };
            if self.donations.contains_key(&flow) {
                self.keep(session, &[flow], "it is moving already");
                continue;
            }
            let donation = Donation {
                session,
                socket,
                application: item.application_state,
                fixed: None,
                out_of_order: Vec::new(),
                pieces: Vec::new(),
                unread: None,
                frozen_at_ns: None,
                queued: 0,
                in_doubt: false,
                told: false,
            };
            self.donations.insert(flow, donation);
            flows.push(flow);
        }
        let unasked: Vec<Flow> = flows
            .iter()
            .filter(|flow| !self.operations.has(flow))
            .copied()
            .collect();
        if !unasked.is_empty() {
            self.operations.begin(unasked, to.to_owned(), drain, false);
        }
        self.request(session, flows, to, drain);
    }

    fn request(&mut self, session: SessionId, flows: Vec<Flow>, to: &str, drain: Drain) {
        if flows.is_empty() {
            return;
        }
        let Some(id) = self.config.id_of(to) else {
            let why = format!(
                "there is no node {to} in this group; `holdfast status` shows those there are"
            );
            return self.refuse(session, &flows, &why);
        };
        let drain = match drain {
            Drain::None => MachineDrain::No,
            Drain::First { max_wait_ms } => {
                MachineDrain::Within(Duration::from_millis(u64::from(max_wait_ms)))
            }
        };
        let now = self.now();
        let request = Request {
            flows: flows.clone(),
            to: id,
            drain,
        };
        if let Err(error) = self.machine.handle_request(now, request) {
            self.refuse(session, &flows, &error.to_string());
        }
    }

    /// A handoff that never began.
    fn refuse(&mut self, session: SessionId, flows: &[Flow], why: &str) {
        for flow in flows {
            self.donations.remove(flow);
            self.operations.refused(flow, why);
        }
        self.keep(session, flows, why);
    }

    fn keep(&mut self, session: SessionId, flows: &[Flow], why: &str) {
        let flows = flows.iter().map(text_of).collect();
        self.tell(
            session,
            &FromDaemon::Kept {
                flows,
                reason: why.to_owned(),
            },
            Vec::new(),
        );
    }

    fn declined(&mut self, flows: &[FlowText], reason: &str) {
        for flow in flows.iter().filter_map(flow_of) {
            let why = format!("its server program declined: {reason}");
            if let Some(operation) = self.operations.refused(&flow, &why) {
                self.ask_programs(operation);
            }
        }
    }

    fn collected(&mut self, flow: &FlowText, unread: Vec<Piece>, last: bool) {
        let Some(flow) = flow_of(flow) else { return };
        if let Some(donation) = self.donations.get_mut(&flow) {
            donation.pieces.extend(unread);
            if last {
                let datagrams =
                    join_pieces(std::mem::take(&mut donation.pieces)).unwrap_or_default();
                donation.unread = Some(datagrams.into_iter().map(ByteBuf::from).collect());
            }
        }
        self.poll_collecting();
    }

    /// Asks server programs for the next flows of a handoff.
    pub(super) fn ask_programs(&mut self, operation: u64) {
        loop {
            let (flows, to, drain) = self.operations.next_to_ask(operation);
            if flows.is_empty() {
                return;
            }
            for flow in flows {
                let Some(session) = self.programs.owner(&flow) else {
                    let why = self.no_owner(&flow);
                    self.operations.refused(&flow, &why);
                    continue;
                };
                self.asked
                    .entry((session, to.clone(), drain))
                    .or_default()
                    .push(text_of(&flow));
            }
        }
    }

    pub(super) fn no_owner(&self, flow: &Flow) -> String {
        match self.owner_of(flow) {
            Some(owner) if owner != self.config.node.name => {
                format!("node {owner} owns it; ask there (holdfast handoff on {owner})")
            }
            _ => {
                "no server program on this node has it; `holdfast flow list` shows those there are"
                    .into()
            }
        }
    }

    /// Sends the questions gathered.
    pub(super) fn tell_asked(&mut self) {
        for ((session, to, drain), flows) in std::mem::take(&mut self.asked) {
            for flows in flows.chunks(super::FLOWS_PER_MESSAGE) {
                let asked = FromDaemon::Asked {
                    flows: flows.to_vec(),
                    to: to.clone(),
                    drain,
                };
                self.tell(session, &asked, Vec::new());
            }
        }
    }
}
