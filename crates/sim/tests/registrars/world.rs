//! The world: registrars, elements, the network between them, and the queue of events.

use crate::element::Element;
use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{
    DialId, Event, PermittedHosts, PoolProtocol, Registrar, RegistrarMachineConfig,
    RegistrarSettings,
};
use holdfast_sim::associations::{
    Association, AssociationEvent, AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use holdfast_sim::pools::PoolBug;
use holdfast_sim::pools::node_numbers::{self, NodeNumbers, NodeRole};
use holdfast_sim::{FutureEvents, MachineTimer, Random, Time};
use holdfast_wire::rserpool::{RegistrarId, asap};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest time for which, without failures, two registrars may both claim an element, or a live element may be missing
/// from a view. In this time a heartbeat shows that views differ, a table is requested, the element is probed, and its
/// next registration is due. The time covers two heartbeats and two registrations, since the first of each may just
/// have passed.
pub const CONVERGENCE_BOUND: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub enum WorldEvent {
    Association(AssociationEvent<Bytes>),
    Crash {
        registrar: usize,
    },
    Boot {
        registrar: usize,
    },
    Cut {
        a: NodeNumber,
        b: NodeNumber,
    },
    Restore {
        a: NodeNumber,
        b: NodeNumber,
    },
    /// This end gives up an association if it is still cut.
    GiveUp {
        association: AssociationNumber,
        side: AssociationSide,
    },
    Kill {
        element: usize,
    },
    StartElement {
        element: usize,
    },
    Deregister {
        element: usize,
    },
    DialledAgain {
        registrar: usize,
        boot: u64,
        dial: DialId,
        association: AssociationNumber,
    },
    Datagram {
        to: usize,
        from: NodeNumber,
        protocol: PoolProtocol,
        message: Bytes,
    },
    Wake {
        registrar: usize,
        at: Time,
    },
    ElementWake {
        element: usize,
    },
    CheckInvariants,
}

impl From<AssociationEvent<Bytes>> for WorldEvent {
    fn from(event: AssociationEvent<Bytes>) -> WorldEvent {
        WorldEvent::Association(event)
    }
}

/// Data that the world keeps with each association.
pub struct PoolAssociation {
    pub protocol: PoolProtocol,
    /// The dial of the registrar that started the association, and the registrar's life.
    pub dial: Option<(DialId, u64)>,
    /// True for each end that has sent a presence.
    pub sent_presence: [bool; 2],
}

#[derive(Default, Debug)]
pub struct EventTally {
    pub counts: BTreeMap<String, u64>,
}

impl EventTally {
    pub fn count(&mut self, name: impl Into<String>) {
        *self.counts.entry(name.into()).or_default() += 1;
    }

    pub fn add(&mut self, other: &EventTally) {
        for (name, count) in &other.counts {
            *self.counts.entry(name.clone()).or_default() += count;
        }
    }
}

pub struct RegistrarNode {
    pub machine: Option<Registrar>,
    /// Number of starts.
    pub boot: u64,
    timer: MachineTimer,
}

pub struct World {
    pub random: Random,
    /// True if the network is slow at times, and messages are lost and repeated.
    pub loses_messages: bool,
    /// True if each end's first presence on an association is lost.
    pub loses_first_presence: bool,
    pub numbers: NodeNumbers,
    pub registrars: Vec<RegistrarNode>,
    pub elements: Vec<Element>,
    pub associations: Vec<Association<PoolAssociation, Bytes>>,
    /// Pairs of nodes between which no packet arrives, the lower number first.
    pub cut_pairs: BTreeSet<(NodeNumber, NodeNumber)>,
    pub tally: EventTally,
    pub now: Duration,
    /// Time of the last failure or recovery.
    pub last_fault: Duration,
    /// Time since which an element has been in a wrong state.
    pub inconsistent_since: BTreeMap<usize, Duration>,
    pub queue: FutureEvents<WorldEvent>,
    pub bug: Option<PoolBug>,
    multicast: bool,
    trace: bool,
}

impl World {
    /// Returns a world with a random number of nodes.
    pub fn new(seed: u64, bug: Option<PoolBug>) -> World {
        let mut random = Random::new(seed);
        let registrars = random.between(2, 6) as usize;
        let elements = random.between(1, 25) as usize;
        let multicast = random.chance(0.3);
        World {
            bug,
            ..World::with_nodes(random.number(), registrars, elements, multicast)
        }
    }

    /// Returns a world with this number of nodes, in which registrars find each other by multicast or by their
    /// configured addresses.
    pub fn with_nodes(seed: u64, registrars: usize, elements: usize, multicast: bool) -> World {
        let numbers = NodeNumbers::in_one_zone(registrars, elements, 0);
        let registrar = |_| RegistrarNode {
            machine: None,
            boot: 0,
            timer: MachineTimer::default(),
        };
        let element = |index| Element::new(numbers.element(index), index);
        let mut world = World {
            random: Random::new(seed),
            loses_messages: false,
            loses_first_presence: false,
            registrars: (0..registrars).map(registrar).collect(),
            elements: (0..elements).map(element).collect(),
            numbers,
            associations: Vec::new(),
            cut_pairs: BTreeSet::new(),
            tally: EventTally::default(),
            now: Duration::ZERO,
            last_fault: Duration::from_secs(3),
            inconsistent_since: BTreeMap::new(),
            queue: FutureEvents::default(),
            bug: None,
            multicast,
            trace: std::env::var("HOLDFAST_TRACE").is_ok(),
        };
        for registrar in 0..registrars {
            let at = Duration::from_micros(world.random.between(0, 500_000));
            world.schedule(at, WorldEvent::Boot { registrar });
        }
        for element in 0..elements {
            let at = Duration::from_micros(world.random.between(0, 2_000_000));
            world.schedule(at, WorldEvent::ElementWake { element });
        }
        world.schedule(Duration::from_secs(3), WorldEvent::CheckInvariants);
        world
    }

    pub fn schedule(&mut self, after: Duration, event: WorldEvent) {
        self.queue.push((self.now + after).into(), event);
    }

    pub fn association(&self, number: AssociationNumber) -> &Association<PoolAssociation, Bytes> {
        &self.associations[number as usize]
    }

    pub fn is_cut(&self, a: NodeNumber, b: NodeNumber) -> bool {
        self.cut_pairs.contains(&(a.min(b), a.max(b)))
    }

    pub fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while let Some((at, event)) = self.queue.pop_until(end.into()) {
            self.now = at.into();
            if self.trace && !matches!(event, WorldEvent::Wake { .. } | WorldEvent::CheckInvariants)
            {
                println!("{:?} {event:?}", self.now);
            }
            self.step(event);
        }
        self.now = end;
    }

    /// Ends all faults: lost messages, cut pairs, dead registrars, and some of the dead elements.
    pub fn end_faults(&mut self) {
        self.loses_messages = false;
        self.cut_pairs.clear();
        self.send_queued();
        for registrar in 0..self.registrars.len() {
            self.schedule(Duration::ZERO, WorldEvent::Boot { registrar });
        }
        // Some of the dead elements stay dead.
        for element in 0..self.elements.len() {
            if self.random.chance(0.6) {
                self.schedule(Duration::ZERO, WorldEvent::StartElement { element });
            }
        }
        self.last_fault = self.now;
    }

    fn step(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Association(event) => self.handle_association_event(event),
            WorldEvent::Crash { registrar } => self.crash_registrar(registrar),
            WorldEvent::Boot { registrar } => self.boot_registrar(registrar),
            WorldEvent::Cut { a, b } if a != b => self.cut(a, b),
            WorldEvent::Cut { .. } => {}
            WorldEvent::Restore { a, b } => self.restore(a, b),
            WorldEvent::GiveUp { association, side } => self.give_up(association, side),
            WorldEvent::Kill { element } => self.kill_element(element),
            WorldEvent::StartElement { element } => self.start_element(element),
            WorldEvent::Deregister { element } => self.deregister_element(element),
            WorldEvent::DialledAgain {
                registrar,
                boot,
                dial,
                association,
            } => {
                if self.registrars[registrar].boot == boot {
                    self.on_dialled_again(registrar, dial, association);
                }
            }
            WorldEvent::Datagram {
                to,
                from,
                protocol,
                message,
            } => {
                let source = node_numbers::endpoint(from, protocol);
                self.feed(to, |machine, now| {
                    machine.handle_multicast(now, source, protocol, &message);
                });
            }
            WorldEvent::Wake { registrar, at } => {
                if self.registrars[registrar].timer.take(at) {
                    self.feed(registrar, |machine, now| machine.handle_timeout(now));
                }
            }
            WorldEvent::ElementWake { element } => self.run_element(element),
            WorldEvent::CheckInvariants => {
                self.check();
                self.schedule(Duration::from_millis(100), WorldEvent::CheckInvariants);
            }
        }
    }

    fn boot_registrar(&mut self, index: usize) {
        if self.registrars[index].machine.is_some() {
            return;
        }
        self.last_fault = self.now;
        let node = self.numbers.number(NodeRole::Registrar(index));
        let transport = node_numbers::sctp_transport(node, PoolProtocol::Enrp);
        // A registrar has a random ID in each life.
        let id = RegistrarId((self.random.number() as u32).max(1));
        let mut config = RegistrarMachineConfig::new(id, self.random.number(), transport);
        config.settings = settings(self.multicast);
        if !self.multicast {
            let others = (0..self.registrars.len() as NodeNumber).filter(|other| *other != node);
            config.mentors = others
                .map(|other| vec![node_numbers::endpoint(other, PoolProtocol::Enrp)])
                .collect();
        }
        let registrar = &mut self.registrars[index];
        registrar.boot += 1;
        registrar.timer = MachineTimer::default();
        registrar.machine = Some(Registrar::new(self.now, config));
        self.feed(index, |_, _| ());
    }

    /// Gives a machine an input, and carries out its outputs.
    pub fn feed(&mut self, index: usize, input: impl FnOnce(&mut Registrar, Duration)) {
        let now = self.now;
        let Some(machine) = &mut self.registrars[index].machine else {
            return;
        };
        input(machine, now);
        let outputs: Vec<_> = std::iter::from_fn(|| machine.poll_output()).collect();
        let due = machine.poll_timeout();
        for output in outputs {
            self.carry_out(index, output);
        }
        if let Some(at) = self.registrars[index].timer.arm(due) {
            let event = WorldEvent::Wake {
                registrar: index,
                at,
            };
            self.queue.push(at, event);
        }
    }

    pub fn record_event(&mut self, index: usize, event: Event) {
        if self.trace {
            println!("{:?} registrar {index}: {event:?}", self.now);
        }
        match event {
            Event::TakenOver { .. } => self.tally.count("taken over"),
            Event::TakeoverEnded(_) => self.tally.count("takeover ended"),
            Event::OutOfSync { .. } => self.tally.count("out of step"),
            Event::Resynchronised { .. } => self.tally.count("in step"),
            Event::Removed {
                handle,
                id,
                reason: why,
            } => {
                self.tally.count(format!("removed: {why:?}"));
                self.check_removal(&handle, id, why);
            }
            Event::PeerDead(_) => self.tally.count("peer dead"),
            Event::MentorFailed => self.tally.count("mentor failed"),
            Event::Inconsistent { .. } | Event::Refused { .. } => panic!("{event:?}"),
            _ => {}
        }
    }
}

fn settings(multicast: bool) -> RegistrarSettings {
    let mut settings = RegistrarSettings {
        keep_alive_interval: Duration::from_secs(2),
        keep_alive_timeout: Duration::from_millis(900),
        heartbeat_cycle: Duration::from_secs(1),
        last_heard_max: Duration::from_millis(2_500),
        no_response_max: Duration::from_millis(700),
        retry_interval: Duration::from_millis(300),
        mentor_hunt_time: Duration::from_millis(400),
        table_elements_max: 4,
        batch_elements_max: 2,
        enrp_multicast: multicast,
        ..RegistrarSettings::default()
    };
    if multicast {
        let network = "10.0.0.0/24".parse().expect("a network");
        settings.access.registrar = PermittedHosts::Only(vec![network]);
    }
    settings
}

/// Encodes an ASAP message.
pub fn encoded(message: &asap::Message) -> Bytes {
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).expect("an encoding");
    buffer.freeze()
}
