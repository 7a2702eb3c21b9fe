//! Pool elements: the state machine, and the service that it registers.

use super::associations::{InitiatorName, encode};
use super::config::ElementChoice;
use super::node_numbers::{self, NodeRole};
use super::users::UserMessage;
use super::world::{PoolWorld, PoolWorldEvent};
use crate::associations::{AssociationNumber, AssociationSide, AssociationWorld, NodeNumber};
use crate::machine_timer::MachineTimer;
use crate::server_capacity::SharedCapacityServer;
use crate::time::Time;
use holdfast_proto::element_choice::ServerLoad;
use holdfast_proto::pool_element::{
    Event as ElementEvent, LifeUnit, LinkId, Output, PoolElement, PoolElementConfig,
    ServerHuntConfig,
};
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::Transport;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::time::Duration;

/// A request as an element identifies it: the user, and the user's request number.
pub(super) type ElementJob = (NodeNumber, u32);

#[derive(Debug)]
pub(super) struct ElementNode {
    /// The state machine; none if the element is dead.
    pub(super) machine: Option<PoolElement>,
    pub(super) server: SharedCapacityServer<ElementJob>,
    /// Figures for answers to probes; below, the conditions at each request's arrival.
    pub(super) served: ServerLoad,
    arrivals: BTreeMap<ElementJob, (u32, Time)>,
    /// End of its next request, as queued.
    next_end: Option<Time>,
    pub(super) links: CreatedLinks,
    pub(super) timer: MachineTimer,
}

/// The links that a state machine created.
pub(super) type CreatedLinks = SmallVec<[(LinkId, AssociationNumber); 2]>;

impl ElementNode {
    pub(super) fn new(capacity: f64) -> ElementNode {
        ElementNode {
            machine: None,
            server: SharedCapacityServer::new(capacity),
            served: ServerLoad::default(),
            arrivals: BTreeMap::new(),
            next_end: None,
            links: CreatedLinks::new(),
            timer: MachineTimer::default(),
        }
    }
}

impl PoolWorld<'_> {
    /// Starts or restarts an element, which registers with its zone's registrar, or with another if that is dead.
    pub(super) fn start_element(&mut self, index: usize) {
        if self.elements[index].machine.is_some() {
            return;
        }
        let node = self.nodes.element(index);
        let hunt = self.hunt_config(node);
        let policy = self.config.choice.policy(0.0);
        let seed = self.random.seed();
        let service = node_numbers::service_transport(node);
        let mut config = PoolElementConfig::new(self.handle.clone(), service, policy, hunt, seed);
        config.life_unit = LifeUnit::Seconds;
        config.life = Some(self.config.registration_life);
        config.life_margin = self.config.registration_life / 2;
        config.update_interval = self.config.update_interval;
        self.elements[index].machine = Some(PoolElement::new(config));
        self.elements[index].timer = MachineTimer::default();
        self.drive_element(index, |machine, now| machine.handle_register(now));
    }

    /// Returns the settings for finding registrars: "PEs and PUs choose 'nearby' PRs" (paper 004 section 5.2).
    pub(super) fn hunt_config(&self, node: NodeNumber) -> ServerHuntConfig {
        let nearest_first = u32::from(self.nodes.zone(node));
        let registrar =
            |node| Transport::Sctp(node_numbers::sctp_transport(node, PoolProtocol::Asap));
        let mut hunt = ServerHuntConfig::new(vec![registrar(nearest_first)]);
        hunt.parallel = 1;
        hunt
    }

    /// Starts a regular deregistration; the element's requests are lost when it has left the pool.
    pub(super) fn stop_element(&mut self, index: usize) {
        self.drive_element(index, |machine, now| machine.handle_deregister(now));
    }

    pub(super) fn kill_element(&mut self, index: usize) {
        let node = self.nodes.element(index);
        let element = &mut self.elements[index];
        if element.machine.take().is_none() {
            return;
        }
        element.timer = MachineTimer::default();
        element.next_end = None;
        element.links.clear();
        (element.served, element.arrivals) = Default::default();
        for (user, request) in element.server.clear(self.now) {
            self.send_message(node, user, UserMessage::Lost { request });
        }
        self.close_all(node, |_| Time::ZERO);
    }

    /// Gives an element's state machine an input, and executes its outputs.
    #[inline]
    pub(super) fn drive_element(
        &mut self,
        index: usize,
        input: impl FnOnce(&mut PoolElement, Duration),
    ) {
        let now = self.now.into();
        let Some(machine) = &mut self.elements[index].machine else {
            return;
        };
        input(machine, now);
        let node = self.nodes.element(index);
        let mut has_left = false;
        while let Some(output) = self.elements[index]
            .machine
            .as_mut()
            .and_then(PoolElement::poll_output)
        {
            match output {
                Output::Connect { link, to } => {
                    let Some(to) = node_numbers::node_of(&to) else {
                        continue;
                    };
                    let association =
                        self.connect(node, to, PoolProtocol::Asap, InitiatorName::Link(link));
                    self.elements[index].links.push((link, association));
                }
                Output::Close { link } => {
                    if let Some((association, side)) = self.elements[index].association(link) {
                        self.close(association, side);
                    }
                    self.elements[index]
                        .links
                        .retain(|(other, _)| *other != link);
                }
                Output::Send { link, message } => {
                    if let Some((association, side)) = self.elements[index].association(link) {
                        self.send(association, side, encode(&message));
                    }
                }
                Output::Event(event) => has_left |= matches!(event, ElementEvent::Deregistered(_)),
            }
        }
        self.arm_timer(NodeRole::Element(index));
        if has_left {
            self.kill_element(index);
        }
    }

    /// Handles the arrival of a request.
    pub(super) fn on_request(&mut self, index: usize, user: NodeNumber, request: u32, size: f64) {
        let node = self.nodes.element(index);
        if self.elements[index].machine.is_none() {
            return self.send_message(node, user, UserMessage::Lost { request });
        }
        let element = &mut self.elements[index];
        element.server.add(self.now, (user, request), size);
        if matches!(self.config.choice, ElementChoice::Probes { .. }) {
            let arrival = element.served.begin_request();
            element
                .arrivals
                .insert((user, request), (arrival, self.now));
        }
        self.send_message(node, user, UserMessage::Accepted { request });
        self.update_load(index);
    }

    /// Handles the possible end of requests.
    pub(super) fn on_request_end(&mut self, index: usize, at: Time) -> bool {
        if self.elements[index].next_end != Some(at) {
            return false;
        }
        self.elements[index].next_end = None;
        let node = self.nodes.element(index);
        while let Some((user, request)) = self.elements[index].server.pop(self.now) {
            self.send_message(node, user, UserMessage::Done { request });
            let element = &mut self.elements[index];
            if let Some((met, since)) = element.arrivals.remove(&(user, request)) {
                element
                    .served
                    .end_request(met, self.now.since(since).into());
            }
        }
        self.update_load(index);
        true
    }

    /// Updates the load: "the current amount of simultaneously handled requests" (paper 004 section 6.1).
    fn update_load(&mut self, index: usize) {
        let element = &mut self.elements[index];
        let next = element.server.next_end();
        if next != element.next_end {
            element.next_end = next;
            if let Some(at) = next {
                self.queue.push(
                    at,
                    PoolWorldEvent::RequestEnd {
                        index: index as u32,
                        at,
                    },
                );
            }
        }
        let load = element.server.jobs() as f64 * self.config.load_per_request;
        let policy = self.config.choice.policy(load.min(1.0));
        self.drive_element(index, |machine, now| {
            // The policy is of the registered kind, so it cannot be refused.
            let _ = machine.handle_policy(now, policy);
        });
    }
}

impl ElementNode {
    fn association(&self, link: LinkId) -> Option<(AssociationNumber, AssociationSide)> {
        match link {
            LinkId::Accepted(number) => Some((number as AssociationNumber, 1)),
            LinkId::Initiated(_) => {
                let link_entry = self.links.iter().find(|(other, _)| *other == link)?;
                Some((link_entry.1, 0))
            }
        }
    }
}
