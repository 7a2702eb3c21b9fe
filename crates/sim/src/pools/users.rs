//! Pool users: the state machine, and the source of its requests.

use super::associations::{Name, encoded};
use super::elements::Links;
use super::measure::Finished;
use super::node::{self, Node, Role};
use super::world::{Event, World};
use crate::time::Time;
use holdfast_proto::pool_user::{Config, Event as Told, Output, PoolUser};
use holdfast_proto::registrar::Protocol;
use holdfast_wire::rserpool::{ElementId, PoolElement};
use std::collections::VecDeque;
use std::time::Duration;

/// A message between users and elements.
#[derive(Debug, Clone, Copy)]
pub(super) enum Letter {
    Request {
        request: u32,
        size: f64,
    },
    Accepted {
        request: u32,
    },
    Done {
        request: u32,
    },
    /// The element is dead or unreachable.
    Lost {
        request: u32,
    },
    /// Asks an element for its load.
    Probe {
        id: ElementId,
        sent: Time,
        elements: u32,
    },
    /// Number of requests in progress, and their latency.
    Probed {
        id: ElementId,
        sent: Time,
        elements: u32,
        report: (u32, Duration),
    },
}

/// The request that a user waits for.
#[derive(Debug)]
struct Current {
    request: u32,
    size: f64,
    generated: Time,
    dequeued: Time,
    /// Time of the first acceptance.
    accepted: Option<Time>,
    element: Option<(Node, ElementId)>,
    sent: Time,
    attempts: u32,
}

#[derive(Debug)]
pub(super) struct UserNode {
    pub(super) machine: PoolUser,
    links: Links,
    pub(super) wake: Option<Time>,
    /// "The requests are queued and sequentially assigned to PEs" (paper 004 section 4).
    queue: VecDeque<(Time, f64)>,
    current: Option<Current>,
    requests: u32,
}

/// Delay before a user without an element asks again.
const PAUSE: Time = Time(500_000_000);

impl UserNode {
    /// Returns the time since which the user's request is in progress.
    pub(super) fn waits_since(&self) -> Option<Time> {
        self.current.as_ref().map(|current| current.dequeued)
    }
}

impl World<'_> {
    pub(super) fn new_user(&mut self, index: usize) -> UserNode {
        let hunt = self.hunt(self.nodes.user(index));
        let seed = self.random.seed();
        UserNode {
            machine: PoolUser::new(Config::new(hunt, seed)),
            links: Links::new(),
            wake: None,
            queue: VecDeque::new(),
            current: None,
            requests: 0,
        }
    }

    /// Generates a user's request, and schedules its next one.
    pub(super) fn generate(&mut self, index: usize) {
        let size = match self.requests.get(index) {
            Some((_, size)) => *size,
            None => self.random.exponential(self.config.workload.request_size),
        };
        self.users[index].queue.push_back((self.now, size));
        self.schedule_request(index);
        if self.users[index].current.is_none() {
            self.begin(index);
        }
    }

    pub(super) fn schedule_request(&mut self, index: usize) {
        let wait = match self.requests.get_mut(index) {
            Some((requests, next)) => {
                let (wait, size) = requests.draw();
                *next = size;
                wait
            }
            None => {
                let mean = self.config.workload.request_interval;
                Time::from_secs_f64(self.random.exponential(mean))
            }
        };
        let index = index as u32;
        self.queue.push(self.now + wait, Event::Generate { index });
    }

    fn begin(&mut self, index: usize) {
        let user = &mut self.users[index];
        let Some((generated, size)) = user.queue.pop_front() else {
            return;
        };
        user.requests += 1;
        user.current = Some(Current {
            request: user.requests,
            size,
            generated,
            dequeued: self.now,
            accepted: None,
            element: None,
            sent: self.now,
            attempts: 0,
        });
        match self.config.overhead {
            Time::ZERO => self.select(index),
            overhead => self.again_after(index, overhead),
        }
    }

    /// Asks the registrar for each request, without using cached elements, unless the user chooses for itself.
    pub(super) fn select(&mut self, index: usize) {
        let handle = self.handle.clone();
        let is_users = self.config.choice.is_users();
        self.user(index, |machine, now| {
            if is_users {
                machine.handle_resolve(now, handle);
                return;
            }
            machine.handle_purge(&handle);
            machine.handle_select(now, handle);
        });
    }

    /// Gives a user's state machine an input, and executes its outputs.
    #[inline]
    pub(super) fn user(&mut self, index: usize, input: impl FnOnce(&mut PoolUser, Duration)) {
        input(&mut self.users[index].machine, self.now.into());
        let node = self.nodes.user(index);
        while let Some(output) = self.users[index].machine.poll_output() {
            match output {
                Output::Connect { link, to } => {
                    let Some(to) = node::node_of(&to) else {
                        continue;
                    };
                    let association = self.connect(node, to, Protocol::Asap, Name::Link(link));
                    self.users[index].links.push((link, association));
                }
                Output::Close { link } => {
                    let links = &mut self.users[index].links;
                    if let Some(place) = links.iter().position(|(other, _)| *other == link) {
                        let (_, association) = links.swap_remove(place);
                        self.close(association, 0);
                    }
                }
                Output::Send { link, message } => {
                    let links = &self.users[index].links;
                    if let Some((_, association)) = links.iter().find(|(other, _)| *other == link) {
                        self.send(*association, 0, encoded(&message));
                    }
                }
                Output::Event(Told::Selected { element, .. }) => self.selected(index, &element),
                Output::Event(Told::Resolved { elements, .. }) => self.resolved(index, &elements),
                Output::Event(Told::Failed { .. }) => self.again_later(index),
                Output::Event(_) => {}
            }
        }
        let user = &mut self.users[index];
        let due = user.machine.poll_timeout();
        super::timers::rearm(&mut self.queue, node, &mut user.wake, due);
    }

    pub(super) fn again_later(&mut self, index: usize) {
        self.again_after(index, PAUSE);
    }

    fn again_after(&mut self, index: usize, wait: Time) {
        let at = self.now + wait;
        let index = index as u32;
        self.queue.push(at, Event::Again { index });
    }

    pub(super) fn selected(&mut self, index: usize, element: &PoolElement) {
        let node = self.nodes.user(index);
        let (Some(to), Some(current)) = (
            node::node_of(&element.user_transport),
            &mut self.users[index].current,
        ) else {
            return;
        };
        current.element = Some((to, element.id));
        current.attempts += 1;
        current.sent = self.now;
        let (request, size) = (current.request, current.size);
        let mut at = Some(self.now + self.config.delivery);
        for _ in 0..self.config.setup_round_trips {
            at = at
                .and_then(|at| self.way_at(at, node, to))
                .and_then(|at| self.way_at(at, to, node));
        }
        self.post_at(at, node, to, Letter::Request { request, size });
    }

    /// Sends a message; if it cannot be delivered, the user learns of it after a timeout.
    pub(super) fn post(&mut self, from: Node, to: Node, letter: Letter) {
        self.post_at(Some(self.now), from, to, letter);
    }

    fn post_at(&mut self, at: Option<Time>, from: Node, to: Node, letter: Letter) {
        let arrival = at.and_then(|at| self.way_at(at, from, to));
        if let Some(arrival) = arrival {
            let letter = Event::Letter { from, to, letter };
            return self.queue.push(arrival, letter);
        }
        let (Letter::Request { request, .. }
        | Letter::Accepted { request }
        | Letter::Done { request }
        | Letter::Lost { request }) = letter
        else {
            return;
        };
        let (user, element) = match letter {
            Letter::Request { .. } => (from, to),
            _ => (to, from),
        };
        let timeout = self.now + self.config.association_timeout.into();
        let letter = Letter::Lost { request };
        self.queue.push(
            timeout,
            Event::Letter {
                from: element,
                to: user,
                letter,
            },
        );
    }

    /// Handles the arrival of a message.
    pub(super) fn letter(&mut self, from: Node, to: Node, letter: Letter) {
        match (self.nodes.role(to), letter) {
            (Role::Element(index), Letter::Request { request, size }) => {
                self.requested(index, from, request, size);
            }
            (Role::Element(index), probe) => self.probed(index, from, probe),
            (Role::User(index), answer @ Letter::Probed { .. }) => {
                self.probe_answered(index, answer);
            }
            (Role::User(index), letter) => self.answered(index, from, letter),
            _ => {}
        }
    }

    fn answered(&mut self, index: usize, from: Node, letter: Letter) {
        let Some(current) = &mut self.users[index].current else {
            return;
        };
        let (Some((element, id)), asked) = (current.element, current.request) else {
            return;
        };
        if element != from {
            return;
        }
        match letter {
            Letter::Accepted { request } if request == asked => {
                current.accepted.get_or_insert(self.now);
            }
            Letter::Done { request } if request == asked => self.finished(index),
            Letter::Lost { request } if request == asked => {
                current.element = None;
                let sent = current.sent;
                self.learn(index, id, sent, false);
                let handle = self.handle.clone();
                self.user(index, |machine, now| {
                    machine.handle_unreachable(now, &handle, id)
                });
                self.select(index);
            }
            _ => {}
        }
    }

    fn finished(&mut self, index: usize) {
        let Some(current) = self.users[index].current.take() else {
            return;
        };
        let Some((element, id)) = current.element else {
            return;
        };
        self.learn(index, id, current.sent, true);
        let zone = self.nodes.zone(self.nodes.user(index));
        self.measure(&Finished {
            size: current.size,
            generated: current.generated,
            dequeued: current.dequeued,
            accepted: current.accepted.unwrap_or(self.now),
            ended: self.now,
            attempts: current.attempts,
            local: zone == self.nodes.zone(element),
        });
        self.begin(index);
    }
}
