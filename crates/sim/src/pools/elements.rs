//! Pool elements: the state machine, and the service that it registers.

use super::associations::{Name, encoded};
use super::config::Choice;
use super::node::{self, Node};
use super::users::Letter;
use super::world::{Event, World};
use crate::server::Server;
use crate::time::Time;
use holdfast_proto::choice::Served;
use holdfast_proto::pool_element::{
    Config, Event as Told, HuntConfig, LifeUnit, Link, Output, PoolElement,
};
use holdfast_proto::registrar::Protocol;
use holdfast_wire::rserpool::Transport;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::time::Duration;

/// A request as an element identifies it: the user, and the user's request number.
pub(super) type Job = (Node, u32);

#[derive(Debug)]
pub(super) struct ElementNode {
    /// The state machine; none if the element is dead.
    pub(super) machine: Option<PoolElement>,
    pub(super) server: Server<Job>,
    /// Figures for answers to probes; below, the conditions at each request's arrival.
    pub(super) served: Served,
    met: BTreeMap<Job, (u32, Time)>,
    /// End of its next request, as queued.
    served_at: Option<Time>,
    pub(super) links: Links,
    pub(super) wake: Option<Time>,
}

/// The links that a state machine created.
pub(super) type Links = SmallVec<[(Link, u32); 2]>;

impl ElementNode {
    pub(super) fn new(capacity: f64) -> ElementNode {
        ElementNode {
            machine: None,
            server: Server::new(capacity),
            served: Served::default(),
            met: BTreeMap::new(),
            served_at: None,
            links: Links::new(),
            wake: None,
        }
    }
}

impl World<'_> {
    /// Starts or restarts an element, which registers with its zone's registrar, or with another if that is dead.
    pub(super) fn start_element(&mut self, index: usize) {
        if self.elements[index].machine.is_some() {
            return;
        }
        let node = self.nodes.element(index);
        let hunt = self.hunt(node);
        let policy = self.config.choice.policy(0.0);
        let seed = self.random.seed();
        let service = node::service(node);
        let mut config = Config::new(self.handle.clone(), service, policy, hunt, seed);
        config.life_unit = LifeUnit::Seconds;
        config.life = Some(self.config.life);
        config.life_margin = self.config.life / 2;
        config.update_interval = self.config.update_interval;
        self.elements[index].machine = Some(PoolElement::new(config));
        self.elements[index].wake = None;
        self.element(index, |machine, now| machine.handle_register(now));
    }

    /// Returns the settings for finding registrars: "PEs and PUs choose 'nearby' PRs" (paper 004 section 5.2).
    pub(super) fn hunt(&self, node: Node) -> HuntConfig {
        let near = u32::from(self.nodes.zone(node));
        let registrar = |node| Transport::Sctp(node::sctp(node, Protocol::Asap));
        let mut hunt = HuntConfig::new(vec![registrar(near)]);
        hunt.parallel = 1;
        hunt
    }

    /// Starts a regular deregistration; the element's requests are lost when it has left the pool.
    pub(super) fn stop_element(&mut self, index: usize) {
        self.element(index, |machine, now| machine.handle_deregister(now));
    }

    pub(super) fn kill_element(&mut self, index: usize) {
        let node = self.nodes.element(index);
        let element = &mut self.elements[index];
        if element.machine.take().is_none() {
            return;
        }
        element.wake = None;
        element.served_at = None;
        element.links.clear();
        (element.served, element.met) = Default::default();
        for (user, request) in element.server.clear(self.now) {
            self.post(node, user, Letter::Lost { request });
        }
        self.close_all(node);
    }

    /// Gives an element's state machine an input, and executes its outputs.
    #[inline]
    pub(super) fn element(&mut self, index: usize, input: impl FnOnce(&mut PoolElement, Duration)) {
        let now = self.now.into();
        let Some(machine) = &mut self.elements[index].machine else {
            return;
        };
        input(machine, now);
        let node = self.nodes.element(index);
        let mut left = false;
        while let Some(output) = self.elements[index]
            .machine
            .as_mut()
            .and_then(PoolElement::poll_output)
        {
            match output {
                Output::Connect { link, to } => {
                    let Some(to) = node::node_of(&to) else {
                        continue;
                    };
                    let association = self.connect(node, to, Protocol::Asap, Name::Link(link));
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
                        self.send(association, side, encoded(&message));
                    }
                }
                Output::Event(event) => left |= matches!(event, Told::Left(_)),
            }
        }
        let element = &mut self.elements[index];
        let due = element.machine.as_ref().and_then(PoolElement::poll_timeout);
        super::timers::rearm(&mut self.queue, node, &mut element.wake, due);
        if left {
            self.kill_element(index);
        }
    }

    /// Handles the arrival of a request.
    pub(super) fn requested(&mut self, index: usize, user: Node, request: u32, size: f64) {
        let node = self.nodes.element(index);
        if self.elements[index].machine.is_none() {
            return self.post(node, user, Letter::Lost { request });
        }
        let element = &mut self.elements[index];
        element.server.add(self.now, (user, request), size);
        if matches!(self.config.choice, Choice::Probes { .. }) {
            let met = element.served.begin();
            element.met.insert((user, request), (met, self.now));
        }
        self.post(node, user, Letter::Accepted { request });
        self.load_changed(index);
    }

    /// Handles the possible end of requests.
    pub(super) fn served(&mut self, index: usize, at: Time) -> bool {
        if self.elements[index].served_at != Some(at) {
            return false;
        }
        self.elements[index].served_at = None;
        let node = self.nodes.element(index);
        while let Some((user, request)) = self.elements[index].server.pop(self.now) {
            self.post(node, user, Letter::Done { request });
            let element = &mut self.elements[index];
            if let Some((met, since)) = element.met.remove(&(user, request)) {
                element.served.end(met, self.now.since(since).into());
            }
        }
        self.load_changed(index);
        true
    }

    /// Updates the load: "the current amount of simultaneously handled requests" (paper 004 section 6.1).
    fn load_changed(&mut self, index: usize) {
        let element = &mut self.elements[index];
        let next = element.server.next();
        if next != element.served_at {
            element.served_at = next;
            if let Some(at) = next {
                self.queue.push(
                    at,
                    Event::Served {
                        index: index as u32,
                        at,
                    },
                );
            }
        }
        let load = element.server.jobs() as f64 * self.config.load_per_request;
        let policy = self.config.choice.policy(load.min(1.0));
        self.element(index, |machine, now| {
            // The policy is of the registered kind, so it cannot be refused.
            let _ = machine.handle_policy(now, policy);
        });
    }
}

impl ElementNode {
    fn association(&self, link: Link) -> Option<(u32, u8)> {
        match link {
            Link::Theirs(number) => Some((number as u32, 1)),
            Link::Ours(_) => {
                let known = self.links.iter().find(|(other, _)| *other == link)?;
                Some((known.1, 0))
            }
        }
    }
}
