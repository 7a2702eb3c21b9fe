//! A group with daemons that hand flows off.

use super::liar::Liar;
use super::node::{KernelFlowState, SimulatedNode};
use super::{HandoffBug, HandoffRunConfig, HandoffSpecificConfig};
use crate::node_group::{self, GroupCore, RebuildingWorld as _, TableRebuilds, client_flow, pairs};
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::handoff::{Command, CommandToken, Completion, Event, Handoff};
use holdfast_proto::view::View;
use holdfast_wire::{Flow, Frame, OwnershipRecord};
use std::collections::BTreeMap;

/// An action of a daemon for its state machine.
#[derive(Debug)]
pub(super) enum HandoffDaemonAction {
    Effect {
        token: CommandToken,
        index: usize,
    },
    Arbitrate {
        token: CommandToken,
    },
    Complete {
        token: CommandToken,
    },
    /// The group's membership has a new view.
    HearView(View),
    /// The holder considers the waiting requests of a node again.
    RetryDeferred {
        from: usize,
    },
    WakeRebuild,
}

/// The expected state of a flow, independent of its location.
#[derive(Debug, Default)]
pub(super) struct ExpectedFlow {
    pub(super) alive: bool,
    /// Number of bytes it has processed, all in the one socket that may send.
    pub(super) content: u64,
    pub(super) epoch: u32,
    pub(super) record: Option<OwnershipRecord>,
}

#[derive(Debug)]
pub(super) struct HandoffWorld {
    pub(super) core: GroupCore<Handoff, HandoffDaemonAction>,
    pub(super) nodes: Vec<SimulatedNode>,
    pub(super) flows: Vec<Flow>,
    pub(super) expected_flows: BTreeMap<Flow, ExpectedFlow>,
    pub(super) bug: Option<HandoffBug>,
    pub(super) batch_flows_max: usize,
    pub(super) rebuilds: TableRebuilds,
    pub(super) liar: Option<Liar>,
}

impl node_group::GroupWorld for HandoffWorld {
    type Specific = HandoffSpecificConfig;
    type Machine = Handoff;
    type Event = HandoffDaemonAction;

    fn new(config: &HandoffRunConfig, seed: u64) -> HandoffWorld {
        let mut world = HandoffWorld {
            core: GroupCore::new(config, seed),
            nodes: (0..config.nodes)
                .map(|_| SimulatedNode::default())
                .collect(),
            flows: (0..config.flows as u64).map(client_flow).collect(),
            expected_flows: BTreeMap::new(),
            bug: config.specific.bug,
            batch_flows_max: config.specific.batch_flows_max,
            rebuilds: TableRebuilds::new(config.nodes, config.holder),
            liar: config.specific.liar.map(Liar::new),
        };
        for node in 0..config.nodes {
            world.restart(node);
        }
        for (a, b) in pairs(config.nodes) {
            world.connect(a, b);
        }
        for _ in 0..config.flows {
            let node = world.core.random.below(config.nodes);
            world.connect_client(node);
        }
        world
    }

    fn core(&mut self) -> &mut GroupCore<Handoff, HandoffDaemonAction> {
        &mut self.core
    }

    fn timers_fire(&self) -> bool {
        self.bug != Some(HandoffBug::NoTimers)
    }

    fn send(&mut self, from: usize, to: usize, frame: Frame) {
        self.send_frame(from, to, frame);
    }

    fn deliver(&mut self, from: usize, to: usize, frame: Frame) {
        self.deliver_frame(from, to, frame);
    }

    fn start_command(&mut self, node: usize, command: Command) {
        self.begin_command(node, command);
    }

    fn handle_event(&mut self, node: usize, event: Event) {
        self.on_event(node, event);
    }

    fn execute_action(&mut self, node: usize, event: HandoffDaemonAction) {
        match event {
            HandoffDaemonAction::Effect { token, index } => self.execute_effect(node, token, index),
            HandoffDaemonAction::Arbitrate { token } => self.arbitrate(node, token),
            HandoffDaemonAction::HearView(view) => self.hear_view(node, view),
            HandoffDaemonAction::RetryDeferred { from } => self.retry_deferred(node, from),
            HandoffDaemonAction::WakeRebuild => self.wake_rebuild(node),
            HandoffDaemonAction::Complete { token } => {
                if let Some(running) = self.nodes[node].running.remove(&token) {
                    let results = running.results;
                    let completion = Completion { token, results };
                    self.drive_machine(node, |machine, now| {
                        machine.handle_completion(now, completion)
                    });
                }
            }
        }
    }

    fn crash(&mut self, node: usize) {
        self.core.count("crash");
        let entries = self.nodes[node].kernel.values();
        let states: Vec<KernelFlowState> = entries.map(|entry| entry.state).collect();
        for state in states {
            self.core.count(&format!("crash with a flow {state:?}"));
        }
        self.nodes[node].crash();
        self.rebuilds.crash(node);
        self.core.kill(node);
    }

    fn restart(&mut self, node: usize) {
        self.start_daemon(node);
        self.start_rebuild(node);
        self.core.connect_to_others(node);
    }

    fn request(&mut self, random: &mut Random) {
        self.request_handoff(random);
    }

    /// Does nothing: a handoff cannot be cancelled.
    fn cancel(&mut self) {}

    fn serve_all(&mut self) {
        self.serve();
        self.lie_to_holder();
    }

    fn close(&mut self, random: &mut Random) {
        let flow = self.flows[random.below(self.flows.len())];
        self.close_flow(flow);
    }

    fn open(&mut self, random: &mut Random) {
        let node = random.below(self.nodes.len());
        self.connect_client(node);
    }

    fn change_contact(&mut self, random: &mut Random) {
        self.change_contact_node(random);
    }

    /// Does nothing: there are no processes.
    fn kill(&mut self, _: &mut Random) {}

    fn check(&mut self) -> Result<(), String> {
        self.check_changed_flows()
    }

    fn check_end(&mut self) -> Result<(), String> {
        self.check_idle_state()
    }
}

impl HandoffWorld {
    fn execute_effect(&mut self, node: usize, token: CommandToken, index: usize) {
        let fails = self.core.command_fails();
        let node_state = &mut self.nodes[node];
        let Some(mut running) = node_state.running.remove(&token) else {
            return;
        };
        let random = &mut self.core.random;
        let flow = node_state.execute(&mut running, index, random, fails, self.bug);
        self.core.changed_flows.push(flow);
        self.reset_closed_flow(node, flow);
        if running.effects_left == 0 {
            self.complete_within(node, token, 100);
        }
        self.nodes[node].running.insert(token, running);
    }

    /// Schedules the report to the state machine that a command is done, at most `most_us` microseconds later.
    pub(super) fn complete_within(&mut self, node: usize, token: CommandToken, most_us: u64) {
        let at = self.core.now + self.core.micros(0, most_us);
        self.core
            .schedule_action(node, at, HandoffDaemonAction::Complete { token });
    }
}

/// Returns the epoch at which a flow that begins now starts. Epochs start from the clock, so that those of a pair of ports
/// grow from connection to connection also when the holder changes.
pub(super) fn first_epoch(now: Time) -> u32 {
    (now.as_secs_f64() * 10_000.0) as u32 + 1
}

/// Returns whole seconds, as in the daemon's epoch floor.
pub(super) fn seconds(now: Time) -> u32 {
    now.as_secs_f64() as u32
}
