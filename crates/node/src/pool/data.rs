//! Messages of sessions, between programs and links.

use std::net::SocketAddr;

use bytes::Bytes;
use holdfast_api::pool::{DATA_BYTES_MAX, ElementEvent, FromPool, SessionEvent};
use holdfast_proto::pool_element::Link;
use holdfast_proto::pool_user::SessionId;
use holdfast_sys::transport::Message as Packet;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::elements::session_number;
use super::event_loop::Daemon;
use super::links::{Owner, Place, Target};
use super::machines::Input;
use super::requests::StreamEvent;
use super::streams::{self, Ends, Kind, Sent};

/// Payload protocol identifier of programs' messages: unspecified.
const DATA_PPID: u32 = 0;
/// Maximum number of bytes that wait for an element's program. A user that sends beyond it is disconnected, so that one
/// user cannot block the element for the others.
const WAITING_BYTES_MAX: usize = 4 << 20;

impl Daemon {
    /// Sends a message, or queues it until the association's buffer has room.
    pub(super) fn send(
        &mut self,
        place: Place,
        message: Packet,
        room: Option<OwnedSemaphorePermit>,
    ) {
        let is_first = self
            .links
            .waiting(place)
            .is_some_and(|waiting| waiting.is_empty());
        if is_first && self.try_send(place, &message) {
            return;
        }
        if let Some(waiting) = self.links.waiting(place) {
            waiting.push_back((message, room));
            self.stalled.insert(place);
        }
    }

    /// Returns true if the message is finished: sent, or its association is gone.
    fn try_send(&mut self, place: Place, message: &Packet) -> bool {
        let Some(endpoint) = self.endpoint(place.endpoint) else {
            return true;
        };
        match endpoint.send(place.assoc, message) {
            Ok(()) => true,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, ?place, "sending");
                true
            }
        }
    }

    /// Retries messages for which the buffer had no room.
    pub(super) fn send_stalled(&mut self) {
        for place in std::mem::take(&mut self.stalled) {
            while let Some((message, room)) = self
                .links
                .waiting(place)
                .and_then(std::collections::VecDeque::pop_front)
            {
                if self.try_send(place, &message) {
                    continue;
                }
                if let Some(waiting) = self.links.waiting(place) {
                    waiting.push_front((message, room));
                }
                self.stalled.insert(place);
                break;
            }
        }
    }

    /// Sends a program's message to the element of its session. The message is dropped if that connection has ended.
    pub(super) fn send_to_element(
        &mut self,
        session: SessionId,
        connection: u64,
        bytes: Vec<u8>,
        room: Option<OwnedSemaphorePermit>,
    ) {
        let Some(link) = self.users.link(session, connection) else {
            return;
        };
        self.user.handle_sent(self.now(), session);
        match self.links.target(Owner::User, link) {
            Some(Target::Sctp(place)) if !bytes.is_empty() => {
                self.send(place, Packet::new(DATA_PPID, bytes.into()), room);
            }
            Some(Target::Stream(number)) => {
                if let Some(stream) = self.streams.get(&number) {
                    // If the stream has ended, an event reports it.
                    let _ = stream.send(Sent::Data(bytes.into(), room));
                }
            }
            Some(Target::Sctp(_) | Target::Own) | None => {}
        }
    }

    /// Signals the end of the data on a link. Returns true if the link's transport can express it.
    pub(super) fn finish_stream(&mut self, link: Link) -> bool {
        let Some(Target::Stream(number)) = self.links.target(Owner::User, link) else {
            return false;
        };
        let stream = self.streams.get(&number);
        stream.is_some_and(|stream| stream.send(Sent::Finish).is_ok())
    }

    /// Sends a program's message to a user.
    pub(super) fn send_to_user(
        &mut self,
        number: u64,
        session: u64,
        bytes: Vec<u8>,
        room: Option<OwnedSemaphorePermit>,
    ) {
        let link = Link::Theirs(session);
        let target = self.links.target(Owner::Service(number), link);
        if let Some(Target::Sctp(place)) = target.filter(|_| !bytes.is_empty()) {
            let now = self.now();
            if let Some(service) = self.service_of(number) {
                service.sessions.handle_said(now, link);
            }
            self.send(place, Packet::new(DATA_PPID, bytes.into()), room);
        }
    }

    /// Sends the session state of a user to that user, to keep (ASAP cookie).
    pub(super) fn give_state(&mut self, number: u64, session: u64, state: &[u8]) {
        if let Some(service) = self.service_of(number) {
            service.sessions.handle_state(Link::Theirs(session), state);
        }
        self.carry_out(Owner::Service(number));
    }

    /// Ends a user's session for a program.
    pub(super) fn close_user(&mut self, number: u64, session: u64) {
        self.end_user(number, Link::Theirs(session));
    }

    /// Ends a user's session after the data sent so far.
    pub(super) fn end_user(&mut self, number: u64, link: Link) {
        let target = self.links.target(Owner::Service(number), link);
        if let Some(Target::Sctp(place)) = target
            && let Some(endpoint) = self.endpoint(place.endpoint)
        {
            let _ = endpoint.shutdown(place.assoc);
        }
    }

    /// Handles a message that is not ASAP.
    pub(super) fn data_came(&mut self, place: Place, bytes: &Bytes) {
        let number = place.endpoint;
        if number != 0 && self.programs.queued(number) > WAITING_BYTES_MAX {
            tracing::warn!(element = number, "a user sends more than the program reads");
            return self.abort(place);
        }
        let owners = self.links.owners(place).to_vec();
        for (owner, link) in owners {
            for piece in bytes.chunks(DATA_BYTES_MAX) {
                self.data_for(owner, link, piece.to_vec());
            }
        }
    }

    fn data_for(&mut self, owner: Owner, link: Link, bytes: Vec<u8>) {
        match owner {
            Owner::User => {
                if let Some(session) = self.user.session_of(link) {
                    self.user.handle_heard(self.now(), session);
                    self.tell_user(session, SessionEvent::Data { bytes });
                }
            }
            Owner::Service(number) => {
                let now = self.now();
                if let Some(service) = self.service_of(number) {
                    service.sessions.handle_heard(now, link);
                }
                let session = session_number(link);
                let event = ElementEvent::Data { session, bytes };
                self.programs.tell(number, &FromPool::Element(event));
            }
            Owner::Element(_) => {}
        }
    }

    /// Opens the TCP connection or UDP socket of a session.
    pub(super) fn connect_stream(
        &mut self,
        owner: Owner,
        link: Link,
        kind: Kind,
        address: SocketAddr,
    ) {
        let program = self
            .user
            .session_of(link)
            .and_then(|id| self.users.program(id));
        let Some(gauge) = program.and_then(|program| self.programs.gauge(program)) else {
            // The program has ended, and its session will end soon; the element is not at fault.
            return self.inputs.push_back(Input::Ended(owner, link));
        };
        self.streams_made += 1;
        let number = self.streams_made;
        let (sender, sent) = mpsc::unbounded_channel();
        self.streams.insert(number, sender);
        self.links.attach_stream(owner, link, number);
        let ends = Ends {
            number,
            to: self.to_self.clone(),
            unread: gauge,
        };
        self.tasks.spawn(streams::run(ends, kind, address, sent));
    }

    /// Handles an event of a stream.
    pub(super) fn stream_said(&mut self, number: u64, event: StreamEvent) {
        match event {
            StreamEvent::Up => {
                if let Some((owner, link)) = self.links.stream_owner(number) {
                    self.inputs.push_back(Input::Connected(owner, link));
                }
            }
            StreamEvent::Data(bytes) => {
                if let Some((owner, link)) = self.links.stream_owner(number) {
                    self.data_for(owner, link, bytes);
                }
            }
            StreamEvent::Down { in_order } => {
                self.streams.remove(&number);
                if let Some((owner, link)) = self.links.stream_down(number) {
                    self.inputs.push_back(match in_order {
                        true => Input::Ended(owner, link),
                        false => Input::Lost(owner, link),
                    });
                }
            }
        }
    }
}
