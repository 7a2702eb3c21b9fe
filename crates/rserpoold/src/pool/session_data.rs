//! Messages of sessions, between programs and links.

use std::net::SocketAddr;

use bytes::Bytes;
use holdfast_api::pool::{DATA_BYTES_MAX, ElementEvent, FromPool, SessionEvent};
use holdfast_proto::pool_element::LinkId;
use holdfast_proto::pool_user::SessionId;
use holdfast_sctp::MessageToSend as Packet;
use tokio::sync::OwnedSemaphorePermit;

use super::event_loop::PoolEventLoop;
use super::hosted_elements::session_number;
use super::links::{AssociationKey, LinkOwner, LinkTarget, MachineInput};
use super::requests::StreamEvent;
use super::session_streams::{StreamKind, StreamOutput};

/// Payload protocol identifier of programs' messages: unspecified.
const DATA_PPID: u32 = 0;
/// Maximum number of bytes that wait for an element's program. A user that sends beyond it is disconnected, so that one
/// user cannot block the element for the others.
const WAITING_BYTES_MAX: usize = 4 << 20;

impl PoolEventLoop {
    /// Sends a program's message to the element of its session. The message is dropped if that connection has ended.
    pub(super) fn send_to_element(
        &mut self,
        session: SessionId,
        connection: u64,
        bytes: Vec<u8>,
        permit: Option<OwnedSemaphorePermit>,
    ) {
        let Some(link) = self.users.link(session, connection) else {
            return;
        };
        let now = self.now();
        self.users.machine_mut().handle_sent(now, session);
        match self.links.target(LinkOwner::User, link) {
            Some(LinkTarget::Association(assoc_key)) if !bytes.is_empty() => {
                let packet = Packet::new(DATA_PPID, bytes.into());
                self.endpoints
                    .send(&mut self.links, assoc_key, packet, permit);
            }
            Some(LinkTarget::Stream(number)) => {
                let output = StreamOutput::Data(bytes.into(), permit);
                self.streams.send(number, output);
            }
            Some(LinkTarget::Association(_) | LinkTarget::Local) | None => {}
        }
    }

    /// Signals the end of the data on a link. Returns true if the link's transport can express it.
    pub(super) fn finish_stream(&mut self, link: LinkId) -> bool {
        let Some(LinkTarget::Stream(number)) = self.links.target(LinkOwner::User, link) else {
            return false;
        };
        self.streams.send(number, StreamOutput::Finish)
    }

    /// Sends a message of an element's program to a user.
    pub(super) fn send_to_user(
        &mut self,
        number: u64,
        session: u64,
        bytes: Vec<u8>,
        permit: Option<OwnedSemaphorePermit>,
    ) {
        let link = LinkId::Accepted(session);
        let target = self.links.target(LinkOwner::ElementUsers(number), link);
        if let Some(LinkTarget::Association(assoc_key)) = target.filter(|_| !bytes.is_empty()) {
            let now = self.now();
            if let Some(service) = self.elements.service_mut(number) {
                service.sessions.handle_sent(now, link);
            }
            let packet = Packet::new(DATA_PPID, bytes.into());
            self.endpoints
                .send(&mut self.links, assoc_key, packet, permit);
        }
    }

    /// Sends the session state of a user to that user, to keep (ASAP cookie).
    pub(super) fn send_state(&mut self, number: u64, session: u64, state: &[u8]) {
        if let Some(service) = self.elements.service_mut(number) {
            service
                .sessions
                .handle_state(LinkId::Accepted(session), state);
        }
        self.execute_outputs(LinkOwner::ElementUsers(number));
    }

    /// Ends a user's session at the request of the element's program.
    pub(super) fn close_user(&mut self, number: u64, session: u64) {
        self.end_user(number, LinkId::Accepted(session));
    }

    /// Ends a user's session after the data sent so far.
    pub(super) fn end_user(&mut self, number: u64, link: LinkId) {
        let target = self.links.target(LinkOwner::ElementUsers(number), link);
        if let Some(LinkTarget::Association(assoc_key)) = target {
            self.endpoints.shutdown(assoc_key);
        }
    }

    /// Handles a message that is not ASAP.
    pub(super) fn on_data(&mut self, assoc_key: AssociationKey, bytes: &Bytes) {
        let number = assoc_key.endpoint;
        if number != 0 && self.programs.queued(number) > WAITING_BYTES_MAX {
            tracing::warn!(element = number, "a user sends more than the program reads");
            return self.endpoints.abort(assoc_key);
        }
        let owners = self.links.owners(assoc_key).to_vec();
        for (owner, link) in owners {
            for piece in bytes.chunks(DATA_BYTES_MAX) {
                self.deliver_data(owner, link, piece.to_vec());
            }
        }
    }

    fn deliver_data(&mut self, owner: LinkOwner, link: LinkId, bytes: Vec<u8>) {
        match owner {
            LinkOwner::User => {
                let now = self.now();
                let machine = self.users.machine_mut();
                if let Some(session) = machine.session_of(link) {
                    machine.handle_received(now, session);
                    let data = SessionEvent::Data { bytes };
                    self.users
                        .send_to_program(session, data, &mut self.programs);
                }
            }
            LinkOwner::ElementUsers(number) => {
                let now = self.now();
                if let Some(service) = self.elements.service_mut(number) {
                    service.sessions.handle_received(now, link);
                }
                let session = session_number(link);
                let event = ElementEvent::Data { session, bytes };
                self.programs.send(number, &FromPool::Element(event));
            }
            LinkOwner::Element(_) => {}
        }
    }

    /// Opens the TCP connection or UDP socket of a session.
    pub(super) fn connect_stream(
        &mut self,
        owner: LinkOwner,
        link: LinkId,
        kind: StreamKind,
        address: SocketAddr,
    ) {
        let session = self.users.machine().session_of(link);
        let program = session.and_then(|id| self.users.program(id));
        let Some(gauge) = program.and_then(|program| self.programs.gauge(program)) else {
            // The program has ended, and its session will end soon; the element is not at fault.
            return self.inputs.push_back(MachineInput::Ended(owner, link));
        };
        let number = self.streams.open(kind, address, gauge);
        self.links.attach_stream(owner, link, number);
    }

    /// Handles an event of a session's TCP connection or UDP socket.
    pub(super) fn on_stream_event(&mut self, number: u64, event: StreamEvent) {
        match event {
            StreamEvent::Up => {
                if let Some((owner, link)) = self.links.stream_owner(number) {
                    self.inputs.push_back(MachineInput::Connected(owner, link));
                }
            }
            StreamEvent::Data(bytes) => {
                if let Some((owner, link)) = self.links.stream_owner(number) {
                    self.deliver_data(owner, link, bytes);
                }
            }
            StreamEvent::Down { in_order } => {
                self.streams.close(number);
                if let Some((owner, link)) = self.links.remove_stream(number) {
                    self.inputs.push_back(match in_order {
                        true => MachineInput::Ended(owner, link),
                        false => MachineInput::Lost(owner, link),
                    });
                }
            }
        }
    }
}
