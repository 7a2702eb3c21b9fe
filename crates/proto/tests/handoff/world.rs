//! Three to five nodes, a net, clients' flows, and a clock; all from one seed.

use crate::fault::Fault;
use crate::net::Net;
use crate::node::Node;
use crate::rng::Rng;
use holdfast_proto::handoff::{Completion, Handoff, Output, Token};
use holdfast_wire::{Change, ChangeKind, Flow, Frame, NodeId, Protocol, Record, RecordState};
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
        index: usize,
    },
    Arbitrate {
        node: usize,
        life: u64,
        token: Token,
    },
    Complete {
        node: usize,
        life: u64,
        token: Token,
    },
    Wake {
        node: usize,
        life: u64,
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
    Work,
    Close,
    Open,
}

/// What is true of a flow, whoever has it.
#[derive(Default)]
pub struct Truth {
    pub alive: bool,
    /// Bytes it has seen: those of the one socket that speaks.
    pub content: u64,
    pub epoch: u32,
    pub record: Option<Record>,
}

/// What happened, to know that the runs are worth something.
#[derive(Debug, Default, Clone)]
pub struct Tally {
    pub counts: BTreeMap<String, u64>,
    pub events: u64,
}

pub struct World {
    pub seed: u64,
    pub now: Duration,
    pub rng: Rng,
    pub nodes: Vec<Node>,
    pub net: Net,
    pub holder: usize,
    pub steering: BTreeMap<Flow, Record>,
    pub flows: Vec<Flow>,
    pub truths: BTreeMap<Flow, Truth>,
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
    /// Print what machines say and what happens to them.
    trace: bool,
    queue: BTreeMap<(Duration, u64), What>,
    number: u64,
    pub asked: BTreeSet<(usize, u64, u64)>,
    pub batch_flows_max: usize,
}

impl World {
    pub fn new(seed: u64, fault: Fault) -> World {
        let mut rng = Rng::new(seed);
        let count = rng.range(3, 6) as usize;
        let flows = (0..rng.range(2, 9)).map(flow).collect();
        let mut world = World {
            seed,
            now: Duration::ZERO,
            nodes: (0..count).map(|index| Node::new(id(index))).collect(),
            net: Net::default(),
            holder: rng.index(count),
            steering: BTreeMap::new(),
            flows,
            truths: BTreeMap::new(),
            fault,
            hostile: rng.percent(30),
            was_hostile: false,
            calm: false,
            flaky: if rng.percent(50) { 0 } else { 4 },
            tally: Tally::default(),
            dirty: Vec::new(),
            trace: std::env::var_os("HOLDFAST_TRACE").is_some(),
            queue: BTreeMap::new(),
            number: 0,
            asked: BTreeSet::new(),
            batch_flows_max: rng.range(1, 5) as usize,
            rng,
        };
        world.was_hostile = world.hostile;
        for node in 0..count {
            world.restart(node);
        }
        for (a, b) in Net::pairs(count) {
            world.connect(a, b);
        }
        for _ in 0..world.flows.len() {
            world.open();
        }
        world
    }

    /// A world in which nothing goes wrong.
    pub fn calm(seed: u64) -> World {
        let mut world = World::new(seed, Fault::None);
        world.hostile = false;
        world.flaky = 0;
        world.calm = true;
        world
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

    /// Runs until no machine has anything to do; gives how long that took.
    pub fn rest(&mut self) -> Duration {
        let begun = self.now;
        let idle = |node: &Node| node.machine.as_ref().is_none_or(Handoff::is_idle);
        while !self.nodes.iter().all(idle) && self.next() {}
        self.now - begun
    }

    /// The next thing happens, if there is one.
    fn next(&mut self) -> bool {
        let Some(((at, _), what)) = self.queue.pop_first() else {
            return false;
        };
        self.now = at;
        self.tally.events += 1;
        self.step(what);
        self.check_dirty();
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
            What::Effect {
                node,
                life,
                token,
                index,
            } => {
                let (flaky, fault) = (self.flaky, self.fault);
                let flow = self.nodes[node].effect(token, index, &mut self.rng, flaky, fault);
                self.dirty.push(flow);
                if self.nodes[node].running[&token].left == 0 {
                    let delay = self.micros(0, 100);
                    self.at(delay, What::Complete { node, life, token });
                }
            }
            What::Arbitrate { node, token, .. } => self.arbitrate(node, token),
            What::Complete { node, token, .. } => {
                let running = self.nodes[node].running.remove(&token).expect("runs");
                let results = running.results;
                self.input(node, |machine, now| {
                    machine.handle_done(now, Completion { token, results });
                });
            }
            What::Wake { node, .. } => {
                self.nodes[node].wake = None;
                self.input(node, |machine, now| machine.handle_timeout(now));
            }
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
            What::Work => self.work(),
            What::Close => self.close(),
            What::Open => self.open(),
        }
    }

    /// Whether it was a daemon's that has died since.
    fn is_past(&self, what: &What) -> bool {
        match what {
            What::Effect { node, life, .. }
            | What::Arbitrate { node, life, .. }
            | What::Complete { node, life, .. }
            | What::Wake { node, life } => self.nodes[*node].life != *life,
            _ => false,
        }
    }

    /// Gives a daemon an input, if it lives, and carries out what it says.
    pub fn input(&mut self, node: usize, give: impl FnOnce(&mut Handoff, Duration)) {
        let now = self.now;
        let Some(machine) = self.nodes[node].machine.as_mut() else {
            return;
        };
        give(machine, now);
        let trace = self.trace;
        while let Some(output) = self.nodes[node]
            .machine
            .as_mut()
            .and_then(Handoff::poll_output)
        {
            if trace {
                println!("{now:?} node {}: {output:?}", self.nodes[node].id);
            }
            match output {
                Output::Send { to, frame } => self.send(node, index(to), frame),
                Output::Do(command) => self.begin(node, command),
                Output::Event(event) => self.event(node, event),
            }
        }
        let life = self.nodes[node].life;
        let due = self.nodes[node]
            .machine
            .as_ref()
            .and_then(Handoff::poll_timeout);
        if due.is_some() && due != self.nodes[node].wake {
            self.nodes[node].wake = due;
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

fn flow(number: u64) -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        local: "10.0.0.1:80".parse().expect("an address"),
        remote: format!("10.0.1.2:{}", 4000 + number)
            .parse()
            .expect("an address"),
    }
}

/// Who may speak, as the record says: the owner, or the donor of a flow in transit (until it freezes).
pub fn speaker(record: &Record) -> NodeId {
    match record.state {
        RecordState::Owned { owner } => owner,
        RecordState::Transit { donor, .. } => donor,
    }
}
