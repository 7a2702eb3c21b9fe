//! Inputs and outputs of the machines.

use std::net::SocketAddr;

use bytes::Bytes;
use holdfast_proto::pool_element::{LinkId, LinkOutput};
use holdfast_wire::rserpool::asap::{self, Message};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport};

use super::event_loop::PoolEventLoop;
use super::hosted_elements::on_session_event;
use super::links::{AssociationKey, DetachedLink, LinkOwner, LinkTarget, MachineInput};
use super::session_streams::StreamKind;
use crate::api_conversion::sctp_addresses;
use crate::sctp_addresses::data_transport;

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
            MachineInput::Connected(LinkOwner::User, link) => {
                self.users.machine_mut().handle_connected(now, link);
            }
            MachineInput::Lost(LinkOwner::User, link) => {
                self.users
                    .on_link_ended(now, link, false, &mut self.programs);
            }
            MachineInput::Ended(LinkOwner::User, link) => {
                self.users
                    .on_link_ended(now, link, true, &mut self.programs);
            }
            MachineInput::Message(LinkOwner::User, link, message) => {
                self.users.machine_mut().handle_message(now, link, message);
            }
            MachineInput::Connected(LinkOwner::Element(number), link) => {
                self.elements
                    .with_machine(number, |machine| machine.handle_connected(now, link));
            }
            MachineInput::Lost(LinkOwner::Element(number), link)
            | MachineInput::Ended(LinkOwner::Element(number), link) => {
                self.elements
                    .with_machine(number, |machine| machine.handle_lost(now, link));
            }
            MachineInput::Message(LinkOwner::Element(number), link, message) => {
                self.elements
                    .with_machine(number, |machine| machine.handle_message(now, link, message));
            }
            MachineInput::Connected(LinkOwner::ElementUsers(_), _) => {}
            MachineInput::Lost(LinkOwner::ElementUsers(number), link)
            | MachineInput::Ended(LinkOwner::ElementUsers(number), link) => {
                self.elements.on_user_lost(number, link, &mut self.programs);
            }
            MachineInput::Message(LinkOwner::ElementUsers(number), link, message) => {
                if let Some(service) = self.elements.service_mut(number) {
                    service.sessions.handle_message(link, message);
                }
            }
        }
    }

    /// Carries out the outputs of a machine.
    pub(super) fn execute_outputs(&mut self, owner: LinkOwner) {
        match owner {
            LinkOwner::User => {
                while let Some(output) = self.users.machine_mut().poll_output() {
                    if let Some(event) = self.carry_out_link_output(owner, output) {
                        self.users.on_event(event, &mut self.programs);
                    }
                }
                self.timers.set(owner, self.users.machine().poll_timeout());
            }
            LinkOwner::Element(number) => {
                while let Some(element) = self.elements.get_mut(number)
                    && let Some(output) = element.machine.poll_output()
                {
                    if let Some(event) = self.carry_out_link_output(owner, output)
                        && !self.elements.on_event(number, event, &mut self.programs)
                    {
                        self.on_element_ended(number);
                    }
                }
                self.elements.update_index(number);
                let element = self.elements.get(number);
                let due = element.and_then(|element| element.machine.poll_timeout());
                self.timers.set(owner, due);
            }
            LinkOwner::ElementUsers(number) => {
                while let Some(service) = self.elements.service_mut(number)
                    && let Some(output) = service.sessions.poll_output()
                {
                    if let Some(event) = self.carry_out_link_output(owner, output) {
                        on_session_event(number, event, &mut self.programs);
                    }
                }
            }
        }
    }

    /// Ends the associations of an element that has been removed, since its endpoint reports no more of their events.
    fn on_element_ended(&mut self, number: u64) {
        self.endpoints.close_service(number);
        for assoc_key in self.links.of_endpoint(number) {
            self.endpoints.forget_stalled(assoc_key);
            self.links.remove(assoc_key);
        }
    }

    /// Handles a new association of a user with an element.
    pub(super) fn on_user_association(&mut self, assoc_key: AssociationKey, from: Vec<SocketAddr>) {
        let number = assoc_key.endpoint;
        let owner = LinkOwner::ElementUsers(number);
        let Some(link) = self.links.link_for(owner, assoc_key) else {
            return;
        };
        let is_admitted = self
            .elements
            .on_user_connected(number, link, from, &mut self.programs);
        if !is_admitted {
            return self.endpoints.abort(assoc_key);
        }
        self.execute_outputs(owner);
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

    /// Wakes the machines that are due.
    pub(super) fn wake_machines(&mut self) {
        let now = self.now();
        while let Some(owner) = self.timers.pop_due(now) {
            match owner {
                LinkOwner::User => self.users.machine_mut().handle_timeout(now),
                LinkOwner::Element(number) => {
                    self.elements
                        .with_machine(number, |machine| machine.handle_timeout(now));
                }
                LinkOwner::ElementUsers(_) => {}
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
        self.users.machine_mut().handle_announce(
            now,
            registrar,
            transports.clone(),
            source.clone(),
        );
        self.execute_outputs(LinkOwner::User);
        for number in self.elements.numbers() {
            self.elements.with_machine(number, |machine| {
                machine.handle_announce(now, registrar, transports.clone(), source.clone());
            });
            self.execute_outputs(LinkOwner::Element(number));
        }
        self.process_inputs();
    }

    fn connect(&mut self, owner: LinkOwner, link: LinkId, to: &Transport) {
        let session = owner == LinkOwner::User && self.users.machine().session_of(link).is_some();
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
        if owner == LinkOwner::User && !session && self.endpoints.is_own(&addresses) {
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
        match self.endpoints.connect(&self.config, &addresses, session) {
            Ok(assoc_key) => {
                self.links.add(assoc_key, addresses, !session);
                self.links.attach(owner, link, assoc_key);
            }
            Err(error) => {
                tracing::debug!(%error, ?addresses, "cannot connect");
                self.inputs.push_back(MachineInput::Lost(owner, link));
            }
        }
    }

    /// Connects to a registrar over TCP or TLS.
    fn connect_registrar(&mut self, owner: LinkOwner, link: LinkId, address: SocketAddr) {
        if let Some((assoc_key, is_up)) = self.links.find_stream(address) {
            self.links.attach(owner, link, assoc_key);
            if is_up {
                self.inputs.push_back(MachineInput::Connected(owner, link));
            }
            return;
        }
        match self.endpoints.connect_registrar(&self.config, address) {
            Ok(assoc_key) => {
                self.links.add(assoc_key, vec![address], true);
                self.links.attach(owner, link, assoc_key);
            }
            Err(error) => {
                tracing::debug!(%error, %address, "cannot connect");
                self.inputs.push_back(MachineInput::Lost(owner, link));
            }
        }
    }

    fn close_link(&mut self, owner: LinkOwner, link: LinkId) {
        if owner == LinkOwner::User {
            self.users.remove_link(link);
        }
        match self.links.detach(owner, link) {
            Some(DetachedLink::Stream(number)) => self.streams.close(number),
            Some(DetachedLink::LastOwner(assoc_key, true)) => self.endpoints.shutdown(assoc_key),
            Some(DetachedLink::LastOwner(assoc_key, false)) => {
                self.endpoints.toggle_encapsulation(&self.links, assoc_key);
                self.endpoints.abort(assoc_key);
                // Not every stack reports an event for this.
                self.links.remove(assoc_key);
            }
            Some(DetachedLink::Shared) | None => {}
        }
    }

    fn send_control(&mut self, owner: LinkOwner, link: LinkId, message: &Message) {
        match (self.links.target(owner, link), message) {
            (Some(LinkTarget::Association(assoc_key)), _) => {
                self.endpoints
                    .send_asap(&mut self.links, assoc_key, message);
            }
            (Some(LinkTarget::Local), Message::Probe { handle, id }) => {
                let answer = self
                    .probes
                    .answer(self.started, &self.elements, handle, *id);
                let input = answer.map(|answer| MachineInput::Message(owner, link, answer));
                self.inputs.extend(input);
            }
            _ => {}
        }
    }

    /// Handles a received ASAP message.
    pub(super) fn on_asap_message(&mut self, assoc_key: AssociationKey, bytes: &Bytes) {
        let message = match Message::parse(bytes) {
            Ok(parsed) => parsed.message,
            Err(error) => {
                tracing::debug!(?error, "received a malformed ASAP message");
                if self.probes.is_guest(assoc_key) {
                    self.endpoints.abort(assoc_key);
                }
                return;
            }
        };
        if assoc_key.endpoint != 0 {
            let owner = LinkOwner::ElementUsers(assoc_key.endpoint);
            return self.deliver_to_owner(owner, assoc_key, message);
        }
        let is_guest = self.probes.is_guest(assoc_key);
        match &message {
            Message::Probe { handle, id } => self.on_probe(assoc_key, handle, *id),
            other if is_guest && !matches!(other, Message::ProbeAnswer { .. }) => {
                self.endpoints.abort(assoc_key)
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
        let numbers = self.elements.find(handle, id);
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
