//! Three to five hosts, a net, processes with clients and with connections to each other, and a clock; all from one seed.

use crate::fault::Fault;
use crate::host::{Connection, Entry, Host, Image, State, Who};
use crate::net::Net;
use crate::rng::Rng;
use holdfast_proto::migration::{Completion, Migration, Output, Results, Token};
use holdfast_wire::{Change, ChangeKind, Flow, Frame, MoveId, NodeId, Protocol, Record};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is to happen.
#[derive(Debug)]
pub enum What {
    Deliver {
        from: usize,
        to: usize,
        life: u64,
        frame: Frame,
    },
    Effect {
        node: usize,
        life: u64,
        token: Token,
    },
    Complete {
        node: usize,
        life: u64,
        token: Token,
        results: Results,
    },
    Wake {
        node: usize,
        life: u64,
    },
    /// The daemon reports a flow to the holder, as the handoff's machine does.
    Report {
        node: usize,
        life: u64,
        change: Change,
    },
    Lost {
        node: usize,
        peer: usize,
    },
    Connect {
        a: usize,
        b: usize,
    },
    Crash {
        node: usize,
    },
    Restart {
        node: usize,
    },
    Cut {
        a: usize,
        b: usize,
    },
    Heal {
        a: usize,
        b: usize,
    },
    Request,
    Cancel,
    Work,
    Close,
    Open,
    Kill,
}

/// What is true of a process, wherever it runs.
pub struct Truth {
    pub alive: bool,
    pub content: u64,
}

/// What happened, to know that the runs are worth something.
#[derive(Debug, Default, Clone)]
pub struct Tally {
    pub counts: BTreeMap<String, u64>,
    pub events: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.events += other.events;
        for (what, count) in &other.counts {
            *self.counts.entry(what.clone()).or_default() += count;
        }
    }
}

pub struct World {
    pub seed: u64,
    pub now: Duration,
    pub rng: Rng,
    pub hosts: Vec<Host>,
    pub net: Net,
    pub holder: usize,
    pub holder_busy: Duration,
    pub steering: BTreeMap<Flow, Record>,
    /// The highest epoch that each flow had.
    pub epochs: BTreeMap<Flow, u32>,
    /// What daemons have sent each other of processes.
    pub images: BTreeMap<MoveId, Image>,
    pub truths: Vec<Truth>,
    pub clones: BTreeSet<MoveId>,
    /// Copies that ran.
    pub copies: BTreeSet<Who>,
    pub fault: Fault,
    pub hostile: bool,
    /// It was hostile before it healed.
    pub was_hostile: bool,
    /// Nothing takes unusually long.
    pub calm: bool,
    /// Chance of a command to fail, in percent.
    pub flaky: u64,
    pub tally: Tally,
    pub dirty: Vec<Flow>,
    pub asked: BTreeSet<(usize, u64, u64)>,
    pub told: BTreeSet<(usize, u64, MoveId, usize, u8)>,
    pub trace: bool,
    pub flows_made: u64,
    queue: BTreeMap<(Duration, u64), What>,
    number: u64,
}

impl World {
    pub fn new(seed: u64, fault: Fault) -> World {
        let mut rng = Rng::new(seed);
        let count = rng.range(3, 6) as usize;
        let mut world = World {
            seed,
            now: Duration::ZERO,
            hosts: (0..count).map(|index| Host::new(id(index))).collect(),
            net: Net::default(),
            holder: rng.index(count),
            holder_busy: Duration::ZERO,
            steering: BTreeMap::new(),
            epochs: BTreeMap::new(),
            images: BTreeMap::new(),
            truths: Vec::new(),
            clones: BTreeSet::new(),
            copies: BTreeSet::new(),
            fault,
            hostile: rng.percent(30),
            was_hostile: false,
            calm: false,
            flaky: if rng.percent(50) { 0 } else { 4 },
            tally: Tally::default(),
            dirty: Vec::new(),
            asked: BTreeSet::new(),
            told: BTreeSet::new(),
            trace: std::env::var_os("HOLDFAST_TRACE").is_some(),
            flows_made: 0,
            queue: BTreeMap::new(),
            number: 0,
            rng,
        };
        world.was_hostile = world.hostile;
        for node in 0..count {
            world.restart(node);
        }
        for (a, b) in Net::pairs(count) {
            world.connect(a, b);
        }
        world.populate();
        world
    }

    /// A world in which nothing goes wrong.
    pub fn calm(seed: u64) -> World {
        let mut world = World::new(seed, Fault::None);
        world.hostile = false;
        world.was_hostile = false;
        world.flaky = 0;
        world.calm = true;
        world
    }

    /// Processes, some with clients; the first two are connected with each other.
    fn populate(&mut self) {
        let count = self.rng.range(2, 4) as usize;
        let homes: Vec<usize> = (0..count)
            .map(|_| self.rng.index(self.hosts.len()))
            .collect();
        let end = |of: usize| format!("10.9.0.{}:77", of + 1).parse().expect("an address");
        for (number, home) in homes.iter().enumerate() {
            let other = 1 - number.min(1);
            let flow = Flow {
                protocol: Protocol::Tcp,
                local: end(number),
                remote: end(other),
            };
            let connection = Connection {
                flow,
                peer: id(homes[other]),
                hops: 0,
            };
            let connections = if number < 2 { vec![connection] } else { vec![] };
            let image = Image {
                who: Who::Original(number),
                content: 0,
                flows: Vec::new(),
                connections,
                hops: 0,
            };
            self.hosts[*home].make(image);
            let (alive, content) = (true, 0);
            self.truths.push(Truth { alive, content });
        }
        for _ in 0..self.rng.range(0, 7) {
            self.open();
        }
    }

    /// A chance, in percent, in a world that is not calm.
    pub fn trouble(&mut self, chance: u64) -> bool {
        self.rng.percent(chance) && !self.calm
    }

    pub fn at(&mut self, delay: Duration, what: What) {
        self.number += 1;
        self.queue.insert((self.now + delay, self.number), what);
    }

    pub fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.rng.range(low, high))
    }

    /// Runs until nothing is left to happen, or the time is up; gives whether nothing is left.
    pub fn run(&mut self, until: Duration) -> bool {
        while self
            .queue
            .first_key_value()
            .is_some_and(|(&(at, _), _)| at <= until)
        {
            self.next();
        }
        self.now = self.now.max(until);
        self.queue.is_empty()
    }

    /// Runs until no machine has anything to do and all reports have come; gives how long that took.
    pub fn rest(&mut self) -> Duration {
        let begun = self.now;
        let idle = |host: &Host| host.machine.as_ref().is_none_or(Migration::is_idle);
        while !(self.hosts.iter().all(idle) && self.queue.is_empty()) && self.next() {}
        self.now - begun
    }

    fn next(&mut self) -> bool {
        let Some(((at, _), what)) = self.queue.pop_first() else {
            return false;
        };
        self.now = at;
        self.tally.events += 1;
        self.step(what);
        self.check();
        true
    }

    fn step(&mut self, what: What) {
        if self.trace {
            println!("{:?} {what:?}", self.now);
        }
        if self.is_past(&what) {
            return;
        }
        match what {
            What::Deliver {
                from,
                to,
                life,
                frame,
            } => self.deliver(from, to, life, frame),
            What::Effect { node, token, .. } => self.effect(node, token),
            What::Complete {
                node,
                token,
                results,
                ..
            } => self.input(node, |machine, now| {
                machine.handle_done(now, Completion { token, results });
            }),
            What::Wake { node, .. } => {
                self.hosts[node].wake = None;
                self.input(node, |machine, now| machine.handle_timeout(now));
            }
            What::Report { node, change, .. } => self.report(node, change),
            What::Lost { node, peer } => self.learn_lost(node, peer),
            What::Connect { a, b } => self.connect(a, b),
            What::Crash { node } => self.crash(node),
            What::Restart { node } => self.restart(node),
            What::Cut { a, b } => {
                self.net.channel(a, b).cut = true;
                self.break_channel(a, b, 300_000);
            }
            What::Heal { a, b } => {
                self.net.channel(a, b).cut = false;
                self.at(Duration::from_millis(1), What::Connect { a, b });
            }
            What::Request => self.request(),
            What::Cancel => self.cancel(),
            What::Work => self.work(),
            What::Close => self.close(),
            What::Open => self.open(),
            What::Kill => self.kill(),
        }
    }

    /// Whether it was a daemon's that has died since.
    fn is_past(&self, what: &What) -> bool {
        match what {
            What::Effect { node, life, .. }
            | What::Complete { node, life, .. }
            | What::Report { node, life, .. }
            | What::Wake { node, life } => self.hosts[*node].life != *life,
            _ => false,
        }
    }

    /// Gives a daemon an input, if it lives, and carries out what it says.
    pub fn input(&mut self, node: usize, give: impl FnOnce(&mut Migration, Duration)) {
        let now = self.now;
        let Some(machine) = self.hosts[node].machine.as_mut() else {
            return;
        };
        give(machine, now);
        while let Some(output) = self.hosts[node]
            .machine
            .as_mut()
            .and_then(Migration::poll_output)
        {
            if self.trace {
                println!("{now:?} node {}: {output:?}", self.hosts[node].id);
            }
            match output {
                Output::Send { to, frame } => self.send(node, index(to), frame),
                Output::Do(command) => self.begin(node, command),
                Output::Event(event) => self.event(node, event),
            }
        }
        let life = self.hosts[node].life;
        let due = self.hosts[node]
            .machine
            .as_ref()
            .and_then(Migration::poll_timeout);
        if due.is_some() && due != self.hosts[node].wake {
            self.hosts[node].wake = due;
            let delay = due.unwrap_or_default().saturating_sub(now);
            self.at(delay, What::Wake { node, life });
        }
    }

    pub fn count(&mut self, what: &str) {
        match self.tally.counts.get_mut(what) {
            Some(count) => *count += 1,
            None => {
                self.tally.counts.insert(what.to_owned(), 1);
            }
        }
    }

    /// A flow nobody had before.
    pub fn new_flow(&mut self, node: usize) -> Flow {
        self.flows_made += 1;
        let flow = Flow {
            protocol: Protocol::Tcp,
            local: "10.0.0.1:80".parse().expect("an address"),
            remote: format!("10.0.1.2:{}", 4000 + self.flows_made)
                .parse()
                .expect("an address"),
        };
        let (state, epoch, id) = (State::Owned, 1, None);
        let entry = Entry { state, epoch, id };
        self.hosts[node].entries.insert(flow, entry);
        flow
    }
}

pub fn id(index: usize) -> NodeId {
    NodeId(index as u16 + 1)
}

pub fn index(id: NodeId) -> usize {
    usize::from(id.0) - 1
}

pub fn change(flow: Flow, kind: ChangeKind, epoch: u32) -> Change {
    Change { flow, kind, epoch }
}
