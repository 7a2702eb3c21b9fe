//! A group with daemons that hand flows off.

use super::node::{Node, State};
use super::{Bug, Config, Own};
use crate::group::{self, Core, client, pairs};
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::handoff::{Command, Completion, Event, Handoff, Token};
use holdfast_wire::{Flow, Frame, Record};
use std::collections::BTreeMap;

/// An action of a daemon for its state machine.
#[derive(Debug)]
pub(super) enum Work {
    Effect { token: Token, index: usize },
    Arbitrate { token: Token },
    Complete { token: Token },
}

/// The expected state of a flow, independent of its location.
#[derive(Debug, Default)]
pub(super) struct Truth {
    pub(super) alive: bool,
    /// Number of bytes it has processed, all in the one socket that may send.
    pub(super) content: u64,
    pub(super) epoch: u32,
    pub(super) record: Option<Record>,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) core: Core<Handoff, Work>,
    pub(super) nodes: Vec<Node>,
    pub(super) flows: Vec<Flow>,
    pub(super) truths: BTreeMap<Flow, Truth>,
    pub(super) bug: Option<Bug>,
    pub(super) batch_flows_max: usize,
}

impl group::World for World {
    type Own = Own;
    type Machine = Handoff;
    type Event = Work;

    fn new(config: &Config, seed: u64) -> World {
        let mut world = World {
            core: Core::new(config, seed),
            nodes: (0..config.nodes).map(|_| Node::default()).collect(),
            flows: (0..config.flows as u64).map(client).collect(),
            truths: BTreeMap::new(),
            bug: config.own.bug,
            batch_flows_max: config.own.batch_flows_max,
        };
        for node in 0..config.nodes {
            world.restart(node);
        }
        for (a, b) in pairs(config.nodes) {
            world.connect(a, b);
        }
        for _ in 0..config.flows {
            let node = world.core.random.below(config.nodes);
            world.connects(node);
        }
        world
    }

    fn core(&mut self) -> &mut Core<Handoff, Work> {
        &mut self.core
    }

    fn timers_fire(&self) -> bool {
        self.bug != Some(Bug::NoTimers)
    }

    fn send(&mut self, from: usize, to: usize, frame: Frame) {
        self.send_frame(from, to, frame);
    }

    fn deliver(&mut self, from: usize, to: usize, frame: Frame) {
        self.deliver_frame(from, to, frame);
    }

    fn begin(&mut self, node: usize, command: Command) {
        self.begin_command(node, command);
    }

    fn event(&mut self, node: usize, event: Event) {
        self.told(node, event);
    }

    fn step(&mut self, node: usize, event: Work) {
        match event {
            Work::Effect { token, index } => self.effect(node, token, index),
            Work::Arbitrate { token } => self.arbitrate(node, token),
            Work::Complete { token } => {
                if let Some(running) = self.nodes[node].running.remove(&token) {
                    let results = running.results;
                    let completion = Completion { token, results };
                    self.input(node, |machine, now| machine.handle_done(now, completion));
                }
            }
        }
    }

    fn crash(&mut self, node: usize) {
        self.core.count("crash");
        let entries = self.nodes[node].kernel.values();
        let states: Vec<State> = entries.map(|entry| entry.state).collect();
        for state in states {
            self.core.count(&format!("crash with a flow {state:?}"));
        }
        self.nodes[node].crash();
        self.core.kill(node);
    }

    fn restart(&mut self, node: usize) {
        self.begin_daemon(node);
        self.core.dial(node);
    }

    fn request(&mut self, random: &mut Random) {
        self.ask(random);
    }

    /// Does nothing: a handoff cannot be cancelled.
    fn cancel(&mut self) {}

    fn work(&mut self) {
        self.serve();
    }

    fn close(&mut self, random: &mut Random) {
        let flow = self.flows[random.below(self.flows.len())];
        self.close_flow(flow);
    }

    fn open(&mut self, random: &mut Random) {
        let node = random.below(self.nodes.len());
        self.connects(node);
    }

    /// Does nothing: there are no processes.
    fn kill(&mut self, _: &mut Random) {}

    fn check(&mut self) -> Result<(), String> {
        self.check_dirty()
    }

    fn check_end(&mut self) -> Result<(), String> {
        self.check_rest()
    }
}

impl World {
    fn effect(&mut self, node: usize, token: Token, index: usize) {
        let fails = self.core.fails();
        let of = &mut self.nodes[node];
        let Some(mut running) = of.running.remove(&token) else {
            return;
        };
        let random = &mut self.core.random;
        let flow = of.effect(&mut running, index, random, fails, self.bug);
        self.core.dirty.push(flow);
        if running.left == 0 {
            self.complete_within(node, token, 100);
        }
        self.nodes[node].running.insert(token, running);
    }

    /// Schedules the report to the state machine that a command is done, at most `most_us` microseconds later.
    pub(super) fn complete_within(&mut self, node: usize, token: Token, most_us: u64) {
        let at = self.core.now + self.core.micros(0, most_us);
        self.core.own(node, at, Work::Complete { token });
    }
}

/// Returns whole seconds, as in the daemon's epoch floor.
pub(super) fn seconds(now: Time) -> u32 {
    now.as_secs_f64() as u32
}
