//! The events of a group whose conductors balance it.

use super::ConductorBug;
use super::moves::Move;
use super::node::{CAPACITY, SimulatedNode};
use super::oracle::{Oracle, SETTLED_AFTER};
use super::plan::{BalancePolicies, ConductorAction, ConductorRunConfig, CrashPoint};
use crate::Violation;
use crate::event_queue::FutureEvents;
use crate::node_group::{GroupRunOutcome, node_id};
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::conductor::{
    Conductor, ConductorConfig, Event as ConductorEvent, LoadSample, Output, PlacementRules,
    Policies, ProcessSample,
};
use holdfast_proto::view::View;
use holdfast_wire::NodeId;
use holdfast_wire::conductor_frames::{ConductorFrame, NodeDemand, ProcessKey};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most events of a run for each node; a run with more never comes to rest.
const EVENTS_PER_NODE_MAX: u64 = 2_500_000;
/// Time between two samples of a node.
const SAMPLE_INTERVAL: Time = Time::from_micros(1_000_000);
/// Memory of each process.
const PROCESS_MEMORY_KIB: u64 = 1 << 10;
/// Number of further processes for which a node has memory if memory is plentiful.
const ROOM_PLENTIFUL: usize = 1 << 20;
/// Number of the guest, a host outside the group.
pub(super) const GUEST: NodeId = NodeId(60_000);

/// A future event of the group of conductors.
#[derive(Debug)]
pub(super) enum Event {
    Deliver {
        from: NodeId,
        to: usize,
        frame: Box<ConductorFrame>,
    },
    Wake {
        node: usize,
        incarnation: u64,
        at: Time,
    },
    Sample(usize),
    MoveEnds(u64),
    Start(usize),
    Planned(ConductorAction),
    /// All faults end.
    Heal,
    /// The guest sends a frame.
    Guest,
    /// The central planner decides.
    CentralPlan,
    /// Loads must be even from now on.
    BalanceDeadline,
    /// No process moves from now on.
    QuietBegins,
    /// The end of the run.
    End,
}

impl Event {
    /// Returns a key that mostly distinguishes events at the same time.
    fn key(&self) -> u64 {
        let (kind, a, b) = match self {
            Event::Deliver { from, to, .. } => (0, usize::from(from.0), *to),
            Event::Wake { node, .. } => (1, *node, 0),
            Event::Sample(node) => (2, *node, 0),
            Event::MoveEnds(number) => (3, *number as usize, 0),
            Event::Start(node) => (4, *node, 0),
            Event::Planned(_)
            | Event::Heal
            | Event::BalanceDeadline
            | Event::QuietBegins
            | Event::End => (5, 0, 0),
            Event::Guest => (6, 0, 0),
            Event::CentralPlan => (7, 0, 0),
        };
        kind << 40 | (a as u64) << 20 | b as u64
    }
}

#[derive(Debug)]
pub(super) struct ConductorWorld<'a> {
    pub(super) config: &'a ConductorRunConfig,
    /// True if no load changes by itself.
    pub(super) is_calm: bool,
    pub(super) now: Time,
    pub(super) random: Random,
    pub(super) nodes: Vec<SimulatedNode>,
    queue: FutureEvents<Event>,
    pub(super) moves: BTreeMap<u64, Move>,
    pub(super) moves_begun: u64,
    pub(super) view_epoch: u64,
    /// Factor of each process's demand, after surges.
    surges: Vec<f64>,
    pub(super) surged_at: Option<Time>,
    /// The point at which the next daemon dies.
    crash_point: Option<CrashPoint>,
    /// True while frames are lost and repeated.
    hostile: bool,
    /// True until the end of all faults.
    is_faulty: bool,
    pub(super) oracle: Oracle,
    /// Number of moves before the quiet time.
    pub(super) moves_before_quiet: Option<u64>,
    is_over: bool,
    violation: Option<Violation>,
    counts: BTreeMap<String, u64>,
    events: u64,
    digest: u64,
    seed: u64,
    trace: Option<Vec<String>>,
}

impl<'a> ConductorWorld<'a> {
    /// Creates a group whose nodes start within a second.
    pub(super) fn new(
        config: &'a ConductorRunConfig,
        seed: u64,
        with_trace: bool,
    ) -> ConductorWorld<'a> {
        let mut world = ConductorWorld {
            config,
            is_calm: config.is_calm(),
            now: Time::ZERO,
            random: Random::new(seed),
            nodes: (0..config.nodes)
                .map(|index| SimulatedNode::new(config, index))
                .collect(),
            queue: FutureEvents::default(),
            moves: BTreeMap::new(),
            moves_begun: 0,
            view_epoch: 1,
            surges: vec![1.0; config.processes.len()],
            surged_at: None,
            crash_point: None,
            hostile: config.hostile,
            is_faulty: true,
            oracle: Oracle::default(),
            moves_before_quiet: None,
            is_over: false,
            violation: None,
            counts: BTreeMap::new(),
            events: 0,
            digest: 0,
            seed,
            trace: with_trace.then(Vec::new),
        };
        for node in 0..config.nodes {
            let at = Time::from_micros(world.random.between(0, 1_000_000));
            world.queue.push(at, Event::Start(node));
            world.queue.push(at, Event::Sample(node));
        }
        for (at, action) in &config.plan {
            world.queue.push(*at, Event::Planned(*action));
        }
        if config.guest {
            world.queue.push(SAMPLE_INTERVAL, Event::Guest);
        }
        if config.policies == BalancePolicies::Central {
            world.schedule_central_planner();
        }
        world.queue.push(config.faults_end, Event::Heal);
        world
    }

    /// Runs to the end.
    pub(super) fn run(&mut self) -> Result<GroupRunOutcome, Violation> {
        self.run_until(Time(u64::MAX));
        match self.violation.take() {
            Some(violation) => Err(violation),
            None => Ok(GroupRunOutcome {
                counts: std::mem::take(&mut self.counts),
                events: self.events,
                digest: self.digest,
            }),
        }
    }

    /// Runs to a time, to the end, or to the first violation.
    pub(super) fn run_until(&mut self, end: Time) {
        while self.violation.is_none()
            && !self.is_over
            && let Some((at, event)) = self.queue.pop_until(end)
        {
            self.now = at;
            self.events += 1;
            self.mix_random(&event);
            self.add_to_trace(|| format!("{event:?}"));
            if self.events > EVENTS_PER_NODE_MAX * self.nodes.len() as u64 {
                self.set_violation("the group never comes to rest".to_owned());
            }
            self.handle(event);
        }
    }

    /// Returns the number of events so far.
    pub(super) fn events(&self) -> u64 {
        self.events
    }

    /// Takes the first violation.
    pub(super) fn violation(&mut self) -> Option<Violation> {
        self.violation.take()
    }

    pub(super) fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().unwrap_or_default()
    }

    /// Makes the random numbers of an event depend on its time and kind, not on the number of earlier events: omitting a
    /// step of a plan changes only events that the step causes.
    fn mix_random(&mut self, event: &Event) {
        let at = self.now.0;
        let mixed = self.digest.rotate_left(5) ^ at;
        self.digest = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed_key = event.key().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let time = at.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.random = Random::new(self.seed ^ mixed_key.rotate_left(23) ^ time);
    }

    pub(super) fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub(super) fn set_violation(&mut self, description: String) {
        let at = self.now;
        self.violation.get_or_insert(Violation { at, description });
    }

    fn add_to_trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:.6} {}", self.now.as_secs_f64(), line()));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Deliver { from, to, frame } => self.deliver(from, to, *frame),
            Event::Wake {
                node,
                incarnation,
                at,
            } => {
                let woken = &self.nodes[node];
                let is_awaited = woken.next_wake == Some(at) && woken.incarnation == incarnation;
                if is_awaited && !self.has_bug(ConductorBug::NoTimers) {
                    self.nodes[node].next_wake = None;
                    self.drive(node, Conductor::handle_timeout);
                }
            }
            Event::Sample(node) => self.sample(node),
            Event::MoveEnds(number) => self.end_move(number),
            Event::Start(node) => self.start(node),
            Event::Planned(action) => self.execute(action),
            Event::Heal => self.heal(),
            Event::Guest => self.send_guest_frame(),
            Event::CentralPlan => self.plan_centrally(),
            Event::BalanceDeadline => {
                self.count("loads are even");
                self.check_tolerance();
            }
            Event::QuietBegins => self.moves_before_quiet = Some(self.moves_begun),
            Event::End => {
                self.check_end();
                self.is_over = true;
            }
        }
    }

    pub(super) fn has_bug(&self, bug: ConductorBug) -> bool {
        self.config.bug == Some(bug)
    }

    pub(super) fn schedule(&mut self, at: Time, event: Event) {
        self.queue.push(at, event);
    }

    /// Gives a live daemon's state machine an input, and carries out its outputs.
    pub(super) fn drive(&mut self, node: usize, give: impl FnOnce(&mut Conductor, Duration)) {
        let clock = self.nodes[node].clock(self.now);
        let Some(machine) = self.nodes[node].machine.as_mut() else {
            return;
        };
        give(machine, clock);
        self.carry_out(node);
    }

    fn carry_out(&mut self, node: usize) {
        let next_output = |world: &mut Self| {
            let machine = world.nodes[node].machine.as_mut();
            machine.and_then(Conductor::poll_output)
        };
        while let Some(output) = next_output(self) {
            self.add_to_trace(|| format!("n{}: {output:?}", node + 1));
            match output {
                Output::Send { to, frame } => self.send(node, to, frame),
                Output::BeginMove { id, process, to } => self.begin_move(node, id, process, to),
                Output::Event(event) => self.on_event(node, event),
            }
        }
        self.schedule_wake(node);
    }

    fn schedule_wake(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        let Some(machine) = &state.machine else {
            return;
        };
        let at = state.time_of(machine.poll_timeout()).max(self.now);
        let is_earlier = state
            .next_wake
            .is_none_or(|wake| at < wake || wake <= self.now);
        if is_earlier {
            state.next_wake = Some(at);
            let incarnation = state.incarnation;
            let event = Event::Wake {
                node,
                incarnation,
                at,
            };
            self.queue.push(at, event);
        }
    }

    fn on_event(&mut self, node: usize, event: ConductorEvent) {
        let name = match event {
            ConductorEvent::Declined { reason, .. } => {
                let text = format!("{reason:?}");
                let kind = text.split(' ').next().unwrap_or_default().to_owned();
                format!("declined: {kind}")
            }
            ConductorEvent::Audited(record) => {
                let text = format!("{:?}", record.outcome);
                let kind = text.split(['(', ' ']).next().unwrap_or_default().to_owned();
                format!("outcome: {kind}")
            }
            ConductorEvent::HistoriesChanged => {
                let clock = self.nodes[node].clock(self.now);
                if let Some(machine) = &self.nodes[node].machine {
                    let histories = machine.process_histories(clock);
                    self.nodes[node].histories = (self.now, histories);
                }
                return;
            }
            ConductorEvent::Stays(_) => "no beneficial move".to_owned(),
            ConductorEvent::Observed(_) => "load observed".to_owned(),
            ConductorEvent::DrainEnded(_) => "drain ended".to_owned(),
            ConductorEvent::Ignored { reason, .. } => format!("ignored: {reason}"),
            ConductorEvent::DeclinedOffer { .. } => return,
        };
        self.count(name);
    }

    /// Returns the present view.
    fn view(&self) -> View {
        let members = (0..self.nodes.len()).filter(|node| self.nodes[*node].is_member);
        let members: Vec<NodeId> = members.map(node_id).collect();
        let contact = members.first().copied().unwrap_or(node_id(0));
        let mut view = View::configured(contact, members);
        view.epoch = self.view_epoch;
        view
    }

    /// Tells all living daemons the present view.
    pub(super) fn publish_view(&mut self) {
        self.view_epoch += 1;
        let view = self.view();
        for node in 0..self.nodes.len() {
            let is_member = self.nodes[node].is_member;
            self.drive(node, |machine, now| match is_member {
                true => machine.handle_view(now, view.clone()),
                false => machine.handle_removal(now),
            });
        }
    }

    /// Starts a dead daemon.
    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() {
            return;
        }
        let incarnation = self.nodes[node].incarnation;
        let mut config = ConductorConfig::new(node_id(node), incarnation + 1);
        config.random_seed = self.random.number();
        config.calm_down = super::oracle::CALM_DOWN.into();
        if self.has_bug(ConductorBug::NoMoveLimit) {
            config.moves_per_minute_max *= 10;
        }
        if self.has_bug(ConductorBug::NoCalmDown) {
            config.calm_down = Duration::ZERO;
        }
        match self.config.policies {
            BalancePolicies::Default => {}
            BalancePolicies::Paper => config.policies = Policies::PAPER,
            BalancePolicies::Central | BalancePolicies::Off => config.is_balancing = false,
        }
        if self.has_bug(ConductorBug::NoPrediction) {
            config.policies.predicts = false;
        }
        let is_restart = incarnation > 0;
        let now = self.nodes[node].clock(self.now);
        let started_at = match self.has_bug(ConductorBug::RestartForgetsMoves) && is_restart {
            true => now - Duration::from_secs(100),
            false => now,
        };
        let mut view = self.view();
        if !self.nodes[node].is_member {
            view = view.without_nodes();
        }
        let mut machine = Conductor::new(started_at, config, view);
        if !self.has_bug(ConductorBug::ForgetsHistories) {
            let histories = self.nodes[node].aged_histories(self.now);
            machine.handle_process_histories(now, &histories);
        }
        machine.handle_moves_under_way(now, self.moves_of(node));
        let state = &mut self.nodes[node];
        (state.machine, state.next_wake, state.negotiates_since) = (Some(machine), None, None);
        let is_drained = state.is_drained;
        self.drive(node, |machine, now| {
            if is_drained {
                machine.handle_drain(now, None);
            }
        });
    }

    /// Kills a daemon, which restarts soon. Moves under way go on without it.
    pub(super) fn crash(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        if state.machine.take().is_none() {
            return;
        }
        state.incarnation += 1;
        (state.next_wake, state.negotiates_since) = (None, None);
        let delay = Time::from_micros(self.random.between(50_000, 5_000_000));
        self.queue.push(self.now + delay, Event::Start(node));
    }

    /// Kills the node's daemon if that is planned for this point. Returns true if the daemon dies.
    pub(super) fn crash_at(&mut self, point: CrashPoint, node: usize) -> bool {
        let dies = self.crash_point == Some(point) && self.nodes[node].machine.is_some();
        if dies {
            self.crash_point = None;
            self.count(format!("crash at {point:?}"));
            self.crash(node);
        }
        dies
    }

    fn execute(&mut self, action: ConductorAction) {
        match action {
            ConductorAction::CrashAt(point) => self.crash_point = Some(point),
            ConductorAction::Isolate(node) => self.nodes[node].is_isolated = true,
            ConductorAction::Reconnect(node) => self.nodes[node].is_isolated = false,
            ConductorAction::Remove(node) | ConductorAction::Return(node) => {
                self.nodes[node].is_member = action == ConductorAction::Return(node);
                self.publish_view();
            }
            ConductorAction::Drain(node) => {
                let others = self.nodes.iter().filter(|node| !node.is_drained).count();
                if others > 2 {
                    self.set_drained(node, true);
                }
            }
            ConductorAction::Undrain(node) => self.set_drained(node, false),
            ConductorAction::Surge(node) => {
                for process in self.nodes[node].processes.clone() {
                    self.surges[process] = 2.0;
                }
                self.surged_at = Some(self.now);
            }
            ConductorAction::Overload | ConductorAction::Relieve => {
                let is_overload = action == ConductorAction::Overload;
                self.surges.fill(if is_overload { 3.0 } else { 1.0 });
                self.surged_at = Some(self.now);
                if is_overload {
                    self.count("all nodes are overloaded");
                }
            }
        }
    }

    fn set_drained(&mut self, node: usize, is_drained: bool) {
        self.nodes[node].is_drained = is_drained;
        if self.has_bug(ConductorBug::DrainIsLost) {
            return;
        }
        self.drive(node, |machine, now| match is_drained {
            true => drop(machine.handle_drain(now, None)),
            false => machine.handle_undrain(now),
        });
    }

    /// Ends all faults: hostile frames, isolated or removed nodes, dead daemons.
    fn heal(&mut self) {
        (self.hostile, self.is_faulty, self.crash_point) = (false, false, None);
        for node in 0..self.nodes.len() {
            self.nodes[node].is_isolated = false;
            self.nodes[node].is_member = true;
            self.start(node);
        }
        self.publish_view();
        self.set_deadlines();
    }

    /// Returns true while frames are lost and repeated.
    pub(super) fn is_hostile(&self) -> bool {
        self.hostile
    }

    pub(super) fn is_faulty(&self) -> bool {
        self.is_faulty
    }

    /// Returns true if loads have grown since the start.
    pub(super) fn has_surged(&self) -> bool {
        self.surged_at.is_some()
    }

    /// Returns the present demand of a process, without noise.
    pub(super) fn process_mean(&self, process: usize) -> f64 {
        self.config.processes[process].demand.mean(self.now) * self.surges[process]
    }

    /// Returns the present load of a node without noise, in percent points.
    pub(super) fn node_points(&self, node: usize) -> f64 {
        let processes = self.nodes[node].processes.iter();
        let used: f64 = processes.map(|process| self.process_mean(*process)).sum();
        used / f64::from(CAPACITY) * 100.0
    }

    fn sample(&mut self, node: usize) {
        self.schedule(self.now + SAMPLE_INTERVAL, Event::Sample(node));
        let mut processes = Vec::with_capacity(self.nodes[node].processes.len());
        for index in &self.nodes[node].processes {
            let process = &self.config.processes[*index];
            let used = process.demand.measure(self.now, &mut self.random);
            let used = f64::from(used) * self.surges[*index];
            processes.push(ProcessSample {
                key: ProcessKey(*index as u64 + 1),
                // A float-to-integer conversion saturates.
                used: used.round() as u32,
                memory_kib: PROCESS_MEMORY_KIB,
                clients: 10,
                freeze: Duration::from_millis(5),
                rules: PlacementRules {
                    is_pinned: process.is_pinned && !self.has_bug(ConductorBug::IgnoresPins),
                    affinity_label: None,
                    anti_affinity_label: process.anti_affinity_label,
                },
                blocked: None,
            });
        }
        let sample = LoadSample {
            demand: NodeDemand {
                used: processes.iter().map(|process| process.used).sum(),
                capacity: CAPACITY,
            },
            memory_free_kib: self.memory_free_kib(processes.len()),
            processes,
        };
        self.drive(node, |machine, now| machine.handle_sample(now, sample));
        self.check_settled(node);
    }

    /// Returns the memory that a node with so many processes has free.
    fn memory_free_kib(&self, processes: usize) -> u64 {
        let room = match self.has_bug(ConductorBug::OverstatesMemory) {
            true => None,
            false => self.config.room,
        };
        let free = room.map_or(ROOM_PLENTIFUL, |room| room.saturating_sub(processes));
        free as u64 * PROCESS_MEMORY_KIB
    }

    /// Checks that no offer stays open.
    fn check_settled(&mut self, node: usize) {
        let is_idle = self.nodes[node]
            .machine
            .as_ref()
            .is_none_or(Conductor::is_idle);
        if is_idle || self.moves_of(node) > 0 {
            self.nodes[node].negotiates_since = None;
            return;
        }
        let since = *self.nodes[node].negotiates_since.get_or_insert(self.now);
        if self.now.since(since) > SETTLED_AFTER {
            self.set_violation(format!("an offer stays open at n{}", node + 1));
        }
    }
}
