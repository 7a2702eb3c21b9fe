//! Messages from server programs and peers.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use holdfast_api::Drain;
use holdfast_api::FlowText;
use holdfast_api::app::{
    APPLICATION_STATE_BYTES_MAX, FromDaemon, HandOffItem, Piece, ToDaemon, join_pieces,
};
use holdfast_proto::handoff::{Drain as MachineDrain, Request};
use holdfast_wire::Flow;
use serde_bytes::ByteBuf;

use super::donor::Donation;
use super::operations::ANSWER_MAX;
use super::{Engine, flow_of, protocol_of, text_of};
use crate::app::{AppEvent, NO_DESCRIPTOR, SessionId};
use crate::channel::PeerEvent;

impl Engine {
    pub(super) fn handle_peer(&mut self, event: PeerEvent) {
        let now = self.now();
        match event {
            PeerEvent::Up { peer, boot } => {
                tracing::info!(%peer, boot, "connected");
                self.machine.handle_peer_connected(now, peer);
                self.moves.machine().handle_peer_connected(now, peer);
            }
            PeerEvent::Frame { from, frame } if Self::is_of_a_move(&frame) => {
                self.moves.handle_frame(now, from, frame);
            }
            PeerEvent::Frame { from, frame } => {
                if let Some(frame) = self.private_answer(from, frame) {
                    self.machine.handle_frame(now, from, frame);
                }
            }
            PeerEvent::Lost { peer, why } => {
                tracing::warn!(%peer, %why, "lost");
                self.machine.handle_peer_lost(now, peer);
                self.moves.handle_peer_lost(now, peer);
            }
        }
    }

    pub(super) fn handle_time(&mut self) {
        let now = self.now();
        self.machine.handle_timeout(now);
        self.moves.machine().handle_timeout(now);
        if self.drain_poll_at.is_some_and(|at| at <= now) {
            self.poll_drains();
        }
        if self.settling.next_wake().is_some_and(|at| at <= now) {
            self.settling.poll(now);
        }
        if self.programs_due().is_some_and(|at| at <= now) {
            self.poll_preparing();
            self.poll_collecting();
        }
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        let machine = self.machine.poll_timeout();
        let programs = self.programs_due();
        let next = [
            machine,
            self.moves.wake(),
            self.drain_poll_at,
            self.settling.next_wake(),
            programs,
        ]
        .into_iter()
        .flatten()
        .min();
        next.map(|at| self.started + at)
    }

    /// Returns the earliest deadline of the program answers that a handoff in progress waits for.
    fn programs_due(&self) -> Option<Duration> {
        let preparing = self.preparing.iter().map(|preparing| preparing.until);
        let collecting = self.collecting.iter().map(|collecting| collecting.until);
        preparing.chain(collecting).min()
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
        for flow in flows {
            self.nobody_to_ask(&flow, "its server program has ended");
        }
        // Unread datagrams of a shared socket are lost with the program.
        let donations = self.donations.values_mut();
        for donation in donations.filter(|donation| donation.session == session) {
            donation.unread.get_or_insert_default();
        }
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
                    self.in_use(&flow);
                }
            }
            ToDaemon::Closed { flows } => {
                for flow in flows.iter().filter_map(flow_of) {
                    self.programs.lost(&flow);
                    self.nobody_to_ask(&flow, "it was closed meanwhile");
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
            if let Some(why) = self.not_to_give(session, &flow, to, &item.application_state) {
                self.keep(session, &[flow], why);
                continue;
            }
            if item.descriptor && socket.is_none() {
                if let Some(operation) = self.operations.refused(&flow, NO_DESCRIPTOR) {
                    self.ask_programs(operation);
                }
                self.keep(session, &[flow], NO_DESCRIPTOR);
                continue;
            }
            let donation = Donation::new(session, socket, item.application_state);
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

    /// Returns the reason why a program's handoff of a flow must not begin, if any.
    pub(super) fn not_to_give(
        &mut self,
        session: SessionId,
        flow: &Flow,
        to: &str,
        state: &[u8],
    ) -> Option<&'static str> {
        if self.donations.contains_key(flow) {
            return Some("it is moving already");
        }
        if self.programs.owner(flow).is_some_and(|has| has != session) {
            return Some("another server program has it");
        }
        if self.operations.answered(flow, to) {
            return Some("the program answered too late; ask again");
        }
        if state.len() > APPLICATION_STATE_BYTES_MAX {
            let why = "it has more than 48 KiB of application state";
            if let Some(operation) = self.operations.refused(flow, why) {
                self.ask_programs(operation);
            }
            return Some(why);
        }
        None
    }

    /// Ends the pending request for a flow whose program will not answer.
    pub(super) fn nobody_to_ask(&mut self, flow: &Flow, why: &str) {
        if self.operations.forget(flow)
            && let Some(operation) = self.operations.refused(flow, why)
        {
            self.ask_programs(operation);
        }
    }

    /// Gives up on requests that programs have not answered in time.
    pub(super) fn give_up_asked(&mut self) {
        let now = self.now();
        for flow in self.operations.overdue(now) {
            let why = format!(
                "its server program did not answer within {} s: it has come to no safe point",
                ANSWER_MAX.as_secs()
            );
            if let Some(operation) = self.operations.refused(&flow, &why) {
                self.ask_programs(operation);
            }
        }
    }

    pub(super) fn request(&mut self, session: SessionId, flows: Vec<Flow>, to: &str, drain: Drain) {
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

    /// Refuses a handoff that the machine did not begin.
    fn refuse(&mut self, session: SessionId, flows: &[Flow], why: &str) {
        for flow in flows {
            self.donations.remove(flow);
            self.operations.refused(flow, why);
        }
        self.keep(session, flows, why);
    }

    pub(super) fn keep(&mut self, session: SessionId, flows: &[Flow], why: &str) {
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

    /// Requests the next flows of a handoff from their server programs.
    pub(super) fn ask_programs(&mut self, operation: u64) {
        loop {
            let (flows, to, drain) = self
                .operations
                .next_to_ask(operation, self.machine.batch_size());
            if flows.is_empty() {
                return;
            }
            for flow in flows {
                let Some(session) = self.programs.owner(&flow) else {
                    let why = self.no_owner(&flow);
                    self.operations.refused(&flow, &why);
                    continue;
                };
                let now = self.now();
                self.operations.ask(&flow, now);
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
            None if self.dataplane.flow(flow).is_none() => format!(
                "this node knows no such flow; `holdfast flow list` on {} shows all of the group",
                self.name_of(self.config.group.contact)
            ),
            _ => {
                "no server program with a session has it; start it with the daemon's socket".into()
            }
        }
    }

    /// Sends the collected requests.
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
