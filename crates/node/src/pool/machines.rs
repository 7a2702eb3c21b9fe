//! Inputs and outputs of the machines.

use std::io;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::{Link, LinkOutput};
use holdfast_sys::transport::{ENCAPSULATION_PORT, Message as Packet};
use holdfast_wire::rserpool::asap::{self, Message};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport};

use super::event_loop::Daemon;
use super::links::{Detached, Owner, Place, Target};
use super::streams::Kind;
use crate::entries::sctp_addresses;
use crate::sctp::data_transport;

/// An input for a machine.
#[derive(Debug)]
pub(super) enum Input {
    Connected(Owner, Link),
    Lost(Owner, Link),
    /// The other side ended the link in order.
    Ended(Owner, Link),
    Message(Owner, Link, Message),
}

/// Maximum number of hosts with a remembered encapsulation.
const WAYS_MAX: usize = 1024;

impl Daemon {
    /// Feeds all pending inputs to the machines and carries out their outputs.
    pub(super) fn settle(&mut self) {
        while let Some(input) = self.inputs.pop_front() {
            let owner = match &input {
                Input::Connected(owner, _) | Input::Lost(owner, _) => *owner,
                Input::Ended(owner, _) | Input::Message(owner, ..) => *owner,
            };
            self.feed(input);
            self.carry_out(owner);
        }
    }

    fn feed(&mut self, input: Input) {
        let now = self.now();
        match input {
            Input::Connected(Owner::User, link) => self.user.handle_connected(now, link),
            Input::Lost(Owner::User, link) => self.user_lost(link, false),
            Input::Ended(Owner::User, link) => self.user_lost(link, true),
            Input::Message(Owner::User, link, message) => {
                self.user.handle_message(now, link, message);
            }
            Input::Connected(Owner::Element(number), link) => {
                self.with_machine(number, |machine| machine.handle_connected(now, link));
            }
            Input::Lost(Owner::Element(number), link)
            | Input::Ended(Owner::Element(number), link) => {
                self.with_machine(number, |machine| machine.handle_lost(now, link));
            }
            Input::Message(Owner::Element(number), link, message) => {
                self.with_machine(number, |machine| machine.handle_message(now, link, message));
            }
            Input::Connected(Owner::Service(_), _) => {}
            Input::Lost(Owner::Service(number), link)
            | Input::Ended(Owner::Service(number), link) => self.session_lost(number, link),
            Input::Message(Owner::Service(number), link, message) => {
                self.session_message(number, link, message);
            }
        }
    }

    /// Carries out the outputs of a machine.
    pub(super) fn carry_out(&mut self, owner: Owner) {
        match owner {
            Owner::User => {
                while let Some(output) = self.user.poll_output() {
                    if let Some(event) = self.do_link(owner, output) {
                        self.user_event(event);
                    }
                }
                self.set_wake(owner, self.user.poll_timeout());
            }
            Owner::Element(number) => {
                while let Some(element) = self.elements.get_mut(&number)
                    && let Some(output) = element.machine.poll_output()
                {
                    if let Some(event) = self.do_link(owner, output) {
                        self.element_event(number, event);
                    }
                }
                self.name_element(number);
                let element = self.elements.get(&number);
                let due = element.and_then(|element| element.machine.poll_timeout());
                self.set_wake(owner, due);
            }
            Owner::Service(number) => {
                while let Some(element) = self.elements.get_mut(&number)
                    && let Some(service) = &mut element.service
                    && let Some(output) = service.sessions.poll_output()
                {
                    if let Some(event) = self.do_link(owner, output) {
                        self.service_event(number, event);
                    }
                }
            }
        }
    }

    fn do_link<E>(&mut self, owner: Owner, output: LinkOutput<E>) -> Option<E> {
        match output {
            LinkOutput::Connect { link, to } => self.connect(owner, link, &to),
            LinkOutput::Close { link } => self.close(owner, link),
            LinkOutput::Send { link, message } => self.send_control(owner, link, &message),
            LinkOutput::Event(event) => return Some(event),
        }
        None
    }

    fn set_wake(&mut self, owner: Owner, due: Option<std::time::Duration>) {
        let before = match due {
            Some(due) => self.woken_at.insert(owner, due),
            None => self.woken_at.remove(&owner),
        };
        if let Some(before) = before {
            self.wakes.remove(&(before, owner));
        }
        if let Some(due) = due {
            self.wakes.insert((due, owner));
        }
    }

    /// Wakes the machines that are due.
    pub(super) fn wake_machines(&mut self) {
        let now = self.now();
        while let Some((due, owner)) = self.wakes.first().copied()
            && due <= now
        {
            self.wakes.pop_first();
            self.woken_at.remove(&owner);
            match owner {
                Owner::User => self.user.handle_timeout(now),
                Owner::Element(number) => {
                    self.with_machine(number, |machine| machine.handle_timeout(now));
                }
                Owner::Service(_) => {}
            }
            self.carry_out(owner);
            self.settle();
        }
    }

    /// Handles a registrar's announce.
    pub(super) fn announced(
        &mut self,
        source: SocketAddr,
        registrar: RegistrarId,
        transports: Vec<Transport>,
    ) {
        let now = self.now();
        let at = SocketAddr::new(source.ip(), asap::PORT);
        let source = Some(Transport::Sctp(data_transport(&[at])));
        self.user
            .handle_announce(now, registrar, transports.clone(), source.clone());
        self.carry_out(Owner::User);
        let numbers: Vec<u64> = self.elements.keys().copied().collect();
        for number in numbers {
            self.with_machine(number, |machine| {
                machine.handle_announce(now, registrar, transports.clone(), source.clone());
            });
            self.carry_out(Owner::Element(number));
        }
        self.settle();
    }

    fn connect(&mut self, owner: Owner, link: Link, to: &Transport) {
        let session = owner == Owner::User && self.user.session_of(link).is_some();
        if session {
            self.users.seeks(link, to.clone());
        }
        match to {
            Transport::Sctp(transport) => {
                self.connect_sctp(owner, link, sctp_addresses(transport), session);
            }
            Transport::Tcp { port, address, .. } if session => {
                self.connect_stream(owner, link, Kind::Tcp, SocketAddr::new(*address, *port));
            }
            Transport::Tcp { port, address, .. } => {
                self.connect_registrar(owner, link, SocketAddr::new(*address, *port));
            }
            Transport::Udp { port, address } if session => {
                self.connect_stream(owner, link, Kind::Udp, SocketAddr::new(*address, *port));
            }
            other => {
                tracing::debug!(?other, "a transport that is not spoken here");
                self.inputs.push_back(Input::Lost(owner, link));
            }
        }
    }

    fn connect_sctp(
        &mut self,
        owner: Owner,
        link: Link,
        addresses: Vec<SocketAddr>,
        session: bool,
    ) {
        if owner == Owner::User && !session && self.is_own(&addresses) {
            self.links.attach_own(owner, link);
            return self.inputs.push_back(Input::Connected(owner, link));
        }
        // Two sessions need two associations; requests to a registrar, and probes, may share one.
        let found = match session {
            true => None,
            false => self.links.find(&addresses),
        };
        if let Some((place, is_up)) = found {
            self.links.attach(owner, link, place);
            if is_up {
                self.inputs.push_back(Input::Connected(owner, link));
            }
            return;
        }
        let way = self.way(&addresses);
        let begun = match session {
            true => self.own.connect_apart(&addresses, way),
            false => self.own.connect(&addresses, way),
        };
        match begun {
            Ok(assoc) => {
                let place = Place { endpoint: 0, assoc };
                self.links.begun(place, addresses, !session);
                self.links.attach(owner, link, place);
            }
            Err(error) => {
                tracing::debug!(%error, ?addresses, "connecting");
                self.inputs.push_back(Input::Lost(owner, link));
            }
        }
    }

    /// Connects to a registrar over TCP or TLS, only if configured and only with the configured transport.
    fn connect_registrar(&mut self, owner: Owner, link: Link, address: SocketAddr) {
        if let Some((place, is_up)) = self.links.find_stream(address) {
            self.links.attach(owner, link, place);
            if is_up {
                self.inputs.push_back(Input::Connected(owner, link));
            }
            return;
        }
        let mut known = self.config.registrars.iter();
        let known = known.find(|at| at.address == address && at.over.is_some());
        let over = known.and_then(|at| at.over.clone());
        let over = over.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied));
        match over.and_then(|over| self.own.connect_stream(address, &over)) {
            Ok(assoc) => {
                let place = Place { endpoint: 0, assoc };
                self.links.begun(place, vec![address], true);
                self.links.attach(owner, link, place);
            }
            Err(error) => {
                tracing::debug!(%error, %address, "connecting");
                self.inputs.push_back(Input::Lost(owner, link));
            }
        }
    }

    /// Returns the UDP port for reaching a host; `None`: directly over IP.
    fn way(&self, addresses: &[SocketAddr]) -> Option<u16> {
        let (is_raw, own_port) = (self.own.is_raw(), self.own.encapsulation_port());
        if addresses.iter().any(|at| self.is_own_service(at)) {
            return own_port.filter(|_| !is_raw);
        }
        if let Some(port) = self.config.remote_encapsulation {
            return Some(port);
        }
        if !is_raw {
            return Some(ENCAPSULATION_PORT);
        }
        let inside_udp = self.ways.get(addresses.first()?).copied().unwrap_or(false);
        (inside_udp && own_port.is_some()).then_some(ENCAPSULATION_PORT)
    }

    fn is_own_service(&self, address: &SocketAddr) -> bool {
        self.services.contains(address)
    }

    /// Remembers that a host did not answer: the next attempt uses the other way, directly over IP or inside UDP.
    pub(super) fn remember_way(&mut self, place: Place) {
        if self.links.is_up(place) || place.endpoint != 0 || place.assoc.is_stream() {
            return;
        }
        if let Some(first) = self.links.addresses(place).first().copied() {
            if self.ways.len() >= WAYS_MAX {
                self.ways.clear();
            }
            let inside_udp = self.ways.entry(first).or_insert(false);
            *inside_udp = !*inside_udp;
        }
    }

    fn close(&mut self, owner: Owner, link: Link) {
        if owner == Owner::User {
            self.users.left(link);
        }
        match self.links.detach(owner, link) {
            Some(Detached::Stream(number)) => drop(self.streams.remove(&number)),
            Some(Detached::Last(place, true)) => {
                if let Some(endpoint) = self.endpoint(place.endpoint) {
                    let _ = endpoint.shutdown(place.assoc);
                }
            }
            Some(Detached::Last(place, false)) => {
                self.remember_way(place);
                self.abort(place);
                // Not every stack reports an event for this.
                self.links.down(place);
            }
            Some(Detached::Shared) | None => {}
        }
    }

    fn send_control(&mut self, owner: Owner, link: Link, message: &Message) {
        match (self.links.target(owner, link), message) {
            (Some(Target::Sctp(place)), _) => self.say(place, message),
            (Some(Target::Own), Message::Probe { handle, id }) => {
                let answer = self.answer_to_probe(handle, *id);
                let input = answer.map(|answer| Input::Message(owner, link, answer));
                self.inputs.extend(input);
            }
            _ => {}
        }
    }

    /// Sends an ASAP message.
    pub(super) fn say(&mut self, place: Place, message: &Message) {
        let mut bytes = BytesMut::new();
        match message.encode(&mut bytes) {
            Ok(()) => self.send(place, Packet::new(asap::PPID, bytes.freeze()), None),
            Err(error) => tracing::error!(%error, name = message.name(), "encoding"),
        }
    }

    /// Handles a received ASAP message.
    pub(super) fn control_came(&mut self, place: Place, bytes: &Bytes) {
        let message = match Message::parse(bytes) {
            Ok(parsed) => parsed.message,
            Err(error) => {
                tracing::debug!(?error, "a message that is none");
                if self.probes.is_guest(place) {
                    self.abort(place);
                }
                return;
            }
        };
        if place.endpoint != 0 {
            let owner = Owner::Service(place.endpoint);
            return self.for_owner(owner, place, message);
        }
        let is_guest = self.probes.is_guest(place);
        match &message {
            Message::Probe { handle, id } => self.probed(place, handle, *id),
            other if is_guest && !matches!(other, Message::ProbeAnswer { .. }) => self.abort(place),
            Message::RegistrationResponse { handle, id, .. }
            | Message::DeregistrationResponse { handle, id, .. } => {
                self.for_elements(place, handle, Some(*id), &message);
            }
            Message::EndpointKeepAlive { handle, id, .. } => {
                self.for_elements(place, handle, *id, &message);
            }
            _ => {
                for (owner, link) in self.links.owners(place).to_vec() {
                    let input = Input::Message(owner, link, message.clone());
                    self.inputs.push_back(input);
                }
            }
        }
    }

    fn for_elements(
        &mut self,
        place: Place,
        handle: &PoolHandle,
        id: Option<ElementId>,
        message: &Message,
    ) {
        let numbers = self.names.find(handle, id);
        for number in numbers {
            self.for_owner(Owner::Element(number), place, message.clone());
        }
    }

    fn for_owner(&mut self, owner: Owner, place: Place, message: Message) {
        if let Some(link) = self.links.name_for(owner, place) {
            self.inputs.push_back(Input::Message(owner, link, message));
        }
    }
}
