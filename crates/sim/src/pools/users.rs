//! Pool users: the state machine, and the source of its requests.

use super::associations::{InitiatorName, encode};
use super::elements::CreatedLinks;
use super::measurements::FinishedRequest;
use super::node_numbers::{self, NodeRole};
use super::world::{PoolWorld, PoolWorldEvent};
use crate::associations::{AssociationWorld, NodeNumber};
use crate::machine_timer::MachineTimer;
use crate::time::Time;
use holdfast_proto::pool_user::{Event as UserEvent, Output, PoolUser, PoolUserConfig};
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::{ElementId, PoolElement};
use std::collections::VecDeque;
use std::time::Duration;

/// A message between users and elements.
#[derive(Debug, Clone, Copy)]
pub(super) enum UserMessage {
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
    ProbeAnswer {
        id: ElementId,
        sent: Time,
        elements: u32,
        report: (u32, Duration),
    },
}

/// The request that a user waits for.
#[derive(Debug)]
struct CurrentRequest {
    request: u32,
    size: f64,
    generated: Time,
    dequeued: Time,
    /// Time of the first acceptance.
    accepted: Option<Time>,
    element: Option<(NodeNumber, ElementId)>,
    sent: Time,
    attempts: u32,
}

#[derive(Debug)]
pub(super) struct UserNode {
    pub(super) machine: PoolUser,
    links: CreatedLinks,
    pub(super) timer: MachineTimer,
    /// "The requests are queued and sequentially assigned to PEs" (paper 004 section 4).
    queue: VecDeque<(Time, f64)>,
    current: Option<CurrentRequest>,
    requests: u32,
}

/// Delay before a user without an element asks again.
const RETRY_PAUSE: Time = Time(500_000_000);

impl UserNode {
    /// Returns the time since which the user's request is in progress.
    pub(super) fn in_progress_since(&self) -> Option<Time> {
        self.current.as_ref().map(|current| current.dequeued)
    }
}

impl PoolWorld<'_> {
    pub(super) fn new_user(&mut self, index: usize) -> UserNode {
        let hunt = self.hunt_config(self.nodes.user(index));
        let seed = self.random.seed();
        UserNode {
            machine: PoolUser::new(PoolUserConfig::new(hunt, seed)),
            links: CreatedLinks::new(),
            timer: MachineTimer::default(),
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
            self.begin_request(index);
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
        self.queue
            .push(self.now + wait, PoolWorldEvent::Generate { index });
    }

    fn begin_request(&mut self, index: usize) {
        let user = &mut self.users[index];
        let Some((generated, size)) = user.queue.pop_front() else {
            return;
        };
        user.requests += 1;
        user.current = Some(CurrentRequest {
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
            Time::ZERO => self.select_element(index),
            overhead => self.retry_after(index, overhead),
        }
    }

    /// Asks the registrar for each request, without using cached elements, unless the user chooses for itself.
    pub(super) fn select_element(&mut self, index: usize) {
        let handle = self.handle.clone();
        let is_users = self.config.choice.is_made_by_users();
        self.drive_user(index, |machine, now| {
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
    pub(super) fn drive_user(&mut self, index: usize, input: impl FnOnce(&mut PoolUser, Duration)) {
        input(&mut self.users[index].machine, self.now.into());
        let node = self.nodes.user(index);
        while let Some(output) = self.users[index].machine.poll_output() {
            match output {
                Output::Connect { link, to } => {
                    let Some(to) = node_numbers::node_of(&to) else {
                        continue;
                    };
                    let association =
                        self.connect(node, to, PoolProtocol::Asap, InitiatorName::Link(link));
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
                        self.send(*association, 0, encode(&message));
                    }
                }
                Output::Event(UserEvent::Selected { element, .. }) => {
                    self.on_selected(index, &element)
                }
                Output::Event(UserEvent::Resolved { elements, .. }) => {
                    self.on_resolved(index, &elements)
                }
                Output::Event(UserEvent::RequestFailed { .. }) => self.retry_later(index),
                Output::Event(_) => {}
            }
        }
        self.arm_timer(NodeRole::User(index));
    }

    pub(super) fn retry_later(&mut self, index: usize) {
        self.retry_after(index, RETRY_PAUSE);
    }

    fn retry_after(&mut self, index: usize, wait: Time) {
        let at = self.now + wait;
        let index = index as u32;
        self.queue
            .push(at, PoolWorldEvent::RetrySelection { index });
    }

    pub(super) fn on_selected(&mut self, index: usize, element: &PoolElement) {
        let node = self.nodes.user(index);
        let (Some(to), Some(current)) = (
            node_numbers::node_of(&element.user_transport),
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
                .and_then(|at| self.arrival_of_request(at, node, to))
                .and_then(|at| self.arrival_of_request(at, to, node));
        }
        self.send_message_at(at, node, to, UserMessage::Request { request, size });
    }

    /// Sends a message; if it cannot be delivered, the user learns of it after a timeout.
    pub(super) fn send_message(&mut self, from: NodeNumber, to: NodeNumber, letter: UserMessage) {
        self.send_message_at(Some(self.now), from, to, letter);
    }

    fn send_message_at(
        &mut self,
        at: Option<Time>,
        from: NodeNumber,
        to: NodeNumber,
        letter: UserMessage,
    ) {
        let arrival = at.and_then(|at| self.arrival_of_request(at, from, to));
        if let Some(arrival) = arrival {
            let letter = PoolWorldEvent::UserMessage { from, to, letter };
            return self.queue.push(arrival, letter);
        }
        let (UserMessage::Request { request, .. }
        | UserMessage::Accepted { request }
        | UserMessage::Done { request }
        | UserMessage::Lost { request }) = letter
        else {
            return;
        };
        let (user, element) = match letter {
            UserMessage::Request { .. } => (from, to),
            _ => (to, from),
        };
        let timeout = self.now + self.config.association_timeout.into();
        let letter = UserMessage::Lost { request };
        self.queue.push(
            timeout,
            PoolWorldEvent::UserMessage {
                from: element,
                to: user,
                letter,
            },
        );
    }

    /// Handles the arrival of a message.
    pub(super) fn on_user_message(
        &mut self,
        from: NodeNumber,
        to: NodeNumber,
        letter: UserMessage,
    ) {
        match (self.nodes.role(to), letter) {
            (NodeRole::Element(index), UserMessage::Request { request, size }) => {
                self.on_request(index, from, request, size);
            }
            (NodeRole::Element(index), probe) => self.on_probe(index, from, probe),
            (NodeRole::User(index), answer @ UserMessage::ProbeAnswer { .. }) => {
                self.on_probe_answer(index, answer);
            }
            (NodeRole::User(index), letter) => self.on_answer(index, from, letter),
            _ => {}
        }
    }

    fn on_answer(&mut self, index: usize, from: NodeNumber, letter: UserMessage) {
        let Some(current) = &mut self.users[index].current else {
            return;
        };
        let (Some((element, id)), selected) = (current.element, current.request) else {
            return;
        };
        if element != from {
            return;
        }
        match letter {
            UserMessage::Accepted { request } if request == selected => {
                current.accepted.get_or_insert(self.now);
            }
            UserMessage::Done { request } if request == selected => self.on_finished(index),
            UserMessage::Lost { request } if request == selected => {
                current.element = None;
                let sent = current.sent;
                self.record_latency(index, id, sent, false);
                let handle = self.handle.clone();
                self.drive_user(index, |machine, now| {
                    machine.handle_unreachable(now, &handle, id)
                });
                self.select_element(index);
            }
            _ => {}
        }
    }

    fn on_finished(&mut self, index: usize) {
        let Some(current) = self.users[index].current.take() else {
            return;
        };
        let Some((element, id)) = current.element else {
            return;
        };
        self.record_latency(index, id, current.sent, true);
        let zone = self.nodes.zone(self.nodes.user(index));
        self.add_to_windows(&FinishedRequest {
            size: current.size,
            generated: current.generated,
            dequeued: current.dequeued,
            accepted: current.accepted.unwrap_or(self.now),
            ended: self.now,
            attempts: current.attempts,
            local: zone == self.nodes.zone(element),
        });
        self.begin_request(index);
    }
}
