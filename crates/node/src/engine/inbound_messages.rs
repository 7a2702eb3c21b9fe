//! Messages from server programs and peers.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use holdfast_api::Drain;
use holdfast_api::FlowText;
use holdfast_api::app::{APPLICATION_STATE_BYTES_MAX, DatagramPiece, HandOffItem, ToDaemon};
use holdfast_proto::handoff::{DrainPolicy as MachineDrain, FlowHandoffRequest};
use holdfast_wire::failure::{Failure, OperatorFault, ProgramFault, Text};
use holdfast_wire::{Flow, Frame, NodeId};

use super::donations::DonatedConnection;
use super::handoff_operations::ANSWER_TIMEOUT;
use super::{Engine, flow_from_text, network_setup, wire_protocol};
use crate::app_server::{AppEvent, SessionId};
use crate::peer_channel::PeerEvent;

impl Engine {
    /// Notes the peers whose channels work already: an engine that begins anew in a running daemon gets no events about
    /// these.
    pub(super) fn note_connected_peers(&mut self) {
        let peers = self.peers.clone();
        for peer in peers.ids().filter(|peer| peers.is_up(*peer)) {
            self.on_peer_connected(peer);
        }
    }

    fn on_peer_connected(&mut self, peer: NodeId) {
        let now = self.now();
        self.machine.handle_peer_connected(now, peer);
        self.send_configured_services(peer);
        self.migrations.machine().handle_peer_connected(now, peer);
        self.health.machine().handle_peer_connected(now, peer);
        self.credentials.machine().handle_peer_connected(now, peer);
        self.table_rebuild.handle_peer_connected(peer);
        // To connect to the peer node, the kernel has found its link address, to which the programs forward packets.
        if let Some(known) = self.group.others().find(|(id, _)| *id == peer) {
            network_setup::refresh_route(&self.group, &self.dataplane, known);
        }
    }

    pub(super) fn handle_peer_event(&mut self, event: PeerEvent) {
        let now = self.now();
        if let PeerEvent::Frame { from, .. } = &event {
            self.replication.handle_heard(now, *from);
        }
        match event {
            PeerEvent::Up { peer, boot } => {
                tracing::info!(%peer, boot, "a peer connected");
                self.on_peer_connected(peer);
            }
            PeerEvent::Frame {
                from,
                frame: Frame::Credentials(frame),
            } => self.credentials.machine().handle_frame(now, from, frame),
            PeerEvent::Frame { from, frame } if Self::is_migration_frame(&frame) => {
                self.migrations.handle_frame(now, from, frame);
            }
            PeerEvent::Frame {
                from,
                frame: Frame::Health(frame),
            } => self.handle_health_frame(from, frame),
            PeerEvent::Frame {
                from,
                frame: Frame::Conductor(frame),
            } => {
                self.conductor.handle_frame(now, from, frame);
                self.place_around_drained_nodes();
            }
            PeerEvent::Frame {
                from,
                frame: Frame::Replication(frame),
            } => {
                self.replication.handle_frame(now, from, &frame);
                self.propose_replication_changes();
            }
            PeerEvent::Frame {
                from,
                frame: Frame::Drain(frame),
            } => self.handle_drain_frame(from, frame),
            PeerEvent::Frame {
                from,
                frame: Frame::ConfiguredServices { services },
            } => self.on_configured_services(from, &services),
            PeerEvent::Frame {
                from,
                frame: Frame::NodeLoad { load },
            } => self.placement.on_load(now, from, load),
            PeerEvent::Frame {
                from,
                frame: Frame::FlowReport(frame),
            } => self.table_rebuild.handle_frame(now, from, frame),
            PeerEvent::Frame {
                from,
                frame: frame @ (Frame::ChangeRequest { .. } | Frame::Query { .. }),
            } => self.on_holder_request(from, frame),
            PeerEvent::Frame { from, frame } => {
                if let Some(frame) = self.on_query_answer(from, frame) {
                    self.machine.handle_frame(now, from, frame);
                }
            }
            PeerEvent::Lost { peer, reason: why } => {
                tracing::warn!(%peer, %why, "lost the connection to a peer");
                self.machine.handle_peer_lost(now, peer);
                self.migrations.handle_peer_lost(now, peer);
                self.remote_drains.handle_peer_lost(peer);
                self.health.machine().handle_peer_lost(now, peer);
                self.credentials.machine().handle_peer_lost(now, peer);
            }
        }
    }

    pub(super) fn handle_timeout(&mut self) {
        let now = self.now();
        self.machine.handle_timeout(now);
        self.migrations.machine().handle_timeout(now);
        self.credentials.machine().handle_timeout(now);
        self.table_rebuild.handle_timeout(now);
        self.poll_former_holder();
        self.contact_service.announce_if_due();
        if self.donations.drain_poll_at().is_some_and(|at| at <= now) {
            self.poll_drains();
        }
        self.arrivals.poll_deferred_options(now);
        self.arrivals
            .retry_waiting(&self.dataplane, self.hold.device());
        if self.session_answers_deadline().is_some_and(|at| at <= now) {
            self.poll_prepares();
            self.poll_collects();
        }
        self.poll_health();
        self.poll_conductor();
        self.poll_replication();
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        let machine = self.machine.poll_timeout();
        let session_answers = self.session_answers_deadline();
        let next = [
            machine,
            self.migrations.next_wake(),
            self.credentials.next_wake(),
            self.donations.drain_poll_at(),
            self.arrivals.deferred_options_at(),
            self.table_rebuild.poll_timeout(),
            self.former_holder_until,
            session_answers,
            Some(self.health.next_wake(self.now())),
            Some(self.conductor.next_wake()),
            self.replication.next_wake(),
        ]
        .into_iter()
        .flatten()
        .min();
        let next = next.map(|at| self.started + at);
        next.into_iter()
            .chain(self.contact_service.next_wake())
            .chain(self.arrivals.next_queue_attempt())
            .min()
    }

    /// Returns the earliest deadline of the program answers that a handoff in progress waits for.
    fn session_answers_deadline(&self) -> Option<Duration> {
        let preparing = self.arrivals.prepare_deadline();
        let collecting = self.donations.collect_deadline();
        preparing.into_iter().chain(collecting).min()
    }

    pub(super) fn handle_app_event(&mut self, event: AppEvent) {
        match event {
            AppEvent::Opened { session, name, pid } => {
                tracing::info!(?session, name, pid, "a server program opened a session");
                self.programs.add(session, name, pid);
            }
            AppEvent::Message {
                session,
                message,
                descriptors,
            } => self.handle_program_message(session, message, descriptors),
            AppEvent::Closed { session } => self.on_program_end(session),
        }
    }

    fn on_program_end(&mut self, session: SessionId) {
        let flows = self.programs.remove(session);
        tracing::info!(
            ?session,
            flows = flows.len(),
            "a server program's session ended"
        );
        for flow in flows {
            self.cancel_handoff_request(&flow, &ProgramFault::ProgramEnded.into());
        }
        self.donations.on_program_end(session);
        self.poll_prepares();
        self.poll_collects();
    }

    fn handle_program_message(
        &mut self,
        session: SessionId,
        message: ToDaemon,
        descriptors: Vec<OwnedFd>,
    ) {
        match message {
            ToDaemon::Open { .. } => {}
            ToDaemon::Serve {
                service,
                pool,
                protocol,
                addresses,
            } => {
                self.programs.add_service(
                    session,
                    service,
                    (pool, wire_protocol(protocol)),
                    addresses,
                );
            }
            ToDaemon::Withdraw { service } => self.programs.remove_service(session, service),
            ToDaemon::Accepted { flows, .. } => {
                for flow in flows.iter().filter_map(flow_from_text) {
                    self.programs.set_owner(session, flow);
                    self.on_in_use(&flow);
                }
            }
            ToDaemon::Closed { flows } => {
                for flow in flows.iter().filter_map(flow_from_text) {
                    self.programs.clear_owner(&flow);
                    self.cancel_handoff_request(&flow, &ProgramFault::FlowClosed.into());
                }
            }
            ToDaemon::HandOff {
                to, drain, items, ..
            } => self.hand_off(session, &to, drain, items, descriptors),
            ToDaemon::Declined { flows, reason } => self.on_program_declined(&flows, &reason),
            ToDaemon::Collected { flow, unread, last } => {
                self.on_program_collected(&flow, unread, last)
            }
            ToDaemon::Received { ids } => self.on_program_received(&ids),
            ToDaemon::Refused { ids, reason } => self.on_program_refused(&ids, &reason),
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
            let Some(flow) = flow_from_text(&item.flow) else {
                continue;
            };
            if let Some(why) = self.handoff_obstacle(session, &flow, to, &item.application_state) {
                self.program_messages.send_kept(session, &[flow], &why);
                continue;
            }
            if item.descriptor && socket.is_none() {
                let why = OperatorFault::NoDescriptorLeft.into();
                if let Some(operation) = self.operations.on_refused(&flow, &why) {
                    self.request_next_flows(operation);
                }
                self.program_messages.send_kept(session, &[flow], &why);
                continue;
            }
            let donation = DonatedConnection::new(session, socket, item.application_state);
            self.donations.insert(flow, donation);
            flows.push(flow);
        }
        let program_initiated: Vec<Flow> = flows
            .iter()
            .filter(|flow| !self.operations.has_flow(flow))
            .copied()
            .collect();
        if !program_initiated.is_empty() {
            self.operations
                .begin(program_initiated, to.to_owned(), drain, false);
        }
        self.request_handoff(session, flows, to, drain);
    }

    /// Returns the reason why a program's handoff of a flow must not begin, if any.
    pub(super) fn handoff_obstacle(
        &mut self,
        session: SessionId,
        flow: &Flow,
        to: &str,
        state: &[u8],
    ) -> Option<Failure> {
        if self.donations.contains(flow) {
            return Some(OperatorFault::FlowAlreadyMoving.into());
        }
        if self.programs.owner(flow).is_some_and(|has| has != session) {
            return Some(ProgramFault::OtherProgramHasFlow.into());
        }
        if self.operations.on_answer(flow, to) {
            return Some(ProgramFault::ProgramAnsweredLate.into());
        }
        if state.len() > APPLICATION_STATE_BYTES_MAX {
            let limit_kib = (APPLICATION_STATE_BYTES_MAX >> 10) as u32;
            let why = ProgramFault::TooMuchApplicationState { limit_kib }.into();
            if let Some(operation) = self.operations.on_refused(flow, &why) {
                self.request_next_flows(operation);
            }
            return Some(why);
        }
        None
    }

    /// Ends the pending request for a flow whose program will not answer.
    pub(super) fn cancel_handoff_request(&mut self, flow: &Flow, why: &Failure) {
        if self.operations.forget_flow(flow)
            && let Some(operation) = self.operations.on_refused(flow, why)
        {
            self.request_next_flows(operation);
        }
    }

    /// Gives up on requests that programs have not answered in time.
    pub(super) fn give_up_unanswered(&mut self) {
        let now = self.now();
        for flow in self.operations.take_overdue(now) {
            let limit_s = ANSWER_TIMEOUT.as_secs() as u32;
            let why = ProgramFault::NoSafePoint { limit_s }.into();
            if let Some(operation) = self.operations.on_refused(&flow, &why) {
                self.request_next_flows(operation);
            }
        }
    }

    pub(super) fn request_handoff(
        &mut self,
        session: SessionId,
        flows: Vec<Flow>,
        to: &str,
        drain: Drain,
    ) {
        if flows.is_empty() {
            return;
        }
        let Some(id) = self.group.id_of(to) else {
            let why = OperatorFault::UnknownNode(Text::of(to)).into();
            return self.refuse_handoff(session, &flows, &why);
        };
        let drain = match drain {
            Drain::None => MachineDrain::No,
            Drain::First { max_wait_ms } => {
                MachineDrain::Within(Duration::from_millis(u64::from(max_wait_ms)))
            }
        };
        let now = self.now();
        let request = FlowHandoffRequest {
            flows: flows.clone(),
            to: id,
            drain,
        };
        if let Err(error) = self.machine.handle_request(now, request) {
            let why = OperatorFault::RequestRefused(Text::of(error)).into();
            self.refuse_handoff(session, &flows, &why);
        }
    }

    /// Refuses a handoff that the machine did not begin.
    fn refuse_handoff(&mut self, session: SessionId, flows: &[Flow], why: &Failure) {
        for flow in flows {
            self.donations.remove(flow);
            self.operations.on_refused(flow, why);
        }
        self.program_messages.send_kept(session, flows, why);
    }

    fn on_program_declined(&mut self, flows: &[FlowText], reason: &str) {
        for flow in flows.iter().filter_map(flow_from_text) {
            let why = ProgramFault::ProgramDeclined(Text::of(reason)).into();
            if let Some(operation) = self.operations.on_refused(&flow, &why) {
                self.request_next_flows(operation);
            }
        }
    }

    fn on_program_collected(&mut self, flow: &FlowText, unread: Vec<DatagramPiece>, last: bool) {
        let Some(flow) = flow_from_text(flow) else {
            return;
        };
        self.donations.on_collected(&flow, unread, last);
        self.poll_collects();
    }

    /// Requests the next flows of a handoff from their server programs.
    pub(super) fn request_next_flows(&mut self, operation: u64) {
        loop {
            let (flows, to, drain) = self
                .operations
                .next_requests(operation, self.machine.batch_size());
            if flows.is_empty() {
                return;
            }
            for flow in flows {
                let Some(session) = self.programs.owner(&flow) else {
                    let why = self.no_owner_reason(&flow);
                    self.operations.on_refused(&flow, &why);
                    continue;
                };
                let now = self.now();
                self.operations.on_request(&flow, now);
                self.program_messages
                    .add_request(session, &flow, (&to, drain));
            }
        }
    }

    pub(super) fn no_owner_reason(&self, flow: &Flow) -> Failure {
        match self.owner_of(flow) {
            Some(owner) if owner != self.config.node.name => {
                OperatorFault::FlowOwnedBy(owner.into()).into()
            }
            None if self.dataplane.flow(flow).is_none() => OperatorFault::UnknownFlowHere {
                contact: self.node_name(self.group.contact()).into(),
            }
            .into(),
            _ => OperatorFault::NoProgramHasFlow.into(),
        }
    }
}
