//! Inputs and outputs of the machines.

use std::io;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::{LinkId, LinkOutput};
use holdfast_sctp::{ENCAPSULATION_PORT, MessageToSend as Packet};
use holdfast_wire::rserpool::asap::{self, Message};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport};

use super::event_loop::PoolEventLoop;
use super::links::{AssociationKey, DetachedLink, LinkOwner, LinkTarget};
use super::session_streams::StreamKind;
use crate::api_conversion::sctp_addresses;
use crate::sctp_addresses::data_transport;

/// An input for a machine.
#[derive(Debug)]
pub(super) enum MachineInput {
    Connected(LinkOwner, LinkId),
    Lost(LinkOwner, LinkId),
    /// The other side ended the link in order.
    Ended(LinkOwner, LinkId),
    Message(LinkOwner, LinkId, Message),
}

/// Maximum number of hosts with a remembered encapsulation.
const INSIDE_UDP_HOSTS_MAX: usize = 1024;

impl PoolEventLoop {
    /// Feeds all pending inputs to the machines and carries out their outputs.
    pub(super) fn process_inputs(&mut self) {
        while let Some(input) = self.inputs.pop_front() {
            let owner = match &input {
                MachineInput::Connected(owner, _) | MachineInput::Lost(owner, _) => *owner,
                MachineInput::Ended(owner, _) | MachineInput::Message(owner, ..) => *owner,
            };
            self.handle_input(input);
            self.execute_outputs(owner);
        }
    }

    fn handle_input(&mut self, input: MachineInput) {
        let now = self.now();
        match input {
            MachineInput::Connected(LinkOwner::User, link) => self.user.handle_connected(now, link),
            MachineInput::Lost(LinkOwner::User, link) => self.on_user_link_ended(link, false),
            MachineInput::Ended(LinkOwner::User, link) => self.on_user_link_ended(link, true),
            MachineInput::Message(LinkOwner::User, link, message) => {
                self.user.handle_message(now, link, message);
            }
            MachineInput::Connected(LinkOwner::Element(number), link) => {
                self.with_element(number, |machine| machine.handle_connected(now, link));
            }
            MachineInput::Lost(LinkOwner::Element(number), link)
            | MachineInput::Ended(LinkOwner::Element(number), link) => {
                self.with_element(number, |machine| machine.handle_lost(now, link));
            }
            MachineInput::Message(LinkOwner::Element(number), link, message) => {
                self.with_element(number, |machine| machine.handle_message(now, link, message));
            }
            MachineInput::Connected(LinkOwner::Service(_), _) => {}
            MachineInput::Lost(LinkOwner::Service(number), link)
            | MachineInput::Ended(LinkOwner::Service(number), link) => {
                self.on_session_lost(number, link)
            }
            MachineInput::Message(LinkOwner::Service(number), link, message) => {
                self.on_session_message(number, link, message);
            }
        }
    }

    /// Carries out the outputs of a machine.
    pub(super) fn execute_outputs(&mut self, owner: LinkOwner) {
        match owner {
            LinkOwner::User => {
                while let Some(output) = self.user.poll_output() {
                    if let Some(event) = self.carry_out_link_output(owner, output) {
                        self.on_user_event(event);
                    }
                }
                self.set_wake(owner, self.user.poll_timeout());
            }
            LinkOwner::Element(number) => {
                while let Some(element) = self.elements.get_mut(&number)
                    && let Some(output) = element.machine.poll_output()
                {
                    if let Some(event) = self.carry_out_link_output(owner, output) {
                        self.on_element_event(number, event);
                    }
                }
                self.index_element(number);
                let element = self.elements.get(&number);
                let due = element.and_then(|element| element.machine.poll_timeout());
                self.set_wake(owner, due);
            }
            LinkOwner::Service(number) => {
                while let Some(element) = self.elements.get_mut(&number)
                    && let Some(service) = &mut element.service
                    && let Some(output) = service.sessions.poll_output()
                {
                    if let Some(event) = self.carry_out_link_output(owner, output) {
                        self.on_service_event(number, event);
                    }
                }
            }
        }
    }

    fn carry_out_link_output<E>(&mut self, owner: LinkOwner, output: LinkOutput<E>) -> Option<E> {
        match output {
            LinkOutput::Connect { link, to } => self.connect(owner, link, &to),
            LinkOutput::Close { link } => self.close_link(owner, link),
            LinkOutput::Send { link, message } => self.send_control(owner, link, &message),
            LinkOutput::Event(event) => return Some(event),
        }
        None
    }

    fn set_wake(&mut self, owner: LinkOwner, due: Option<std::time::Duration>) {
        let before = match due {
            Some(due) => self.wake_time_of.insert(owner, due),
            None => self.wake_time_of.remove(&owner),
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
            self.wake_time_of.remove(&owner);
            match owner {
                LinkOwner::User => self.user.handle_timeout(now),
                LinkOwner::Element(number) => {
                    self.with_element(number, |machine| machine.handle_timeout(now));
                }
                LinkOwner::Service(_) => {}
            }
            self.execute_outputs(owner);
            self.process_inputs();
        }
    }

    /// Handles a registrar's announce.
    pub(super) fn on_announce(
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
        self.execute_outputs(LinkOwner::User);
        let numbers: Vec<u64> = self.elements.keys().copied().collect();
        for number in numbers {
            self.with_element(number, |machine| {
                machine.handle_announce(now, registrar, transports.clone(), source.clone());
            });
            self.execute_outputs(LinkOwner::Element(number));
        }
        self.process_inputs();
    }

    fn connect(&mut self, owner: LinkOwner, link: LinkId, to: &Transport) {
        let session = owner == LinkOwner::User && self.user.session_of(link).is_some();
        if session {
            self.users.set_transport(link, to.clone());
        }
        match to {
            Transport::Sctp(transport) => {
                self.connect_sctp(owner, link, sctp_addresses(transport), session);
            }
            Transport::Tcp { port, address, .. } if session => {
                self.connect_stream(
                    owner,
                    link,
                    StreamKind::Tcp,
                    SocketAddr::new(*address, *port),
                );
            }
            Transport::Tcp { port, address, .. } => {
                self.connect_registrar(owner, link, SocketAddr::new(*address, *port));
            }
            Transport::Udp { port, address } if session => {
                self.connect_stream(
                    owner,
                    link,
                    StreamKind::Udp,
                    SocketAddr::new(*address, *port),
                );
            }
            other => {
                tracing::debug!(?other, "unsupported transport");
                self.inputs.push_back(MachineInput::Lost(owner, link));
            }
        }
    }

    fn connect_sctp(
        &mut self,
        owner: LinkOwner,
        link: LinkId,
        addresses: Vec<SocketAddr>,
        session: bool,
    ) {
        if owner == LinkOwner::User && !session && self.is_own_endpoint(&addresses) {
            self.links.attach_local(owner, link);
            return self.inputs.push_back(MachineInput::Connected(owner, link));
        }
        // Two sessions need two associations; requests to a registrar, and probes, may share one.
        let existing = match session {
            true => None,
            false => self.links.find(&addresses),
        };
        if let Some((assoc_key, is_up)) = existing {
            self.links.attach(owner, link, assoc_key);
            if is_up {
                self.inputs.push_back(MachineInput::Connected(owner, link));
            }
            return;
        }
        let udp_port = self.udp_port_for(&addresses);
        let result = match session {
            true => self
                .own_endpoint
                .connect_from_new_port(&addresses, udp_port),
            false => self.own_endpoint.connect(&addresses, udp_port),
        };
        match result {
            Ok(assoc) => {
                let assoc_key = AssociationKey { endpoint: 0, assoc };
                self.links.add(assoc_key, addresses, !session);
                self.links.attach(owner, link, assoc_key);
            }
            Err(error) => {
                tracing::debug!(%error, ?addresses, "cannot connect");
                self.inputs.push_back(MachineInput::Lost(owner, link));
            }
        }
    }

    /// Connects to a registrar over TCP or TLS, only if configured and only with the configured transport.
    fn connect_registrar(&mut self, owner: LinkOwner, link: LinkId, address: SocketAddr) {
        if let Some((assoc_key, is_up)) = self.links.find_stream(address) {
            self.links.attach(owner, link, assoc_key);
            if is_up {
                self.inputs.push_back(MachineInput::Connected(owner, link));
            }
            return;
        }
        let mut registrars = self.config.registrars.iter();
        let registrar = registrars.find(|at| at.address == address && at.transport.is_some());
        let transport = registrar.and_then(|at| at.transport.clone());
        let transport = transport.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied));
        match transport.and_then(|transport| self.own_endpoint.connect_stream(address, &transport))
        {
            Ok(assoc) => {
                let assoc_key = AssociationKey { endpoint: 0, assoc };
                self.links.add(assoc_key, vec![address], true);
                self.links.attach(owner, link, assoc_key);
            }
            Err(error) => {
                tracing::debug!(%error, %address, "cannot connect");
                self.inputs.push_back(MachineInput::Lost(owner, link));
            }
        }
    }

    /// Returns the UDP port for reaching a host; `None`: directly over IP.
    fn udp_port_for(&self, addresses: &[SocketAddr]) -> Option<u16> {
        let (is_raw, own_port) = (
            self.own_endpoint.is_raw(),
            self.own_endpoint.encapsulation_port(),
        );
        if addresses.iter().any(|at| self.is_own_service(at)) {
            return own_port.filter(|_| !is_raw);
        }
        if let Some(port) = self.config.remote_encapsulation {
            return Some(port);
        }
        if !is_raw {
            return Some(ENCAPSULATION_PORT);
        }
        let inside_udp = self
            .next_inside_udp
            .get(addresses.first()?)
            .copied()
            .unwrap_or(false);
        (inside_udp && own_port.is_some()).then_some(ENCAPSULATION_PORT)
    }

    fn is_own_service(&self, address: &SocketAddr) -> bool {
        self.services.contains(address)
    }

    /// Remembers that a host did not answer: the next attempt uses the other way, directly over IP or inside UDP.
    pub(super) fn toggle_encapsulation(&mut self, assoc_key: AssociationKey) {
        if self.links.is_up(assoc_key) || assoc_key.endpoint != 0 || assoc_key.assoc.is_stream() {
            return;
        }
        if let Some(first) = self.links.addresses(assoc_key).first().copied() {
            if self.next_inside_udp.len() >= INSIDE_UDP_HOSTS_MAX {
                self.next_inside_udp.clear();
            }
            let inside_udp = self.next_inside_udp.entry(first).or_insert(false);
            *inside_udp = !*inside_udp;
        }
    }

    fn close_link(&mut self, owner: LinkOwner, link: LinkId) {
        if owner == LinkOwner::User {
            self.users.remove_link(link);
        }
        match self.links.detach(owner, link) {
            Some(DetachedLink::Stream(number)) => drop(self.streams.remove(&number)),
            Some(DetachedLink::LastOwner(assoc_key, true)) => {
                if let Some(endpoint) = self.endpoint(assoc_key.endpoint) {
                    let _ = endpoint.shutdown(assoc_key.assoc);
                }
            }
            Some(DetachedLink::LastOwner(assoc_key, false)) => {
                self.toggle_encapsulation(assoc_key);
                self.abort(assoc_key);
                // Not every stack reports an event for this.
                self.links.remove(assoc_key);
            }
            Some(DetachedLink::Shared) | None => {}
        }
    }

    fn send_control(&mut self, owner: LinkOwner, link: LinkId, message: &Message) {
        match (self.links.target(owner, link), message) {
            (Some(LinkTarget::Sctp(assoc_key)), _) => self.send_asap(assoc_key, message),
            (Some(LinkTarget::Local), Message::Probe { handle, id }) => {
                let answer = self.answer_to_probe(handle, *id);
                let input = answer.map(|answer| MachineInput::Message(owner, link, answer));
                self.inputs.extend(input);
            }
            _ => {}
        }
    }

    /// Sends an ASAP message.
    pub(super) fn send_asap(&mut self, assoc_key: AssociationKey, message: &Message) {
        let mut bytes = BytesMut::new();
        match message.encode(&mut bytes) {
            Ok(()) => self.send(assoc_key, Packet::new(asap::PPID, bytes.freeze()), None),
            Err(error) => tracing::error!(%error, name = message.name(), "cannot encode a message"),
        }
    }

    /// Handles a received ASAP message.
    pub(super) fn on_asap_message(&mut self, assoc_key: AssociationKey, bytes: &Bytes) {
        let message = match Message::parse(bytes) {
            Ok(parsed) => parsed.message,
            Err(error) => {
                tracing::debug!(?error, "received a malformed ASAP message");
                if self.probes.is_guest(assoc_key) {
                    self.abort(assoc_key);
                }
                return;
            }
        };
        if assoc_key.endpoint != 0 {
            let owner = LinkOwner::Service(assoc_key.endpoint);
            return self.deliver_to_owner(owner, assoc_key, message);
        }
        let is_guest = self.probes.is_guest(assoc_key);
        match &message {
            Message::Probe { handle, id } => self.on_probe(assoc_key, handle, *id),
            other if is_guest && !matches!(other, Message::ProbeAnswer { .. }) => {
                self.abort(assoc_key)
            }
            Message::RegistrationResponse { handle, id, .. }
            | Message::DeregistrationResponse { handle, id, .. } => {
                self.deliver_to_elements(assoc_key, handle, Some(*id), &message);
            }
            Message::EndpointKeepAlive { handle, id, .. } => {
                self.deliver_to_elements(assoc_key, handle, *id, &message);
            }
            _ => {
                for (owner, link) in self.links.owners(assoc_key).to_vec() {
                    let input = MachineInput::Message(owner, link, message.clone());
                    self.inputs.push_back(input);
                }
            }
        }
    }

    fn deliver_to_elements(
        &mut self,
        assoc_key: AssociationKey,
        handle: &PoolHandle,
        id: Option<ElementId>,
        message: &Message,
    ) {
        let numbers = self.element_index.find(handle, id);
        for number in numbers {
            self.deliver_to_owner(LinkOwner::Element(number), assoc_key, message.clone());
        }
    }

    fn deliver_to_owner(&mut self, owner: LinkOwner, assoc_key: AssociationKey, message: Message) {
        if let Some(link) = self.links.link_for(owner, assoc_key) {
            self.inputs
                .push_back(MachineInput::Message(owner, link, message));
        }
    }
}
