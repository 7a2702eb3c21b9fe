//! The world: registrars, elements, the network between them, and the queue of events.

use crate::element::Element;
use crate::fault::{Fault, registrar_id};
use crate::net::{Network, NodeIndex, address};
use crate::rng::Rng;
use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{
    DialId, Event, PoolProtocol, Registrar, RegistrarMachineConfig, RegistrarSettings,
};
use holdfast_wire::rserpool::{SctpTransport, TransportUse, asap};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest time for which, without failures, two registrars may both claim an element, or a live element may be missing
/// from a view. In this time a heartbeat shows that views differ, a table is requested, the element is probed, and its
/// next registration is due. The time covers two heartbeats and two registrations, since the first of each may just
/// have passed.
pub const CONVERGENCE_BOUND: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub enum WorldEvent {
    Crash {
        node: usize,
    },
    Boot {
        node: usize,
    },
    Cut {
        a: NodeIndex,
        b: NodeIndex,
    },
    Restore {
        a: NodeIndex,
        b: NodeIndex,
    },
    /// This end notices that a link, still cut, has broken.
    LinkBroken {
        link: u64,
        side: usize,
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
    Deliver {
        link: u64,
        side: usize,
    },
    Dialled {
        node: usize,
        boot: u64,
        dial: DialId,
        to: NodeIndex,
        protocol: PoolProtocol,
    },
    Datagram {
        to: usize,
        from: NodeIndex,
        protocol: PoolProtocol,
        bytes: Bytes,
    },
    Wake {
        node: usize,
        boot: u64,
    },
    ElementWake {
        element: usize,
    },
    CheckInvariants,
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

pub struct Node {
    pub machine: Option<Registrar>,
    pub boot: u64,
    next_wake: Option<Duration>,
}

pub struct World {
    pub rng: Rng,
    pub loses_messages: bool,
    pub nodes: Vec<Node>,
    pub elements: Vec<Element>,
    pub network: Network,
    pub tally: EventTally,
    pub now: Duration,
    /// Time of the last failure or recovery.
    pub last_fault: Duration,
    /// Time since which an element has been in a wrong state.
    pub inconsistent_since: BTreeMap<usize, Duration>,
    queue: BTreeMap<(Duration, u64), WorldEvent>,
    sequence: u64,
    pub fault: Fault,
    multicast: bool,
    trace: bool,
}

impl World {
    pub fn new(seed: u64, fault: Fault) -> World {
        let mut rng = Rng::new(seed);
        let (registrars, elements) = (rng.range(2, 6) as usize, rng.range(1, 25) as usize);
        let node = |_| Node {
            machine: None,
            boot: 0,
            next_wake: None,
        };
        let mut world = World {
            multicast: rng.percent(30),
            rng,
            loses_messages: false,
            nodes: (0..registrars).map(node).collect(),
            elements: (0..elements)
                .map(|number| Element::new(registrars + number, number))
                .collect(),
            network: Network::default(),
            tally: EventTally::default(),
            now: Duration::ZERO,
            last_fault: Duration::from_secs(3),
            inconsistent_since: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            fault,
            trace: std::env::var("HOLDFAST_TRACE").is_ok(),
        };
        for node in 0..registrars {
            let at = Duration::from_micros(world.rng.range(0, 500_000));
            world.schedule(at, WorldEvent::Boot { node });
        }
        for element in 0..elements {
            let at = Duration::from_micros(world.rng.range(0, 2_000_000));
            world.schedule(at, WorldEvent::ElementWake { element });
        }
        world.schedule(Duration::from_secs(3), WorldEvent::CheckInvariants);
        world
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len() + self.elements.len()
    }

    pub fn schedule(&mut self, after: Duration, event: WorldEvent) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), event);
    }

    pub fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), event) = entry.remove_entry();
            self.now = at;
            if self.trace && !matches!(event, WorldEvent::Wake { .. } | WorldEvent::CheckInvariants)
            {
                println!("{at:?} {event:?}");
            }
            self.step(event);
        }
        self.now = end;
    }

    /// Ends all failures.
    pub fn end_faults(&mut self) {
        self.loses_messages = false;
        self.network.cut_pairs.clear();
        for node in 0..self.nodes.len() {
            self.schedule(Duration::ZERO, WorldEvent::Boot { node });
        }
        // Some of the dead elements stay dead.
        for element in 0..self.elements.len() {
            if self.rng.percent(60) {
                self.schedule(Duration::ZERO, WorldEvent::StartElement { element });
            }
        }
        self.last_fault = self.now;
    }

    fn step(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Crash { node } => self.crash_registrar(node),
            WorldEvent::Boot { node } => self.boot_registrar(node),
            WorldEvent::Cut { a, b } if a != b => self.cut_link(a, b),
            WorldEvent::Cut { .. } => {}
            WorldEvent::Restore { a, b } => {
                self.last_fault = self.now;
                self.network.restore(a, b);
            }
            WorldEvent::LinkBroken { link, side } => self.on_link_broken(link, side),
            WorldEvent::Kill { element } => self.kill_element(element),
            WorldEvent::StartElement { element } => {
                if !self.elements[element].alive {
                    self.elements[element].alive = true;
                    self.last_fault = self.now;
                    self.elements[element].next_action = self.now;
                    self.schedule(Duration::ZERO, WorldEvent::ElementWake { element });
                }
            }
            WorldEvent::Deregister { element } => self.deregister_element(element),
            WorldEvent::Deliver { link, side } => self.deliver(link, side),
            WorldEvent::Dialled {
                node,
                boot,
                dial,
                to,
                protocol,
            } => {
                if self.nodes[node].boot == boot {
                    self.on_dialled(node, dial, to, protocol);
                }
            }
            WorldEvent::Datagram {
                to,
                from,
                protocol,
                bytes,
            } => {
                let source = address(from, self.nodes.len(), protocol);
                self.feed(to, |machine, now| {
                    machine.handle_multicast(now, source, protocol, &bytes);
                });
            }
            WorldEvent::Wake { node, boot } => {
                if self.nodes[node].boot == boot {
                    self.nodes[node].next_wake = None;
                    self.feed(node, |machine, now| machine.handle_timeout(now));
                }
            }
            WorldEvent::ElementWake { element } => self.run_element(element),
            WorldEvent::CheckInvariants => {
                self.check();
                self.schedule(Duration::from_millis(100), WorldEvent::CheckInvariants);
            }
        }
    }

    fn boot_registrar(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        self.last_fault = self.now;
        let own = address(node, self.nodes.len(), PoolProtocol::Enrp);
        let transport = SctpTransport {
            port: own.port(),
            usage: TransportUse::DataOnly,
            addresses: [own.ip()].into_iter().collect(),
        };
        let id = registrar_id(self.rng.next());
        let mut config = RegistrarMachineConfig::new(id, self.rng.next(), transport);
        config.settings = settings(self.multicast);
        if !self.multicast {
            let others = (0..self.nodes.len()).filter(|other| *other != node);
            config.mentors = others
                .map(|other| vec![address(other, self.nodes.len(), PoolProtocol::Enrp)])
                .collect();
        }
        self.nodes[node].boot += 1;
        self.nodes[node].next_wake = None;
        self.nodes[node].machine = Some(Registrar::new(self.now, config));
        self.feed(node, |_, _| ());
    }

    /// Gives a machine an input, and carries out its outputs.
    pub fn feed(&mut self, node: usize, input: impl FnOnce(&mut Registrar, Duration)) {
        let now = self.now;
        let Some(machine) = &mut self.nodes[node].machine else {
            return;
        };
        input(machine, now);
        let mut outputs = Vec::new();
        while let Some(output) = machine.poll_output() {
            outputs.push(output);
        }
        let wake = machine.poll_timeout();
        for output in outputs {
            self.carry_out(node, output);
        }
        if let Some(wake) = wake
            && self.nodes[node].next_wake.is_none_or(|set| wake < set)
        {
            self.nodes[node].next_wake = Some(wake);
            let boot = self.nodes[node].boot;
            let after = wake.saturating_sub(now);
            self.schedule(after, WorldEvent::Wake { node, boot });
        }
    }

    pub fn record_event(&mut self, node: usize, event: Event) {
        if self.trace {
            println!("{:?} node {node}: {event:?}", self.now);
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
        settings.access.registrar =
            holdfast_proto::registrar::PermittedHosts::Only(vec!["10.0.0.0/24".parse().unwrap()]);
    }
    settings
}

/// Encodes an ASAP message.
pub fn encoded(message: &asap::Message) -> Bytes {
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).unwrap();
    buffer.freeze()
}
