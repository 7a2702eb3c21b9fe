//! The world: registrars, elements, the network between them, and the queue of events.

use crate::element::Element;
use crate::fault::{Fault, registrar_id};
use crate::net::{End, Net, address};
use crate::rng::Rng;
use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{Config, DialId, Event, Protocol, Registrar, Settings};
use holdfast_wire::rserpool::{SctpTransport, TransportUse, asap};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest time for which, without failures, two registrars may both claim an element, or a live element may be missing
/// from a view. In this time a heartbeat shows that views differ, a table is requested, the element is probed, and its
/// next registration is due. The time covers two heartbeats and two registrations, since the first of each may just
/// have passed.
pub const BOUND: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub enum What {
    Crash {
        node: usize,
    },
    Boot {
        node: usize,
    },
    Cut {
        a: End,
        b: End,
    },
    Mend {
        a: End,
        b: End,
    },
    /// This end notices that a link, still cut, has broken.
    Break {
        link: u64,
        side: usize,
    },
    Kill {
        element: usize,
    },
    Join {
        element: usize,
    },
    Leave {
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
        to: End,
        protocol: Protocol,
    },
    Datagram {
        to: usize,
        from: End,
        protocol: Protocol,
        bytes: Bytes,
    },
    Wake {
        node: usize,
        boot: u64,
    },
    Element {
        element: usize,
    },
    Check,
}

#[derive(Default, Debug)]
pub struct Tally {
    pub counts: BTreeMap<String, u64>,
}

impl Tally {
    pub fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub fn add(&mut self, other: &Tally) {
        for (what, count) in &other.counts {
            *self.counts.entry(what.clone()).or_default() += count;
        }
    }
}

pub struct Node {
    pub machine: Option<Registrar>,
    pub boot: u64,
    wake: Option<Duration>,
}

pub struct World {
    pub rng: Rng,
    pub hostile: bool,
    pub nodes: Vec<Node>,
    pub elements: Vec<Element>,
    pub net: Net,
    pub tally: Tally,
    pub now: Duration,
    /// Time of the last failure or recovery.
    pub trouble: Duration,
    /// Time since which an element has been in a wrong state.
    pub odd: BTreeMap<usize, Duration>,
    queue: BTreeMap<(Duration, u64), What>,
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
            wake: None,
        };
        let mut world = World {
            multicast: rng.percent(30),
            rng,
            hostile: false,
            nodes: (0..registrars).map(node).collect(),
            elements: (0..elements)
                .map(|number| Element::new(registrars + number, number))
                .collect(),
            net: Net::default(),
            tally: Tally::default(),
            now: Duration::ZERO,
            trouble: Duration::from_secs(3),
            odd: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            fault,
            trace: std::env::var("HOLDFAST_TRACE").is_ok(),
        };
        for node in 0..registrars {
            let at = Duration::from_micros(world.rng.range(0, 500_000));
            world.at(at, What::Boot { node });
        }
        for element in 0..elements {
            let at = Duration::from_micros(world.rng.range(0, 2_000_000));
            world.at(at, What::Element { element });
        }
        world.at(Duration::from_secs(3), What::Check);
        world
    }

    pub fn ends(&self) -> usize {
        self.nodes.len() + self.elements.len()
    }

    pub fn at(&mut self, after: Duration, what: What) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), what);
    }

    pub fn run(&mut self, length: Duration) {
        let end = self.now + length;
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), what) = entry.remove_entry();
            self.now = at;
            if self.trace && !matches!(what, What::Wake { .. } | What::Check) {
                println!("{at:?} {what:?}");
            }
            self.step(what);
        }
        self.now = end;
    }

    /// Ends all failures.
    pub fn heal(&mut self) {
        self.hostile = false;
        self.net.cuts.clear();
        for node in 0..self.nodes.len() {
            self.at(Duration::ZERO, What::Boot { node });
        }
        // Some of the dead elements stay dead.
        for element in 0..self.elements.len() {
            if self.rng.percent(60) {
                self.at(Duration::ZERO, What::Join { element });
            }
        }
        self.trouble = self.now;
    }

    fn step(&mut self, what: What) {
        match what {
            What::Crash { node } => self.crash(node),
            What::Boot { node } => self.boot(node),
            What::Cut { a, b } if a != b => self.cut(a, b),
            What::Cut { .. } => {}
            What::Mend { a, b } => {
                self.trouble = self.now;
                self.net.mend(a, b);
            }
            What::Break { link, side } => self.broken(link, side),
            What::Kill { element } => self.kill(element),
            What::Join { element } => {
                if !self.elements[element].alive {
                    self.elements[element].alive = true;
                    self.trouble = self.now;
                    self.elements[element].next = self.now;
                    self.at(Duration::ZERO, What::Element { element });
                }
            }
            What::Leave { element } => self.leave(element),
            What::Deliver { link, side } => self.deliver(link, side),
            What::Dialled {
                node,
                boot,
                dial,
                to,
                protocol,
            } => {
                if self.nodes[node].boot == boot {
                    self.dialled(node, dial, to, protocol);
                }
            }
            What::Datagram {
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
            What::Wake { node, boot } => {
                if self.nodes[node].boot == boot {
                    self.nodes[node].wake = None;
                    self.feed(node, |machine, now| machine.handle_timeout(now));
                }
            }
            What::Element { element } => self.element_turn(element),
            What::Check => {
                self.check();
                self.at(Duration::from_millis(100), What::Check);
            }
        }
    }

    fn boot(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        self.trouble = self.now;
        let own = address(node, self.nodes.len(), Protocol::Enrp);
        let transport = SctpTransport {
            port: own.port(),
            usage: TransportUse::DataOnly,
            addresses: [own.ip()].into_iter().collect(),
        };
        let id = registrar_id(self.rng.next());
        let mut config = Config::new(id, self.rng.next(), transport);
        config.settings = settings(self.multicast);
        if !self.multicast {
            let others = (0..self.nodes.len()).filter(|other| *other != node);
            config.mentors = others
                .map(|other| vec![address(other, self.nodes.len(), Protocol::Enrp)])
                .collect();
        }
        self.nodes[node].boot += 1;
        self.nodes[node].wake = None;
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
            && self.nodes[node].wake.is_none_or(|set| wake < set)
        {
            self.nodes[node].wake = Some(wake);
            let boot = self.nodes[node].boot;
            let after = wake.saturating_sub(now);
            self.at(after, What::Wake { node, boot });
        }
    }

    pub fn note(&mut self, node: usize, event: Event) {
        if self.trace {
            println!("{:?} node {node}: {event:?}", self.now);
        }
        match event {
            Event::TakenOver { .. } => self.tally.count("taken over"),
            Event::TakeoverEnded(_) => self.tally.count("takeover ended"),
            Event::OutOfStep { .. } => self.tally.count("out of step"),
            Event::InStep { .. } => self.tally.count("in step"),
            Event::Removed { handle, id, why } => {
                self.tally.count(format!("removed: {why:?}"));
                self.removed(&handle, id, why);
            }
            Event::PeerDead(_) => self.tally.count("peer dead"),
            Event::MentorFailed => self.tally.count("mentor failed"),
            Event::Inconsistent { .. } | Event::Refused { .. } => panic!("{event:?}"),
            _ => {}
        }
    }
}

fn settings(multicast: bool) -> Settings {
    let mut settings = Settings {
        keep_alive_interval: Duration::from_secs(2),
        keep_alive_timeout: Duration::from_millis(900),
        heartbeat_cycle: Duration::from_secs(1),
        last_heard_max: Duration::from_millis(2_500),
        no_response_max: Duration::from_millis(700),
        retry: Duration::from_millis(300),
        mentor_hunt: Duration::from_millis(400),
        table_elements_max: 4,
        turn_elements_max: 2,
        enrp_multicast: multicast,
        ..Settings::default()
    };
    if multicast {
        settings.access.registrar =
            holdfast_proto::registrar::Allow::Only(vec!["10.0.0.0/24".parse().unwrap()]);
    }
    settings
}

/// Encodes an ASAP message.
pub fn encoded(message: &asap::Message) -> Bytes {
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).unwrap();
    buffer.freeze()
}
