//! The world: nodes, the network between them, and the queue of events.

use super::associations::PoolAssociation;
use super::choosers::{UserChooser, choosers};
use super::config::{PoolAction, PoolRunConfig, RequestGenerator};
use super::elements::ElementNode;
use super::measurements::{FinishedRequest, MeasurementWindow, PoolRunOutcome};
use super::node_numbers::NodeNumbers;
use super::oracle::{CHECK_INTERVAL, Oracle};
use super::registrars::RegistrarNode;
use super::users::{UserMessage, UserNode};
use crate::Violation;
use crate::associations::{
    Association, AssociationEvent, AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use crate::event_queue::FutureEvents;
use crate::random::Random;
use crate::time::Time;
use crate::zone_network::{DelayDistribution, Network};
use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, PoolProtocol};
use holdfast_wire::rserpool::PoolHandle;
use std::collections::HashMap;

#[derive(Debug)]
pub(super) enum PoolWorldEvent {
    Association(AssociationEvent<Bytes>),
    UserMessage {
        from: NodeNumber,
        to: NodeNumber,
        letter: UserMessage,
    },
    /// A state machine's timer is due.
    Wake {
        node: NodeNumber,
        at: Time,
    },
    /// A request has ended, unless other requests have started or ended since.
    RequestEnd {
        index: u32,
        at: Time,
    },
    Generate {
        index: u32,
    },
    /// A user asks for an element again.
    RetrySelection {
        index: u32,
    },
    Aborted {
        association: AssociationNumber,
        side: AssociationSide,
    },
    /// A registrar measures the distance to the other end.
    Measure {
        association: AssociationNumber,
        side: AssociationSide,
    },
    DialFailed {
        index: usize,
        dial: DialId,
    },
    DialledAgain {
        index: usize,
        dial: DialId,
        protocol: PoolProtocol,
        id: AssociationId,
    },
    StartRegistrar {
        index: u32,
    },
    StartElement {
        index: u32,
    },
    Act(PoolAction),
    /// A window starts or ends.
    WindowEdge,
    /// The oracle checks the invariants.
    Check,
}

#[derive(Debug)]
pub(super) struct PoolWorld<'a> {
    pub(super) config: &'a PoolRunConfig,
    pub(super) now: Time,
    pub(super) queue: FutureEvents<PoolWorldEvent>,
    pub(super) random: Random,
    pub(super) network: Network,
    pub(super) has_variable_delays: bool,
    pub(super) nodes: NodeNumbers,
    pub(super) registrars: Vec<RegistrarNode>,
    pub(super) elements: Vec<ElementNode>,
    pub(super) users: Vec<UserNode>,
    /// Each user's requests, with the size of the next one, if the requests are given.
    pub(super) requests: Vec<(RequestGenerator, f64)>,
    pub(super) associations: Vec<Association<PoolAssociation, Bytes>>,
    /// The registrars' associations that are up, by both ends. Never iterated, because its order is random.
    pub(super) open_associations:
        HashMap<(NodeNumber, NodeNumber, PoolProtocol), (AssociationNumber, AssociationSide)>,
    /// The choosers of users that choose for themselves.
    pub(super) choosers: Vec<UserChooser>,
    pub(super) handle: PoolHandle,
    pub(super) oracle: Oracle,
    windows: Vec<(Time, Time, MeasurementWindow)>,
    events: u64,
    digest: u64,
}

/// Returns the requests of all users, if they are given.
fn requests(config: &PoolRunConfig) -> Vec<(RequestGenerator, f64)> {
    let Some(seed) = config.requests else {
        return Vec::new();
    };
    let zones = (0..).zip(&config.zones);
    let users = zones.flat_map(|(zone, of)| (0..of.users).map(move |user| (zone, user)));
    let requests_of = |(zone, user)| {
        (
            RequestGenerator::new(config.workload, seed, zone, user),
            0.0,
        )
    };
    users.map(requests_of).collect()
}

impl<'a> PoolWorld<'a> {
    pub(super) fn new(config: &'a PoolRunConfig, seed: u64) -> PoolWorld<'a> {
        let whole_run = (config.begin, config.begin + config.runtime);
        let mut windows: Vec<(Time, Time)> = config.windows.clone();
        for (from, to) in &mut windows {
            (*from, *to) = (*from + config.begin, *to + config.begin);
        }
        if windows.is_empty() {
            windows.push(whole_run);
        }
        let link = |from: u16, to: u16| config.links[usize::from(from)][usize::from(to)];
        let constant = |link: &crate::zone_network::LinkProperties| {
            matches!(link.delay, DelayDistribution::Constant(_))
        };
        let mut world = PoolWorld {
            now: Time::ZERO,
            queue: FutureEvents::default(),
            random: Random::new(seed),
            network: Network::new(config.zones.len(), link),
            has_variable_delays: !config.links.iter().flatten().all(constant),
            nodes: NodeNumbers::new(&config.zones),
            registrars: Vec::new(),
            elements: Vec::new(),
            users: Vec::new(),
            requests: requests(config),
            associations: Vec::new(),
            open_associations: HashMap::new(),
            choosers: choosers(config.choice, config.zones.len(), config.users() as usize),
            handle: PoolHandle::from("pool"),
            windows: windows
                .into_iter()
                .map(|(a, b)| (a, b, MeasurementWindow::default()))
                .collect(),
            oracle: Oracle::default(),
            events: 0,
            digest: 0,
            config,
        };
        world.populate();
        world
    }

    /// Starts registrars in sequence, then elements; users start at `begin`.
    fn populate(&mut self) {
        let zones = self.config.zones.len();
        for index in 0..zones as u32 {
            self.registrars.push(RegistrarNode::default());
            let at = Time::from_secs_f64(2.0 * f64::from(index) / zones as f64);
            self.queue
                .push(at, PoolWorldEvent::StartRegistrar { index });
        }
        let half = self.config.begin.as_secs_f64() / 2.0;
        for ZoneLayout {
            first,
            count,
            initial_elements: at_first,
        } in self.zone_layouts()
        {
            for element in 0..count {
                let capacity = self.config.capacity(first + element);
                self.elements.push(ElementNode::new(capacity));
                if element < at_first {
                    let at = Time::from_secs_f64(half * (1.0 + self.random.fraction() / 2.0));
                    let index = first + element;
                    self.queue.push(at, PoolWorldEvent::StartElement { index });
                }
            }
        }
        let users = self.config.users();
        self.now = self.config.begin;
        for index in 0..users as usize {
            let user = self.new_user(index);
            self.users.push(user);
            self.schedule_request(index);
        }
        self.now = Time::ZERO;
        self.schedule_plan();
    }

    /// Queues the planned actions, windows and checks.
    fn schedule_plan(&mut self) {
        for (at, action) in &self.config.plan {
            self.queue
                .push(self.config.begin + *at, PoolWorldEvent::Act(*action));
        }
        for (from, to, _) in &self.windows {
            self.queue.push(*from, PoolWorldEvent::WindowEdge);
            self.queue.push(*to, PoolWorldEvent::WindowEdge);
        }
        if self.config.invariants.is_some() {
            self.queue.push(self.config.begin, PoolWorldEvent::Check);
        }
    }

    fn zone_layouts(&self) -> Vec<ZoneLayout> {
        let mut first = 0;
        let zones = self.config.zones.iter().enumerate();
        zones
            .map(|(index, zone)| {
                let at_first = self.config.initial_elements.as_ref();
                let zoned = ZoneLayout {
                    first,
                    count: zone.elements,
                    initial_elements: at_first.map_or(zone.elements, |at_first| at_first[index]),
                };
                first += zone.elements;
                zoned
            })
            .collect()
    }

    pub(super) fn run(mut self) -> (PoolRunOutcome, Option<Violation>) {
        let end = self.config.begin + self.config.runtime;
        while let Some((at, event)) = self.queue.pop_until(end) {
            self.now = at;
            self.handle_event(event);
            if self.oracle.violation.is_some() {
                break;
            }
        }
        let outcome = PoolRunOutcome {
            windows: self
                .windows
                .into_iter()
                .map(|(_, _, window)| window)
                .collect(),
            events: self.events,
            simulated_s: end.as_secs_f64(),
            digest: self.digest,
        };
        (outcome, self.oracle.violation)
    }

    #[inline]
    fn handle_event(&mut self, event: PoolWorldEvent) {
        let counts = match event {
            PoolWorldEvent::Association(event) => {
                let counts = matches!(event, AssociationEvent::Deliver { .. });
                self.handle_association_event(event);
                counts
            }
            PoolWorldEvent::UserMessage { from, to, letter } => {
                self.on_user_message(from, to, letter);
                true
            }
            PoolWorldEvent::Wake { node, at } => self.fire_timer(node, at),
            PoolWorldEvent::RequestEnd { index, at } => self.on_request_end(index as usize, at),
            PoolWorldEvent::Generate { index } => {
                self.generate(index as usize);
                true
            }
            PoolWorldEvent::RetrySelection { index } => {
                self.select_element(index as usize);
                true
            }
            other => {
                self.handle_rare(other);
                false
            }
        };
        if counts {
            self.events += 1;
            let mixed = self.digest.rotate_left(5) ^ self.now.0;
            self.digest = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    fn handle_rare(&mut self, event: PoolWorldEvent) {
        match event {
            PoolWorldEvent::Aborted { association, side } => self.on_abort(association, side),
            PoolWorldEvent::Measure { association, side } => {
                self.report_round_trip(association, side)
            }
            PoolWorldEvent::DialFailed { index, dial } => {
                self.drive_registrar(index, |machine, now| machine.handle_dial_failed(now, dial));
            }
            PoolWorldEvent::DialledAgain {
                index,
                dial,
                protocol,
                id,
            } => {
                self.drive_registrar(index, |machine, now| {
                    machine.handle_association_up(now, id, protocol, &[], Some(dial))
                });
            }
            PoolWorldEvent::StartRegistrar { index } => self.start_registrar(index as usize),
            PoolWorldEvent::StartElement { index } => self.start_element(index as usize),
            PoolWorldEvent::Act(action) => self.execute_planned_action(action),
            PoolWorldEvent::WindowEdge => self.measure_windows(),
            PoolWorldEvent::Check => {
                if let Some(demands) = self.config.invariants {
                    self.check(demands);
                    self.queue
                        .push(self.now + CHECK_INTERVAL, PoolWorldEvent::Check);
                }
            }
            _ => {}
        }
    }

    pub(super) fn add_to_windows(&mut self, request: &FinishedRequest) {
        for (from, to, window) in &mut self.windows {
            if (*from..*to).contains(&self.now) {
                window.add(request);
            }
        }
    }

    /// Measures the elements' work at a window's start and end.
    fn measure_windows(&mut self) {
        let mut done = 0.0;
        let mut capacity = 0.0;
        for element in &mut self.elements {
            done += element.server.work_done(self.now);
            if element.machine.is_some() {
                capacity += element.server.capacity();
            }
        }
        for (from, to, window) in &mut self.windows {
            if *from == self.now {
                window.calculated -= done;
            }
            if *to == self.now {
                window.calculated += done;
                window.capacity = capacity * (*to - *from).as_secs_f64();
            }
        }
    }
}

struct ZoneLayout {
    first: u32,
    count: u32,
    initial_elements: u32,
}
