//! Three to five nodes, a net, clients' flows, and a clock; all from one seed.

use crate::fault::Fault;
use crate::net::Net;
use crate::node::{Entry, Node, Running, Socket, State, flows_of, start};
use crate::rng::Rng;
use holdfast_proto::handoff::{
    Command, Completion, Config, Drain, Event, Handoff, Output, Request, Results, Token,
};
use holdfast_proto::ownership;
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
    /// Chance of a command to fail, in percent.
    pub flaky: u64,
    pub tally: Tally,
    pub dirty: Vec<Flow>,
    /// Print what machines say and what happens to them.
    trace: bool,
    queue: BTreeMap<(Duration, u64), What>,
    number: u64,
    asked: BTreeSet<(usize, u64, u64)>,
    batch_flows_max: usize,
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

    pub fn at(&mut self, delay: Duration, what: What) {
        self.number += 1;
        self.queue.insert((self.now + delay, self.number), what);
    }

    fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.rng.range(low, high))
    }

    /// Runs until nothing is left to happen, or the time is up; gives whether nothing is left.
    pub fn run(&mut self, until: Duration) -> bool {
        while let Some((&(at, _), _)) = self.queue.first_key_value() {
            if at > until {
                self.now = until;
                return false;
            }
            let (_, what) = self.queue.pop_first().expect("it was there");
            self.now = at;
            self.tally.events += 1;
            self.step(what);
            self.check_dirty();
        }
        true
    }

    fn step(&mut self, what: What) {
        if self.trace {
            println!("{:?} {what:?}", self.now);
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
            } if self.nodes[node].life == life => {
                let (flaky, fault) = (self.flaky, self.fault);
                let flow = self.nodes[node].effect(token, index, &mut self.rng, flaky, fault);
                self.dirty.push(flow);
                if self.nodes[node].running[&token].left == 0 {
                    let delay = self.micros(0, 100);
                    self.at(delay, What::Complete { node, life, token });
                }
            }
            What::Arbitrate { node, life, token } if self.nodes[node].life == life => {
                self.arbitrate(node, token);
            }
            What::Complete { node, life, token } if self.nodes[node].life == life => {
                let running = self.nodes[node].running.remove(&token).expect("runs");
                let results = running.results;
                self.input(node, |machine, now| {
                    machine.handle_done(now, Completion { token, results });
                });
            }
            What::Wake { node, life } if self.nodes[node].life == life => {
                self.nodes[node].wake = None;
                self.input(node, |machine, now| machine.handle_timeout(now));
            }
            What::Effect { .. }
            | What::Arbitrate { .. }
            | What::Complete { .. }
            | What::Wake { .. } => {}
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

    /// Gives a daemon an input, if it lives, and carries out what it says.
    fn input(&mut self, node: usize, give: impl FnOnce(&mut Handoff, Duration)) {
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

    fn send(&mut self, from: usize, to: usize, frame: Frame) {
        assert_ne!(from, to, "seed {}: a frame to oneself", self.seed);
        if let Frame::Ask { request, changes } = &frame {
            self.asks(from, changes);
            let life = self.nodes[from].life;
            let again = !self.asked.insert((from, life, *request));
            if again && self.fault == Fault::AsksOnce {
                return;
            }
        }
        let frame = match frame {
            Frame::Done {
                batch,
                results,
                times,
            } if self.fault == Fault::DoneLies => {
                // The donor's own epochs are not known here; one that is refused is enough.
                let best = results.iter().flatten().max().copied().unwrap_or(3);
                let results = results
                    .into_iter()
                    .map(|result| Ok(result.unwrap_or(best)))
                    .collect();
                Frame::Done {
                    batch,
                    results,
                    times,
                }
            }
            frame => frame,
        };
        if !self.net.channel(from, to).up {
            return;
        }
        let copies = match self.hostile {
            true if self.rng.percent(3) => 0,
            true if self.rng.percent(3) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let slow = if self.rng.percent(3) { 200_000 } else { 600 };
            let mut arrival = self.now + self.micros(50, slow);
            let in_order = !(self.hostile && self.rng.percent(5));
            let channel = self.net.channel(from, to);
            let life = channel.life;
            if in_order {
                let last = &mut channel.last[usize::from(from > to)];
                arrival = arrival.max(*last);
                *last = arrival;
            }
            let frame = frame.clone();
            self.at(
                arrival - self.now,
                What::Deliver {
                    from,
                    to,
                    life,
                    frame,
                },
            );
        }
    }

    fn deliver(&mut self, from: usize, to: usize, life: u64, frame: Frame) {
        let channel = self.net.channel(from, to);
        if !channel.up || channel.life != life {
            return;
        }
        if self.fault == Fault::ClosesEarly && matches!(frame, Frame::Prepared { .. }) {
            let entries = self.nodes[to].kernel.iter();
            let prepared = entries.filter(|(_, entry)| entry.state == State::Prepared);
            let prepared: Vec<Flow> = prepared.map(|(flow, _)| *flow).collect();
            for flow in prepared {
                self.nodes[to].close(flow, id(from));
            }
        }
        self.input(to, |machine, now| {
            machine.handle_frame(now, id(from), frame)
        });
    }

    fn begin(&mut self, node: usize, command: Command) {
        let life = self.nodes[node].life;
        let (token, results) = start(&command);
        if let Command::Arbitrate { asker, changes, .. } = &command {
            if index(*asker) == node {
                let changes = changes.clone();
                self.asks(node, &changes);
            }
            let until = self.nodes[node]
                .arbitrates_until
                .max(self.now + self.micros(1, 50));
            self.nodes[node].arbitrates_until = until;
            self.at(until - self.now, What::Arbitrate { node, life, token });
        }
        let flows = flows_of(&command);
        for (index, flow) in flows.iter().enumerate() {
            let slow = if self.rng.percent(2) { 400_000 } else { 60 };
            let mut at = self.now + self.micros(1, slow);
            // Flow by flow, and never before what was commanded earlier for the flow.
            for earlier in &flows[..=index] {
                let until = self.nodes[node].busy_until.get(earlier);
                at = at.max(until.copied().unwrap_or_default());
            }
            self.nodes[node].busy_until.insert(*flow, at);
            self.at(
                at - self.now,
                What::Effect {
                    node,
                    life,
                    token,
                    index,
                },
            );
        }
        let left = flows.len();
        let running = Running {
            command,
            results,
            left,
        };
        self.nodes[node].running.insert(token, running);
    }

    /// The daemon of the holder applies changes to the kernel's table.
    fn arbitrate(&mut self, node: usize, token: Token) {
        assert_eq!(
            node, self.holder,
            "seed {}: only the holder arbitrates",
            self.seed
        );
        let life = self.nodes[node].life;
        let running = &self.nodes[node].running[&token];
        let Command::Arbitrate { asker, changes, .. } = &running.command else {
            panic!("not an arbitration");
        };
        let (asker, changes) = (*asker, changes.clone());
        let mut results = Vec::new();
        for mut change in changes {
            let current = self.steering.get(&change.flow).copied();
            self.bend(current, &mut change);
            let mut result = ownership::apply(current, &change, asker);
            if let Some(record) = current
                && self.fault == Fault::CommitAfterRollback
                && change.kind == ChangeKind::Commit
            {
                result = Ok(Some(Record::owned(asker, record.epoch + 1)));
            }
            if let Ok(record) = &result {
                match record {
                    Some(record) => self.steering.insert(change.flow, *record),
                    None => self.steering.remove(&change.flow),
                };
                self.dirty.push(change.flow);
            }
            self.tally_change(&change, result.is_ok());
            results.push(result);
        }
        let node_state = &mut self.nodes[node];
        node_state.running.get_mut(&token).expect("runs").results = Results::Arbitrated(results);
        let delay = self.micros(0, 50);
        self.at(delay, What::Complete { node, life, token });
    }

    fn bend(&self, current: Option<Record>, change: &mut Change) {
        match (self.fault, change.kind, current) {
            (Fault::NoFloors, ChangeKind::Establish, _) => change.epoch = 1,
            (Fault::StaleEpochAccepted, ChangeKind::Establish, _) => {}
            (Fault::StaleEpochAccepted, _, Some(record)) => change.epoch = record.epoch,
            _ => {}
        }
    }

    fn tally_change(&mut self, change: &Change, ok: bool) {
        let kind = match change.kind {
            ChangeKind::Divert { .. } => "divert".to_owned(),
            kind => format!("{kind:?}").to_lowercase(),
        };
        self.count(&format!(
            "{kind} {}",
            if ok { "granted" } else { "refused" }
        ));
    }

    /// The machine asks the holder: where the faults that do not wait for the answer come in.
    fn asks(&mut self, node: usize, changes: &[Change]) {
        for change in changes {
            let flow = change.flow;
            match (self.fault, change.kind) {
                (Fault::ActivatesBeforeCommitted, ChangeKind::Commit) => {
                    self.nodes[node].activate(flow, change.epoch + 1);
                    self.dirty.push(flow);
                }
                (Fault::ResumesUnasked, ChangeKind::Rollback) => {
                    if let Some(entry) = self.nodes[node].kernel.get_mut(&flow)
                        && entry.state == State::Out
                    {
                        entry.state = State::Owned;
                        self.dirty.push(flow);
                    }
                }
                _ => {}
            }
        }
    }

    fn event(&mut self, node: usize, event: Event) {
        match event {
            Event::Outcome { request, flows, .. } => {
                for (flow, outcome) in flows {
                    self.count_outcome(&outcome);
                    let Some(request) = request else {
                        continue;
                    };
                    let open = self.nodes[node].open.get_mut(&request);
                    let open = open.unwrap_or_else(|| panic!("an outcome of no request"));
                    let place = open.iter().position(|other| *other == flow);
                    open.remove(
                        place.unwrap_or_else(|| {
                            panic!("seed {}: two outcomes of {flow}", self.seed)
                        }),
                    );
                }
            }
            Event::RequestFinished { request, .. } => {
                let open = self.nodes[node].open.remove(&request);
                assert_eq!(
                    open,
                    Some(vec![]),
                    "seed {}: a request ended early",
                    self.seed
                );
            }
            Event::Changed { change, result } => self.changed(node, change, result.ok().flatten()),
            Event::Failed { command, .. } => self.count(&format!("{command} failed for good")),
            Event::Accepted { batch: None, .. } => self.count("activated after restart"),
            Event::Discarded { batch: None, .. } => self.count("discarded after restart"),
            Event::Ignored { what, .. } => self.count(&format!("ignored {what}")),
            Event::HolderSilent { .. } => self.count("holder silent"),
            Event::Accepted { .. } | Event::Discarded { .. } | Event::BatchFinished { .. } => {}
        }
    }

    /// The daemon notes what the holder said to an establish or a removal.
    fn changed(&mut self, node: usize, change: Change, record: Option<Record>) {
        let flow = change.flow;
        let kernel = &mut self.nodes[node].kernel;
        let Some(entry) = kernel.get_mut(&flow) else {
            return;
        };
        match (change.kind, record) {
            (ChangeKind::Establish, Some(record)) if entry.speaks() => {
                entry.epoch = entry.epoch.max(record.epoch);
            }
            (ChangeKind::Remove, _) if entry.state == State::Closing => {
                kernel.remove(&flow);
            }
            _ => {}
        }
        self.dirty.push(flow);
    }

    fn break_channel(&mut self, a: usize, b: usize, slow: u64) {
        let channel = self.net.channel(a, b);
        if !channel.up {
            return;
        }
        channel.up = false;
        channel.life += 1;
        channel.unaware = vec![a, b];
        for (node, peer) in [(a, b), (b, a)] {
            let delay = self.micros(10, slow);
            self.at(delay, What::Lost { node, peer });
        }
        self.at(Duration::from_millis(5), What::Connect { a, b });
    }

    fn learn_lost(&mut self, node: usize, peer: usize) {
        self.net
            .channel(node, peer)
            .unaware
            .retain(|other| *other != node);
        self.input(node, |machine, now| machine.handle_peer_lost(now, id(peer)));
    }

    fn connect(&mut self, a: usize, b: usize) {
        let alive = self.nodes[a].machine.is_some() && self.nodes[b].machine.is_some();
        let channel = self.net.channel(a, b);
        if channel.up || channel.cut || !alive {
            return;
        }
        if !channel.unaware.is_empty() {
            return self.at(Duration::from_millis(10), What::Connect { a, b });
        }
        channel.up = true;
        channel.last = [self.now; 2];
        for (node, peer) in [(a, b), (b, a)] {
            self.input(node, |machine, now| {
                machine.handle_peer_connected(now, id(peer))
            });
        }
    }

    fn crash(&mut self, node: usize) {
        if self.nodes[node].machine.is_none() {
            return;
        }
        self.count("crash");
        let states: Vec<State> = self.nodes[node]
            .kernel
            .values()
            .map(|entry| entry.state)
            .collect();
        for state in states {
            self.count(&format!("crash with a flow {state:?}"));
        }
        self.nodes[node].crash();
        for peer in (0..self.nodes.len()).filter(|peer| *peer != node) {
            self.break_channel(node, peer, 2_000);
        }
    }

    fn restart(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        let peers = (0..self.nodes.len()).map(id);
        let life = self.nodes[node].life;
        let mut config = Config::new(id(node), life, id(self.holder), peers);
        config.batch_flows_max = self.batch_flows_max;
        let highest = self.steering.values().map(|record| record.epoch).max();
        config.epoch_floor = (self.now.as_secs() as u32 * 1_000 + 1).max(highest.unwrap_or(0) + 1);
        config.epoch_floor = config.epoch_floor.max(life as u32 * 10_000);
        self.nodes[node].machine = Some(Handoff::new(config));
        let mut recovered = self.nodes[node].recovered();
        for flow in &recovered {
            let role = format!("recovered {:?}", flow.role);
            self.count(&role);
        }
        if self.fault == Fault::RestartResumes {
            for entry in self.nodes[node].kernel.values_mut() {
                if entry.state == State::Out {
                    entry.state = State::Owned;
                }
            }
            self.dirty.extend(recovered.iter().map(|flow| flow.flow));
            recovered.retain(|flow| self.nodes[node].kernel[&flow.flow].state != State::Owned);
        }
        if self.fault != Fault::RestartForgets {
            self.input(node, |machine, now| {
                machine.handle_recovered(now, recovered)
            });
        }
        let entries = self.nodes[node].kernel.iter();
        let reports = entries.filter_map(|(flow, entry)| match entry.state {
            State::Closing => Some(change(*flow, ChangeKind::Remove, entry.epoch)),
            State::Owned if entry.epoch == 0 => Some(change(*flow, ChangeKind::Establish, 1)),
            _ => None,
        });
        let reports = reports.collect();
        self.input(node, |machine, now| machine.handle_changes(now, reports));
        for peer in (0..self.nodes.len()).filter(|peer| *peer != node) {
            let delay = self.micros(100, 20_000);
            self.at(delay, What::Connect { a: node, b: peer });
        }
    }

    fn request(&mut self) {
        let node = self.rng.index(self.nodes.len());
        let to = self.rng.index(self.nodes.len());
        let everything = self.rng.percent(70);
        let mut flows = Vec::new();
        for flow in self.flows.clone() {
            let here = self.nodes[node]
                .kernel
                .get(&flow)
                .is_some_and(Entry::speaks);
            if (here && everything) || self.rng.percent(10) {
                flows.push(flow);
            }
        }
        let drain = match self.rng.range(0, 3) {
            0 => Drain::No,
            1 => Drain::Yes,
            _ => Drain::Within(Duration::from_millis(3)),
        };
        let now = self.now;
        let Some(machine) = self.nodes[node].machine.as_mut() else {
            return;
        };
        let request = Request {
            flows: flows.clone(),
            to: id(to),
            drain,
        };
        match machine.handle_request(now, request) {
            Ok(request) => {
                self.nodes[node].open.insert(request, flows);
            }
            Err(_) => assert!(node == to || flows.is_empty(), "seed {}", self.seed),
        }
        self.input(node, |_, _| {});
    }

    /// The server program does something on each connection it may.
    fn work(&mut self) {
        for flow in self.flows.clone() {
            for node in &mut self.nodes {
                if node.kernel.get(&flow).is_some_and(Entry::speaks)
                    && let Some(socket) = node.sockets.get_mut(&flow)
                    && let Some(truth) = self.truths.get_mut(&flow)
                {
                    socket.content += 1;
                    truth.content += 1;
                }
            }
            self.dirty.push(flow);
        }
    }

    /// A client and its server program close a connection.
    fn close(&mut self) {
        let flow = self.flows[self.rng.index(self.flows.len())];
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            let Some(entry) = node.kernel.get_mut(&flow) else {
                continue;
            };
            if !entry.speaks() || node.machine.is_none() {
                continue;
            }
            entry.state = State::Closing;
            let epoch = entry.epoch;
            node.sockets.remove(&flow);
            if let Some(truth) = self.truths.get_mut(&flow) {
                truth.alive = false;
            }
            self.count("closed");
            let report = vec![change(flow, ChangeKind::Remove, epoch)];
            self.input(index, |machine, now| machine.handle_changes(now, report));
        }
    }

    /// A client connects, with addresses and ports that may have been used before.
    fn open(&mut self) {
        let free = self.flows.iter().find(|flow| {
            let busy = |node: &Node| {
                node.kernel
                    .get(flow)
                    .is_some_and(|entry| entry.state != State::Moved)
            };
            !self.steering.contains_key(flow) && !self.nodes.iter().any(busy)
        });
        let Some(&flow) = free else {
            return;
        };
        let index = self.rng.index(self.nodes.len());
        if self.nodes[index].machine.is_none() {
            return;
        }
        self.count("opened");
        let (state, epoch, peer) = (State::Owned, 0, NodeId(0));
        self.nodes[index]
            .kernel
            .insert(flow, Entry { state, epoch, peer });
        let (content, restored) = (0, true);
        self.nodes[index]
            .sockets
            .insert(flow, Socket { content, restored });
        let truth = self.truths.entry(flow).or_default();
        truth.alive = true;
        truth.content = 0;
        let report = vec![change(flow, ChangeKind::Establish, 1)];
        self.input(index, |machine, now| machine.handle_changes(now, report));
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

fn change(flow: Flow, kind: ChangeKind, epoch: u32) -> Change {
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
