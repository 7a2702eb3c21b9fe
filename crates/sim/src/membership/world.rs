//! The events of a group that runs itself.

use super::node::SimulatedNode;
use super::oracle::Oracle;
use super::view_store::{SimulatedStore, StoreExchange};
use super::{MembershipAction, MembershipBug, MembershipRunConfig};
use crate::Violation;
use crate::event_queue::FutureEvents;
use crate::node_group::GroupRunOutcome;
use crate::random::Random;
use crate::time::Time;
use holdfast_proto::membership::{
    Event as MembershipEvent, Membership, Output, RemovalCause, SaveToken, Standing, StoreAnswer,
    StoreRequest,
};
use holdfast_wire::NodeId;
use holdfast_wire::group_data::{GroupChange, GroupChangeId};
use holdfast_wire::membership_frames::{
    JoinNumber, Member, MembershipFrame, MembershipState, NodeName,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most events of a run; a run with more never comes to rest.
const EVENTS_MAX: u64 = 2_000_000;
/// Time of the guest's first frame.
const GUEST_BEGINS: Time = Time::from_micros(100_000);

/// A future event of the group.
#[derive(Debug)]
pub(super) enum Event {
    Deliver {
        from: usize,
        to: usize,
        frame: Box<MembershipFrame>,
    },
    Wake {
        node: usize,
        incarnation: u64,
        at: Time,
    },
    /// The disk has finished a save.
    DiskDone {
        node: usize,
        incarnation: u64,
        token: SaveToken,
        is_saved: bool,
    },
    /// The daemon hears that a save has ended.
    SaveEnded {
        node: usize,
        incarnation: u64,
        token: SaveToken,
        is_saved: bool,
    },
    /// A request reaches the store of views.
    StoreRequest {
        exchange: StoreExchange,
        request: Box<StoreRequest>,
    },
    /// The daemon hears the answer of the store of views.
    StoreAnswer {
        exchange: StoreExchange,
        answer: Box<StoreAnswer>,
    },
    Start(usize),
    Planned(MembershipAction),
    /// All faults end.
    Heal,
    /// One node must have a lease from now on.
    LeaseDeadline,
    /// The guest sends a frame.
    Guest,
}

impl Event {
    /// Returns a key that mostly distinguishes events at the same time.
    fn key(&self) -> u64 {
        let (kind, a, b) = match self {
            Event::Deliver { from, to, .. } => (0, *from, *to),
            Event::Wake { node, .. } => (1, *node, 0),
            Event::DiskDone { node, .. } => (2, *node, 0),
            Event::SaveEnded { node, .. } => (3, *node, 0),
            Event::Start(node) => (4, *node, 0),
            Event::Planned(_) | Event::Heal | Event::LeaseDeadline => (5, 0, 0),
            Event::Guest => (6, 0, 0),
            Event::StoreRequest { exchange, .. } => (7, exchange.node, 0),
            Event::StoreAnswer { exchange, .. } => (8, exchange.node, 0),
        };
        kind << 40 | (a as u64) << 20 | b as u64
    }

    /// Returns the daemon that handles the event, which waits while the daemon is stopped.
    fn daemon(&self) -> Option<usize> {
        match self {
            Event::Deliver { to, .. } => Some(*to),
            Event::Wake { node, .. } | Event::SaveEnded { node, .. } => Some(*node),
            Event::StoreAnswer { exchange, .. } => Some(exchange.node),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct MembershipWorld<'a> {
    pub(super) config: &'a MembershipRunConfig,
    pub(super) now: Time,
    pub(super) random: Random,
    pub(super) nodes: Vec<SimulatedNode>,
    pub(super) queue: FutureEvents<Event>,
    /// Pairs of sender and receiver between which all frames are lost.
    pub(super) cuts: BTreeSet<(usize, usize)>,
    /// True while frames are lost and repeated.
    pub(super) hostile: bool,
    /// True until the end of all faults.
    pub(super) is_faulty: bool,
    pub(super) oracle: Oracle,
    pub(super) store: SimulatedStore,
    /// Numbers that the guest was given.
    pub(super) guest_numbers: BTreeSet<NodeId>,
    /// The guest's last join.
    pub(super) guest_join: JoinNumber,
    violation: Option<Violation>,
    counts: BTreeMap<String, u64>,
    events: u64,
    digest: u64,
    pub(super) seed: u64,
    trace: Option<Vec<String>>,
}

impl<'a> MembershipWorld<'a> {
    /// Creates a group whose nodes start one after the other.
    pub(super) fn new(
        config: &'a MembershipRunConfig,
        seed: u64,
        with_trace: bool,
    ) -> MembershipWorld<'a> {
        let count = config.voters + config.server_nodes;
        let mut world = MembershipWorld {
            config,
            now: Time::ZERO,
            random: Random::new(seed),
            nodes: (0..count)
                .map(|index| SimulatedNode::new(config, index))
                .collect(),
            queue: FutureEvents::default(),
            cuts: BTreeSet::new(),
            hostile: config.hostile,
            is_faulty: true,
            oracle: Oracle::new(config.store),
            store: SimulatedStore::default(),
            guest_numbers: BTreeSet::new(),
            guest_join: JoinNumber(0),
            violation: None,
            counts: BTreeMap::new(),
            events: 0,
            digest: 0,
            seed,
            trace: with_trace.then(Vec::new),
        };
        for node in 0..count {
            let delay = world.random.between(0, 200_000);
            let at = Time::from_micros(if node == 0 { 0 } else { delay });
            world.queue.push(at, Event::Start(node));
        }
        for (at, action) in &config.plan {
            world.queue.push(*at, Event::Planned(*action));
        }
        if config.guest {
            world.queue.push(GUEST_BEGINS, Event::Guest);
        }
        world.queue.push(config.faults_end, Event::Heal);
        let deadline = config.faults_end + config.lease_deadline;
        world.queue.push(deadline, Event::LeaseDeadline);
        world
    }

    /// Runs to the end.
    pub(super) fn run(&mut self) -> Result<GroupRunOutcome, Violation> {
        let end = self.config.faults_end + self.config.agreement_deadline;
        self.run_until(end);
        if self.violation.is_none() {
            self.check_agreement();
        }
        match self.violation.take() {
            Some(violation) => Err(violation),
            None => Ok(GroupRunOutcome {
                counts: std::mem::take(&mut self.counts),
                events: self.events,
                digest: self.digest,
            }),
        }
    }

    /// Runs to a time, or to the first violation.
    pub(super) fn run_until(&mut self, end: Time) {
        while self.violation.is_none()
            && let Some((at, event)) = self.queue.pop_until(end)
        {
            self.now = at;
            self.events += 1;
            self.mix_random(&event);
            self.add_to_trace(|| format!("{event:?}"));
            if self.events > EVENTS_MAX {
                self.set_violation("the group never comes to rest".to_owned());
            }
            self.handle(event);
        }
        self.now = end;
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

    pub(super) fn count(&mut self, what: &str) {
        match self.counts.get_mut(what) {
            Some(count) => *count += 1,
            None => {
                self.counts.insert(what.to_owned(), 1);
            }
        }
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
        if let Some(node) = event.daemon()
            && self.nodes[node].stopped_until > self.now
        {
            let until = self.nodes[node].stopped_until;
            return self.queue.push(until, event);
        }
        match event {
            Event::Deliver { from, to, frame } => self.deliver(from, to, *frame),
            Event::Wake {
                node,
                incarnation,
                at,
            } => {
                let woken = &mut self.nodes[node];
                let is_awaited = woken.next_wake == Some(at) && woken.incarnation == incarnation;
                if is_awaited && self.config.bug != Some(MembershipBug::NoTimers) {
                    woken.next_wake = None;
                    self.drive(node, Membership::handle_timeout);
                }
            }
            Event::DiskDone {
                node,
                incarnation,
                token,
                is_saved,
            } if self.nodes[node].incarnation == incarnation => {
                self.finish_save(node, token, is_saved);
            }
            Event::SaveEnded {
                node,
                incarnation,
                token,
                is_saved,
            } if self.nodes[node].incarnation == incarnation => {
                let result = is_saved.then_some(()).ok_or_else(|| "disk full".to_owned());
                self.drive(node, |machine, now| {
                    machine.handle_saved(now, token, result)
                });
            }
            Event::DiskDone { .. } | Event::SaveEnded { .. } => {}
            Event::StoreRequest { exchange, request } => self.on_store_request(exchange, *request),
            Event::StoreAnswer { exchange, answer } => self.on_store_answer(&exchange, *answer),
            Event::Start(node) => self.start(node),
            Event::Planned(action) => self.execute(action),
            Event::Heal => self.heal(),
            Event::LeaseDeadline => self.check_lease_holder(),
            Event::Guest => self.send_guest_frame(),
        }
    }

    /// Gives a live daemon's state machine an input, and carries out its outputs.
    pub(super) fn drive(&mut self, node: usize, give: impl FnOnce(&mut Membership, Duration)) {
        let clock = self.nodes[node].clock;
        let Some(machine) = self.nodes[node].machine.as_mut() else {
            return;
        };
        give(machine, clock.read(self.now));
        self.carry_out(node);
    }

    fn carry_out(&mut self, node: usize) {
        let next_output = |world: &mut Self| {
            let machine = world.nodes[node].machine.as_mut();
            machine.and_then(Membership::poll_output)
        };
        while let Some(output) = next_output(self) {
            let name = self.nodes[node].name.clone();
            self.add_to_trace(|| format!("{name}: {output:?}"));
            match output {
                Output::Send { to, frame } => self.send(node, &to, frame),
                Output::Save { token, state } => self.begin_save(node, token, *state),
                Output::Store { token, request } => self.send_to_store(node, token, *request),
                Output::Event(event) => self.on_event(node, &event),
            }
        }
        if self.nodes[node].is_gone && self.nodes[node].machine.is_some() {
            self.crash(node);
        }
        self.schedule_wake(node);
    }

    fn schedule_wake(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        let due = state.machine.as_ref().and_then(Membership::poll_timeout);
        let Some(at) = due.map(|due| state.clock.time_of(due).max(self.now)) else {
            return;
        };
        if state.next_wake != Some(at) {
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

    fn begin_save(&mut self, node: usize, token: SaveToken, state: MembershipState) {
        let faults = self.config.faults;
        let is_slow = self.is_faulty && self.random.chance(faults.slow_commands);
        let delay = self
            .random
            .between(200, if is_slow { 400_000 } else { 3_000 });
        let is_failing = self.is_faulty && self.config.failing;
        let is_saved = !(is_failing && self.random.chance(faults.failed));
        let incarnation = self.nodes[node].incarnation;
        self.nodes[node].saving = Some((token, state));
        let event = Event::DiskDone {
            node,
            incarnation,
            token,
            is_saved,
        };
        self.queue.push(self.now + Time::from_micros(delay), event);
        if self.config.bug == Some(MembershipBug::VotesBeforeDisk) {
            self.end_save(node, token, true);
        }
    }

    fn finish_save(&mut self, node: usize, token: SaveToken, is_saved: bool) {
        let Some((_, state)) = self.nodes[node].saving.take_if(|(open, _)| *open == token) else {
            return;
        };
        if is_saved {
            self.write_disk(node, state);
        }
        if self.config.bug != Some(MembershipBug::VotesBeforeDisk) {
            self.end_save(node, token, is_saved);
        }
    }

    fn end_save(&mut self, node: usize, token: SaveToken, is_saved: bool) {
        let incarnation = self.nodes[node].incarnation;
        let event = Event::SaveEnded {
            node,
            incarnation,
            token,
            is_saved,
        };
        self.queue.push(self.now, event);
    }

    fn write_disk(&mut self, node: usize, mut state: MembershipState) {
        let former = self.nodes[node].disk.take();
        if self.config.bug == Some(MembershipBug::ForgetsCommit)
            && let Some(view) = former.and_then(|former| former.committed)
        {
            state.committed = Some(view);
        }
        self.oracle.on_disk_written(&self.nodes[node].name, &state);
        self.nodes[node].disk = Some(state);
    }

    fn on_event(&mut self, node: usize, event: &MembershipEvent) {
        let name = match event {
            MembershipEvent::View(_) => {
                let check = self.check_view(node);
                check.unwrap_or_else(|what| self.set_violation(what));
                return;
            }
            MembershipEvent::Lease { until } => return self.on_lease(node, *until),
            MembershipEvent::Joined { id } => {
                let node = &self.nodes[node];
                let check = self.oracle.on_joined(*id, &node.name, node.is_backup());
                check.unwrap_or_else(|what| self.set_violation(what));
                "joined".to_owned()
            }
            MembershipEvent::Removed { cause } => {
                let check = self.oracle.on_removed(&self.nodes[node].name, *cause);
                check.unwrap_or_else(|what| self.set_violation(what));
                let is_final = matches!(cause, RemovalCause::Left | RemovalCause::Operator);
                self.nodes[node].is_gone |= is_final;
                format!("removed: {cause:?}")
            }
            MembershipEvent::Ignored { frame, reason, .. } => format!("ignored: {frame}: {reason}"),
            MembershipEvent::JoinRefused { reason } => format!("join refused: {reason:?}"),
            MembershipEvent::ContactSilent { .. } => "contact silent".to_owned(),
            MembershipEvent::VotersSilent => "voters silent".to_owned(),
            MembershipEvent::TakeoverStarted { .. } => "takeover started".to_owned(),
            MembershipEvent::BackupSilent { .. } => "backup silent".to_owned(),
            MembershipEvent::ServerNodeSilent { .. } => "server node silent".to_owned(),
            MembershipEvent::SaveFailed { .. } => "save failed".to_owned(),
            MembershipEvent::StoreAnswers { is_answering } => {
                format!("store answers: {is_answering}")
            }
            MembershipEvent::StoreUnusable => {
                return self.set_violation("the store has an impossible view".to_owned());
            }
            MembershipEvent::GroupChangeEnded { id, result: Ok(_) } => {
                self.oracle.on_change_acknowledged(*id);
                "settings changed".to_owned()
            }
            MembershipEvent::GroupChangeEnded { .. } => "settings not changed".to_owned(),
            MembershipEvent::SettingsUnreadable { error, .. } => {
                return self.set_violation(error.to_string());
            }
            MembershipEvent::SettingsChanged { .. }
            | MembershipEvent::GroupChangeDecided { .. } => {
                return;
            }
        };
        self.count(&name);
    }

    /// Starts the daemon of a node, unless it runs or the node is gone.
    fn start(&mut self, node: usize) {
        if self.nodes[node].machine.is_some() || self.nodes[node].is_gone {
            return;
        }
        let (now, seed, bug) = (self.now, self.seed, self.config.bug);
        self.nodes[node].start(now, seed, bug);
        self.carry_out(node);
    }

    fn crash(&mut self, node: usize) {
        let is_saved = self.random.chance(0.5);
        if let Some(state) = self.nodes[node].crash(is_saved) {
            self.write_disk(node, state);
        }
    }

    fn execute(&mut self, action: MembershipAction) {
        let count = self.nodes.len();
        match action {
            // A shrunk config has fewer nodes than its plan.
            MembershipAction::Crash(node)
            | MembershipAction::Restart(node)
            | MembershipAction::Stop(node, _)
            | MembershipAction::Leave(node)
                if node >= count => {}
            MembershipAction::Crash(node) if self.nodes[node].machine.is_some() => {
                self.count_crash(node);
                self.crash(node);
            }
            MembershipAction::Crash(_) => {}
            MembershipAction::Restart(node) => self.start(node),
            MembershipAction::Cut(from, to) => self.cuts.extend([(from, to)]),
            MembershipAction::Mend(from, to) => self.cuts.retain(|cut| *cut != (from, to)),
            MembershipAction::Isolate(node) => {
                self.cut_where(|from, to| from == node || to == node)
            }
            MembershipAction::Reconnect(node) => {
                self.cuts.retain(|(from, to)| *from != node && *to != node);
            }
            MembershipAction::Partition(mask) => {
                self.cut_where(|from, to| (mask >> from) & 1 != (mask >> to) & 1);
            }
            MembershipAction::MendAll => self.cuts.clear(),
            MembershipAction::Stop(node, time) => {
                let until = &mut self.nodes[node].stopped_until;
                *until = (*until).max(self.now + time);
            }
            MembershipAction::Leave(node) => self.leave(node),
            MembershipAction::Remove { draw } => self.operate(draw, Operation::Remove),
            MembershipAction::Promote { draw } => self.operate(draw, Operation::Promote),
            MembershipAction::GroupData { draw } => self.change_settings(draw),
            MembershipAction::ServerNodeFailed { draw } => {
                self.operate(draw, Operation::ServerNodeFailed);
            }
            MembershipAction::StoreFails => self.store.is_down = true,
            MembershipAction::StoreReturns => self.store.is_down = false,
            MembershipAction::StoreCut(node) => self.store.cut.extend([node]),
            MembershipAction::StoreMended(node) => self.store.cut.retain(|cut| *cut != node),
        }
    }

    fn count_crash(&mut self, node: usize) {
        let machine = self.nodes[node].machine.as_ref();
        let standing = machine.map_or(Standing::Outside, Membership::standing);
        let saving = if self.nodes[node].saving.is_some() {
            ", saving"
        } else {
            ""
        };
        self.count(&format!("crash of {standing:?}{saving}"));
    }

    fn cut_where(&mut self, is_cut: impl Fn(usize, usize) -> bool) {
        let count = self.nodes.len();
        let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        self.cuts
            .extend(pairs.filter(|(from, to)| is_cut(*from, *to)));
    }

    /// Lets a node leave, unless only two voters are left.
    fn leave(&mut self, node: usize) {
        let machine = self.nodes[node].machine.as_ref();
        let view = machine.and_then(|machine| machine.voted_view());
        let is_needed =
            self.nodes[node].is_backup() && view.is_none_or(|view| view.voters.len() <= 2);
        if !is_needed && self.nodes[node].stopped_until <= self.now {
            // A node that crashes before the answer takes the answer for a removal.
            let name = self.nodes[node].name.clone();
            self.oracle.on_removal_requested(&name);
            self.drive(node, |machine, now| drop(machine.handle_leave(now)));
        }
    }

    /// Gives the contact node that serves a request of an operator.
    fn operate(&mut self, draw: u64, operation: Operation) {
        let Some(node) = self.serving_nodes().first().copied() else {
            return;
        };
        let Some(machine) = self.nodes[node].machine.as_ref() else {
            return;
        };
        if self.nodes[node].stopped_until > self.now {
            return;
        }
        let voters = machine
            .voted_view()
            .map_or(&[][..], |view| &view.voters[..]);
        let id = |member: &Member| member.id;
        let members = voters.iter().chain(machine.server_nodes());
        let names: BTreeMap<NodeId, NodeName> = members
            .map(|member| (member.id, member.name.clone()))
            .collect();
        let server_nodes: Vec<NodeId> = machine.server_nodes().map(id).collect();
        let backups: Vec<NodeId> = voters.iter().skip(1).map(id).collect();
        let choices = match operation {
            Operation::Remove if voters.len() > 2 => [backups, server_nodes].concat(),
            Operation::Remove | Operation::ServerNodeFailed => server_nodes,
            Operation::Promote => backups,
        };
        let Some(chosen) = choices.get(Random::new(draw).below(choices.len())).copied() else {
            return;
        };
        self.count(&format!("{operation:?}"));
        if let (Operation::Remove, Some(name)) = (operation, names.get(&chosen)) {
            self.oracle.on_removal_requested(name);
        }
        self.drive(node, |machine, now| {
            // A refusal is part of the simulation.
            let _ = match operation {
                Operation::Remove => machine.handle_remove(now, chosen),
                Operation::Promote => machine.handle_promote(now, chosen),
                Operation::ServerNodeFailed => machine.handle_server_node_failed(now, chosen),
            };
        });
    }

    /// Lets an operator change the group's settings at any node whose daemon runs.
    fn change_settings(&mut self, draw: u64) {
        let is_running = |node: &usize| {
            let node = &self.nodes[*node];
            node.machine.is_some() && node.stopped_until <= self.now
        };
        let running: Vec<usize> = (0..self.nodes.len()).filter(is_running).collect();
        let Some(node) = running.get(Random::new(draw).below(running.len())).copied() else {
            return;
        };
        self.count("GroupData");
        let change = GroupChange::SetWeights(Vec::new());
        self.drive(node, |machine, now| {
            // A node outside the group refuses.
            let _ = machine.handle_group_change(now, GroupChangeId(draw), change, None);
        });
    }

    /// Ends all faults: hostile frames, cuts, outages of the store, dead and stopped daemons.
    fn heal(&mut self) {
        (self.hostile, self.is_faulty) = (false, false);
        self.cuts.clear();
        self.store.cut.clear();
        self.store.is_down = false;
        for node in 0..self.nodes.len() {
            self.queue.push(self.now, Event::Start(node));
            self.nodes[node].stopped_until = Time::ZERO;
        }
    }
}

/// A request of an operator.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Remove,
    Promote,
    ServerNodeFailed,
}
